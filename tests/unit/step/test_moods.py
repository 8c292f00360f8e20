"""The outcomes of steps follow one another as the table says, and each row of it is seen."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from gradwire.comm import Comm, Pending, Round, run_ranks
from gradwire.errors import TransportError
from gradwire.placement import CommitTime
from gradwire.sources.nodes.level import Packing
from gradwire.step.moods import STEPS, Outcome
from gradwire.step.step import Step
from tests.support.rig import Rig, gradients


class Torn(Comm):
    """A comm whose link breaks in the n-th collective."""

    def __init__(self, comm: Comm, at: int) -> None:
        self._comm, self._left = comm, at
        self.rank, self.world = comm.rank, comm.world

    def issue(self, round_: Round, tensor: torch.Tensor, out: torch.Tensor) -> Pending:
        self._left -= 1
        if self._left == -1:
            raise TransportError("the link is gone")
        return self._comm.issue(round_, tensor, out)


def take(rig: Rig, *, finite: bool = True, failure: BaseException | None = None) -> None:
    """A step, until its outcome is known."""
    grads = gradients(0, 0)
    if not finite:
        grads["last.weight"][17] = torch.nan
    rig.step(grads, failures={0: failure})
    rig.reducer.commit_deferred()


def test_outcomes_follow_one_another_as_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[tuple[Outcome, Outcome]] = set()

    def noting(step: Step, name: str, value: object) -> None:
        before = step.__dict__.get(name)
        if isinstance(before, Outcome) and isinstance(value, Outcome):
            seen.add((before, value))
        step.__dict__[name] = value

    monkeypatch.setattr(Step, "__setattr__", noting)
    times: tuple[CommitTime, ...] = ("now", "late")

    def alone(comm: Comm) -> None:
        for commits, finite in product(times, (True, False)):
            take(Rig(comm, "topk(ratio=0.1)", commits=commits), finite=finite)
        take(Rig(comm, "topk(ratio=0.1)"), failure=ValueError("a sparse gradient"))
        for at in range(4):  # in an exchange, and in the vote
            take(Rig(Torn(comm, at), "dense"))

    def in_a_node(comm: Comm) -> None:
        for commits, finite in product(times, (True, False)):
            take(Rig(comm, "topk(ratio=0.1)", per_node=2, commits=commits), finite=finite)

    def unpack(*_: object) -> None:
        raise MemoryError("no room for means")

    run_ranks(1, alone)
    monkeypatch.setattr(Packing, "unpack", unpack)  # of a node, once the step has its outcome
    run_ranks(2, in_a_node)
    assert seen == {(one, other) for one, others in STEPS.items() for other in others}
