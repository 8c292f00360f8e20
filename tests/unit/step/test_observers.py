"""What observers of steps may do, and what becomes of their errors."""

from __future__ import annotations

import torch

from gradwire.comm import Comm, run_ranks
from gradwire.step.environment import ReducerEnvironment
from gradwire.step.step import Step
from tests.support.rig import Rig, flat, gradients


class Looking:
    """Notes what it hears, in order; in the steps `fails` its look raises."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        self.fails, self.heard = fails, list[str]()

    def before(self, step: Step, _env: ReducerEnvironment) -> None:
        self.heard.append(f"step {step.number}")
        step.unit_observers.append(self._look)

    def _look(self, _flat_buffer: object, unit: object, *_: object) -> None:
        self.heard.append(str(unit))
        if self.heard.count("step 1") in self.fails:
            raise MemoryError("no room to look")


def test_an_observer_hears_of_a_step_before_its_units_and_of_none_once_it_is_off() -> None:
    def rank(comm: Comm) -> list[str]:
        observer = Looking()
        rig = Rig(comm, "topk(ratio=0.1)", unit_elements=1500)
        for step, observers in enumerate([[], [observer], []]):
            rig.reducer.env.observers[:] = observers
            rig.step(gradients(comm.rank, step))
        assert len({*observer.heard}) == 1 + sum(
            len(flat_buffer.units) for flat_buffer in rig.reducer.layout.flat_buffers
        )
        return observer.heard

    (first, *units), other = run_ranks(2, rank)
    assert first == "step 1"
    assert len(units) > 1
    assert other == [first, *units]


def test_a_look_that_raises_fails_the_step_on_all_ranks_and_the_next_one_goes_on() -> None:
    def rank(comm: Comm) -> list[str]:
        rig = Rig(comm, "topk(ratio=0.1)", observers=[Looking((1,) if comm.rank == 1 else ())])
        rig.step(gradients(comm.rank, 0))
        before = rig.planes
        failed = rig.step(gradients(comm.rank, 1))
        assert all(torch.equal(plane, rig.planes[name]) for name, plane in before.items())
        again = rig.step(gradients(comm.rank, 1))
        return [type(failed.error).__name__, str(again.error), str(flat(again.mean).sum())]

    first, second, third = run_ranks(3, rank)
    assert [each[:2] for each in (first, second, third)] == [
        ["PeerFailed", "None"],
        ["MemoryError", "None"],
        ["PeerFailed", "None"],
    ]
    assert first[2] == second[2] == third[2]
