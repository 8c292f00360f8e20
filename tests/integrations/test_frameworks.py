"""Each framework trains with gradwire in every step, and a killed run goes on bit for bit.

`make test-integrations` installs the frameworks in an environment of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.ranks import GUARD_S, KILLED, ROOT, run

EXAMPLES = ["with_accelerate.py", "with_fabric.py", "with_lightning.py", "with_trainer.py"]
STEPS, SAVED, KILLED_IN = 16, 8, 11

pytestmark = [pytest.mark.process, pytest.mark.timeout(4 * GUARD_S)]  # three runs in a test


@pytest.mark.parametrize("example", EXAMPLES)
def test_gradwire_carries_every_step_and_a_killed_run_ends_where_the_uninterrupted_one_does(
    example: str, tmp_path: Path
) -> None:
    straight = run(example, tmp_path / "straight", tmp_path / "1")
    assert straight.codes == [0, 0], straight.printed
    assert straight.carried == 2 * [list(range(1, STEPS + 1))]
    assert "gradwire: topk(ratio=0.05" in straight.printed

    killed = run(example, tmp_path / "broken", tmp_path / "2", die_at=KILLED_IN)
    assert killed.codes == [KILLED, KILLED], killed.printed
    resumed = run(example, tmp_path / "broken", tmp_path / "3")
    assert resumed.codes == [0, 0], resumed.printed
    assert resumed.carried == 2 * [list(range(SAVED + 1, STEPS + 1))]
    assert len({*straight.parameters, *resumed.parameters}) == 1


@pytest.mark.parametrize(
    ("example", "variables"),
    [
        ("with_lightning.py", {"LOCAL_WORLD_SIZE": "1"}),
        ("with_trainer.py", {}),
    ],  # the first reads its ranks there
)
def test_one_process_ends_with_a_report_as_well(
    example: str, variables: dict[str, str], tmp_path: Path
) -> None:
    command = str(ROOT / "examples" / example), str(tmp_path / "checkpoints")
    done = alone(*command, folder=tmp_path, **variables)
    assert "one rank: nothing to send" in done


TWICE = """
import runpy, sys, torch.distributed as dist
example = runpy.run_path(sys.argv[1])
from lightning import Trainer
from torch.utils.data import DataLoader, TensorDataset
import torch

callback, module = example["GradwireCallback"]("topk(0.05)"), example["Classifier"]()
data = DataLoader(TensorDataset(torch.randn(64, 64), torch.zeros(64, dtype=torch.long)), batch_size=32)
for epochs in (1, 2):
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, callbacks=[callback], logger=False,
        enable_progress_bar=False, enable_checkpointing=False,
    )
    trainer.fit(module, data, ckpt_path=None if epochs == 1 else "saved.ckpt")
    trainer.save_checkpoint("saved.ckpt")
assert not dist.is_initialized()
print("step", callback.wire.report().step)
"""


def test_a_trainer_without_a_strategy_fits_twice_saves_and_resumes(tmp_path: Path) -> None:
    done = alone("-c", TWICE, str(ROOT / "examples" / "with_lightning.py"), folder=tmp_path)
    assert "step 4" in done


def alone(*words: str, folder: Path, **variables: str) -> str:
    """What one process prints that no launcher has started."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "", **variables}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_of_a_framework_is_run() -> None:
    found = {path.name for path in (ROOT / "examples").glob("with_*.py")}
    assert found == {*EXAMPLES, "with_ray.py"}, "Ray starts its own workers: test_ray.py"
