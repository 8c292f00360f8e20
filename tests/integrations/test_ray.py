"""Ray Train: workers that Ray starts, kills included, on a cluster of this machine alone."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import train
from ray.train.torch import TorchTrainer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.integrations.ranks import GUARD_S, ROOT, Seen, Steps, seen

WORLD, STEPS, SAVED, KILLED_IN = 2, 16, 8, 11

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(6 * GUARD_S),
    pytest.mark.filterwarnings("default"),  # Ray's own, in the process that starts workers
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Ray on this machine; its processes end with this one, if not before."""
    env = {
        "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled",
        # A busy machine takes longer than Ray's 30 s, and longer still to start workers at a niceness of 15.
        "RAY_raylet_start_wait_time_s": f"{GUARD_S:.0f}", "RAY_worker_niceness": "0",
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        local = {"include_dashboard": False, "log_to_driver": False, "_node_ip_address": "127.0.0.1"}
        ray.init(num_cpus=WORLD + 1, object_store_memory=2**27, **local)
        yield
        ray.shutdown()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Seen]:
    """Run the example on `workers`, the second of which is killed in its step `die_at`."""

    def run(name: str, die_at: int | None = None, workers: int = WORLD) -> Seen:
        folder = tmp_path / f"{name}.seen"
        folder.mkdir()

        class Watched(TorchTrainer):
            def __init__(self, work: Callable[[], None], **options: Any) -> None:
                def watched() -> None:
                    dies = die_at is not None and train.get_context().get_world_rank() == 1
                    if dies:  # Ray takes up a checkpoint some time after the report
                        register_optimizer_step_post_hook(lambda *_: train.get_all_reported_checkpoints())
                    register_optimizer_step_post_hook(Steps(folder, die_at if dies else None))
                    work()

                options["scaling_config"] = train.ScalingConfig(num_workers=workers)
                super().__init__(watched, **options)

        monkeypatch.setattr("ray.train.torch.TorchTrainer", Watched)
        monkeypatch.setattr(sys, "argv", ["with_ray.py", str(tmp_path / name)])
        runpy.run_path(str(ROOT / "examples" / "with_ray.py"), run_name="__main__")
        return seen([], folder)

    return run


def test_workers_that_ray_starts_again_after_a_kill_end_where_the_uninterrupted_ones_do(
    run: Callable[..., Seen],
) -> None:
    straight = run("straight")
    assert straight.carried == 2 * [list(range(1, STEPS + 1))]
    assert straight.parameters[0] == straight.parameters[1]

    killed = run("killed", die_at=KILLED_IN)
    again = list(range(SAVED + 1, STEPS + 1))
    survivor, victim = killed.carried
    assert victim == [*range(1, KILLED_IN + 1), *again]
    # The connection may break while the survivor still waits for that step's last message.
    assert survivor in (victim, [*range(1, KILLED_IN), *again])
    assert killed.parameters == straight.parameters


def test_one_worker_whose_model_ray_does_not_wrap_trains(run: Callable[..., Seen]) -> None:
    alone = run("alone", workers=1)
    assert alone.carried == [list(range(1, WORLD * STEPS + 1))]
