"""Each framework trains with gradwire in every step, and a killed run goes on bit for bit.

`make test-integrations` installs the frameworks in an environment of their own.
"""

from __future__ import annotations

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


def test_every_example_of_a_framework_is_run() -> None:
    found = {path.name for path in (ROOT / "examples").glob("with_*.py")}
    assert found == {*EXAMPLES, "with_ray.py"}, "Ray starts its own workers: test_ray.py"
