"""Steps without a verdict: what ordinary dense steps leave, in fewer collectives, and where they may run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gradwire.comm import Comm, Pending, Round, run_ranks
from gradwire.comm.base import DONE
from gradwire.engine.guard import Guard
from gradwire.engine.plain import LOOKS, PlainSteps
from gradwire.engine.step import Step
from gradwire.errors import TransportError
from gradwire.exchange.base import Finish
from gradwire.exchange.dense import Dense
from gradwire.measure.clock import now_s
from gradwire.moment import Moment
from gradwire.recipes import recipe
from tests.support.rig import ALONE, REVERSED, Outcome, Rig, _arrival, _means, gradients


class PlainRig(Rig):
    """A rig whose dense steps have no verdict."""

    def __init__(self, comm: Comm, text: str = "dense", **options: Any) -> None:
        super().__init__(comm, text, **options)
        self.plain = PlainSteps(self.engine)

    def plain_step(
        self, grads: Any, buckets: Any = REVERSED, failure: BaseException | None = None
    ) -> Outcome:
        arrivals = [_arrival(grads, names, index) for index, names in enumerate(buckets)]
        arrivals[-1] = replace(arrivals[-1], failure=failure)
        self.plain.open(now_s())
        for arrival in arrivals:
            self.plain.arrive(arrival)
            assert not self._jobs, "more is to come"
        self.plain.close()
        self._run()
        return Outcome(_means(arrivals), self._concluded.pop(), self.memory)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("buckets", [REVERSED, ALONE])
def test_means_are_those_of_ordinary_steps(world: int, buckets: Any) -> None:
    def rank(comm: Comm) -> tuple[list[Outcome], list[Outcome]]:
        ours, usual = PlainRig(comm), Rig(comm, "dense")
        return (
            [ours.plain_step(gradients(comm.rank, step), buckets) for step in range(3)],
            [usual.step(gradients(comm.rank, step), buckets) for step in range(3)],
        )

    for ours, usual in run_ranks(world, rank):
        assert [each.step.number for each in ours] == [0, 1, 2]
        for one, other in zip(ours, usual, strict=True):
            assert one.step.committed
            assert torch.equal(one.flat(), other.flat())


def test_gradients_are_all_that_travels() -> None:
    def rank(comm: Comm) -> Step:
        return PlainRig(comm).plain_step(gradients(comm.rank, 0)).step

    for step in run_ranks(2, rank):
        sizes = [torch.cat([gradients(0, 0)[name] for name in names]).nbytes for names in REVERSED]
        assert [each.payload_bytes for each in step.trace.rounds] == sizes
        dense = sum(Round("all_reduce", size, torch.uint8).wire_bytes(2) for size in sizes)
        assert step.metered_bytes == step.predicted_bytes == dense


def test_a_nan_spreads_and_the_step_counts_on_no_rank() -> None:
    def rank(comm: Comm) -> tuple[Outcome, Outcome, int]:
        rig, grads = PlainRig(comm), gradients(comm.rank, 0)
        if comm.rank == 1:
            grads["last.bias"][0] = torch.nan
        return rig.plain_step(grads), rig.plain_step(gradients(comm.rank, 1)), rig.engine.step

    for poisoned, following, steps in run_ranks(3, rank):
        assert poisoned.mean["last.bias"][0].isnan()
        assert poisoned.mean["last.weight"].isfinite().all(), "as under DDP"
        assert (poisoned.step.committed, following.step.committed, steps) == (False, True, 1)


@pytest.mark.parametrize("text", ["int8", "fp16", "topk(ratio=0.1)", "auto", "covap(interval=1)", "dense"])
def test_they_suit_what_remembers_codes_and_measures_nothing(text: str) -> None:
    suits = run_ranks(2, lambda comm: PlainRig(comm, text).plain.suits)
    assert suits == [text in ("dense", "covap(interval=1)")] * 2


def test_the_guard_has_its_verdicts() -> None:
    def rank(comm: Comm) -> list[bool]:
        rig = PlainRig(comm, guard=Guard({"weight": torch.zeros(3)}, 3))
        found = []
        for step in range(6):
            found.append(rig.plain.suits)
            (rig.plain_step if found[-1] else rig.step)(gradients(comm.rank, step))
        return found

    assert run_ranks(2, rank) == [[False, True, True] * 2] * 2


@pytest.mark.parametrize("attached", ["covap", "dense"])
def test_dense_after_measuring_tells_of_the_link_now_and_then(attached: str) -> None:
    def rank(comm: Comm) -> list[int]:
        rig = PlainRig(comm, attached)
        if attached == "dense":
            assert rig.plain.suits
            rig.engine.recipe = recipe("covap")  # as `wire.switch` does
        rig.engine.install(rig.engine.recipe.build().next.decide(_hidden()))  # type: ignore[union-attr]
        assert rig.engine.layout.is_dense
        usual = []
        for step in range(2 * LOOKS + 1):
            if not rig.plain.suits:
                usual.append(step)
            (rig.plain_step if rig.plain.suits else rig.step)(gradients(comm.rank, step))
        return usual

    assert run_ranks(2, rank) == [[0, LOOKS, 2 * LOOKS]] * 2


def _hidden() -> Any:
    from gradwire.planning.facts import Facts

    return Facts(backward_s=1.0, allreduce_s=0.5, world=2)


class Breaking(Comm):
    """Breaks when its first collective is issued, or waited for."""

    def __init__(self, when: str) -> None:
        self.rank, self.world, self._when = 0, 2, when

    def issue(self, round_: Round, tensor: torch.Tensor, out: torch.Tensor) -> Pending:
        if self._when == "issue":
            raise TransportError("gone")
        return _Lost()


class _Lost:
    then = staticmethod(DONE.then)

    def wait(self) -> None:
        raise TransportError("gone")


@pytest.mark.parametrize("when", ["issue", "wait"])
def test_a_broken_transport_ends_this_step_and_all_later_ones(when: str) -> None:
    rig = PlainRig(Breaking(when))
    for step in range(2):
        outcome = rig.plain_step(gradients(0, step))
        assert isinstance(outcome.error, TransportError)
        assert outcome.flat().isnan().all()
    assert rig.engine.step == 0


def test_one_thread_may_close_while_another_hears_of_the_last_byte() -> None:
    # Whatever comes last ends the step.
    callbacks: list[Any] = []

    class Later(Comm):
        rank, world = 0, 2

        def issue(self, round_: Round, tensor: torch.Tensor, out: torch.Tensor) -> Pending:
            class Under:
                wait = staticmethod(lambda: None)
                then = staticmethod(callbacks.append)

            return Under()

    rig = PlainRig(Later())
    rig.plain.open(now_s())
    for index, names in enumerate(REVERSED):
        rig.plain.arrive(_arrival(gradients(0, 0), names, index))
    callbacks.pop(0)()
    rig.plain.close()
    assert not rig._jobs
    for callback in callbacks:
        callback()
    rig._run()
    assert rig._concluded.pop().committed


@pytest.mark.parametrize("when", ["bringing", "starting"])
def test_a_rank_that_fails_makes_the_step_count_on_no_rank(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Dense.start

    def failing(self: Dense, x: torch.Tensor, mean: torch.Tensor, comm: Comm, at: Moment) -> Finish:
        if (at.rank, at.step, at.unit) == (1, 0, 1) and failing.left.pop(at.rank, False):  # type: ignore[attr-defined]
            raise MemoryError("planted")
        return start(self, x, mean, comm, at)

    failing.left = {1: when == "starting"}  # type: ignore[attr-defined]
    monkeypatch.setattr(Dense, "start", failing)

    def rank(comm: Comm) -> tuple[Outcome, Outcome]:
        rig, fails = PlainRig(comm), comm.rank == 1 and when == "bringing"
        error = MemoryError("planted") if fails else None
        return rig.plain_step(gradients(comm.rank, 0), failure=error), rig.plain_step(gradients(comm.rank, 1))

    for number, (failed, following) in enumerate(run_ranks(3, rank)):
        assert not failed.step.committed
        assert failed.flat().isnan().any(), "as for a GradScaler"
        assert isinstance(failed.error, MemoryError) == (number == 1)
        assert following.step.committed
        assert following.step.number == 0
