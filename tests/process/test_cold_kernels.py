"""Real ranks on a slow link choose on an empty kernel cache what they choose on a warm one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import gradwire

pytestmark = [pytest.mark.network, pytest.mark.process, pytest.mark.timeout(900), pytest.mark.rest]

SCRIPT = """
import json, logging, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
import gradwire

logging.basicConfig(level=logging.INFO)
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(256, 400), torch.nn.ReLU(), torch.nn.Linear(400, 10))
ddp = DDP(model, bucket_cap_mb=0.2)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
wire = gradwire.attach(ddp, optimizer, "auto(late=0.3)")
while not wire.settled:
    optimizer.zero_grad()
    ddp(torch.randn(16, 256)).square().mean().backward()
    optimizer.step()
report = wire.report()
if dist.get_rank() == 0:
    shown = [(each.verdict, each.late, each.measured_step_s) for each in report.choices]
    print(json.dumps({"recipe": report.recipe, "within_steps_s": report.compile_s, "choices": shown}))
dist.destroy_process_group()
"""


def _run(script: Path) -> tuple[dict[str, Any], str]:
    """What rank 0 found, and the log of all ranks."""
    options = ["--workers", "2", "--rate", "20mbit", "--mode", "backend"]
    # On an empty cache, the kernels of all candidates are compiled: a minute of a core, or more.
    done = gradwire("net", "run", *options, "--", sys.executable, str(script), within_s=600)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found, done.stderr


def test_an_empty_kernel_cache_changes_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight dense steps passed while kernels were compiled, and then a recipe was chosen that nobody knew.
    Now the dense steps of that time are not measured.
    """
    monkeypatch.setenv("GRADWIRE_COMPILE_FIRST", "0")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (cold, compiled), (warm, loaded) = _run(script), _run(script)
    for found in (cold, warm):
        assert "int4" in found["recipe"], "few bits are the fastest that lose nothing"
        assert found["within_steps_s"] == 0.0
        assert len(found["choices"]) > 2
        [ran] = [row for row in found["choices"] if row[0] == "runs"]
        assert None not in ran, "what runs was measured"
    assert "dense until its kernels are compiled" in compiled
    assert "kernels are compiled" not in loaded
