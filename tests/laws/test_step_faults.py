"""Whatever breaks on one rank: every rank hears of it in that step and forgets nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, Pending, Round, run_ranks
from gradwire.errors import GradwireError, PeerFailed, RanksDisagree, TransportError
from gradwire.exchange.base import Decode, Exchange
from gradwire.exchange.gcomp import Gcomp
from gradwire.exchange.round_robin import round_robin
from gradwire.kernels.compensation import Findings
from gradwire.laws import Laws
from gradwire.memory import Gradients, Memory, Planes
from gradwire.placement import CommitTime, device_at
from gradwire.planning.boundaries import even_boundaries
from gradwire.recipes import recipe
from gradwire.sources.observe import LossScale
from gradwire.step.gradient_bucket import GradientBucket
from gradwire.step.layout import Layout
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE, REMEMBERING, kind
from tests.support.rig import ONE_BUCKET, Outcome, Rig, gradients
from tests.support.where import WHERE

BREAKS_IN_STEP = 1


class Accident(Exception):
    """What a codec may raise."""


Kind = type[BaseException]


@dataclass(frozen=True)
class AccidentalMemory:
    """Compensates like the inner memory, but for one accident."""

    inner: Memory
    breaks: bool
    error: BaseException

    def compensate(
        self, working: Planes, committed: Planes, grads: Gradients, step: int, world: int
    ) -> Findings:
        if self.breaks and step == BREAKS_IN_STEP:
            raise self.error
        return self.inner.compensate(working, committed, grads, step, world)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@dataclass(frozen=True)
class Accidental:
    """An exchange with an accident on this rank, before, between or after its rounds."""

    inner: Exchange
    memory: Memory | None
    where: str
    error: BaseException

    @property
    def laws(self) -> Laws:
        return replace(self.inner.laws, in_place=True)

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        breaks = ctx.step == BREAKS_IN_STEP and ctx.unit % 2 == 0
        if breaks and self.where == "encode":
            raise self.error
        decode = self.inner.start(x, mean, comm, ctx)
        if breaks and self.where == "after issuing":
            raise self.error
        return partial(_finish_badly, decode, self.error) if breaks and self.where == "decode" else decode

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        return self.inner.rounds(numel, dtype, ctx)


def _finish_badly(decode: Decode, error: BaseException) -> None:
    decode()
    raise error


def _with_accident(
    comm: Comm, name: str, where: str, on_rank: int, raises: Kind = Accident, **options: Any
) -> Rig:
    rig = Rig(comm, EVERY_RECIPE[name], **options)
    composition = recipe(EVERY_RECIPE[name]).build()
    assert composition.next is None
    exchange, here, error = composition.exchange, comm.rank == on_rank, raises("out of luck")
    memory = exchange.memory and AccidentalMemory(exchange.memory, here and where == "compensation", error)
    accidental = Accidental(exchange, memory, where if here else "nowhere", error)
    rig.reducer.install(
        replace(composition, exchange=accidental, cutter=partial(even_boundaries, unit_elements=700))
    )
    return rig


PLACES = [
    (name, where) for name in REMEMBERING for where in ("compensation", "encode", "after issuing", "decode")
]
PLACES += [(name, where) for name in ("fp16", "dense") for where in ("encode", "after issuing")]
PLACES += [("fp16", "decode")]
PLACES += [
    (name, where) for name in ("gcomp", "gcomp, lossless") for where in ("encode", "after issuing", "decode")
]


ACCIDENTS = [(name, where, Accident) for name, where in PLACES]
# On a thread of its own it would end nothing but the thread.
ACCIDENTS += [("topk", where, SystemExit) for where in ("compensation", "encode", "after issuing", "decode")]


@looped(("name", "where", "raises"), ACCIDENTS, by=lambda row: f"{row[2].__name__} {kind(row[0])}", few=1)
def test_an_exception_on_one_rank_is_raised_on_all_and_leaves_no_trace(
    name: str, where: str, raises: Kind
) -> None:
    def rank(comm: Comm) -> tuple[BaseException | None, bool]:
        rig = _with_accident(comm, name, where, 1, raises)
        rig.step(gradients(comm.rank, 0))
        before, number = rig.planes, rig.reducer.step
        outcome = rig.step(gradients(comm.rank, 1))
        assert not outcome.step.committed
        assert rig.reducer.step == number
        return outcome.error, all(torch.equal(now, before[each]) for each, now in rig.planes.items())

    results = run_ranks(3, rank)
    assert all(intact for _, intact in results)
    peer, own, third = (error for error, _ in results)
    for error in (peer, third):
        assert isinstance(error, PeerFailed)
        assert "rank 1 failed" in str(error)
    assert isinstance(own, raises)
    (note,) = own.__notes__
    assert "step 1, rank 1" in note
    assert where.split()[0] in note or where == "after issuing"


@pytest.mark.parametrize("name", ["topk", "dense"])
def test_a_step_whose_scaler_has_gone_fails_on_all_ranks_and_the_next_one_goes_on(name: str) -> None:
    def rank(comm: Comm) -> list[BaseException | None]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
        lasts = LossScale(scaler, device_at(WHERE), WHERE)
        own = LossScale(torch.amp.GradScaler("cpu"), device_at(WHERE), WHERE)
        scales = iter([lasts, own if comm.rank == 1 else lasts, lasts])
        rig = Rig(comm, EVERY_RECIPE[name], loss_scale=lambda: next(scales)())
        return [rig.step(gradients(comm.rank, step)).error for step in range(3)]

    for number, (first, second, third) in enumerate(run_ranks(3, rank)):
        assert first is third is None
        assert isinstance(second, GradwireError if number == 1 else PeerFailed)
        assert ("the model has gone" if number == 1 else "rank 1 failed") in str(second)


@looped("where", ["encode", "decode"])
def test_after_an_accident_the_same_step_can_be_tried_again(where: str) -> None:
    def rank(comm: Comm) -> None:
        rig, smooth = _with_accident(comm, "topk", where, on_rank=0), _with_accident(comm, "topk", "", 0)
        for each in (rig, smooth):
            each.step(gradients(comm.rank, 0))
        assert rig.step(gradients(comm.rank, 1)).error is not None
        for flat_buffer in rig.reducer.layout.flat_buffers:
            object.__setattr__(flat_buffer.exchange, "where", "nowhere")
        again, expected = rig.step(gradients(comm.rank, 1)), smooth.step(gradients(comm.rank, 1))
        assert torch.equal(again.flat(), expected.flat())

    run_ranks(2, rank)


def test_accidents_on_several_ranks_name_all_of_them() -> None:
    def rank(comm: Comm) -> BaseException | None:
        rig = _with_accident(comm, "topk", "encode", on_rank=comm.rank if comm.rank != 1 else -1)
        rig.step(gradients(comm.rank, 0))
        return rig.step(gradients(comm.rank, 1)).error

    errors = run_ranks(3, rank)
    assert [type(error) for error in errors] == [Accident, PeerFailed, Accident]
    assert "rank 0, 2 failed" in str(errors[1])


def test_a_decoder_of_any_bytes_that_fails_fails_alone_and_no_rank_goes_on_without_the_others() -> None:
    """With one bucket the status vote is out before anything is decoded."""

    def rank(comm: Comm) -> tuple[Outcome, Outcome]:
        rig = _with_accident(comm, "int8", "decode", on_rank=1)
        _good, failed, following = (rig.step(gradients(comm.rank, step), ONE_BUCKET) for step in range(3))
        return failed, following

    for number, (failed, following) in enumerate(run_ranks(3, rank)):
        is_own = number == 1
        assert isinstance(failed.error, Accident) == is_own
        assert failed.step.committed != is_own
        assert failed.step.has_failed_unheard == is_own
        assert isinstance(following.error, RanksDisagree)
        assert not following.step.committed


@looped("commits", ["now", "late"])
def test_a_rank_that_fails_unheard_in_a_step_that_counts_on_no_rank_goes_on_with_the_others(
    commits: CommitTime,
) -> None:
    """All ranks are at the same step still, so there is nothing to be told."""

    def rank(comm: Comm) -> tuple[Outcome, Outcome]:
        rig = _with_accident(comm, "int8", "decode", on_rank=1, commits=commits)
        rig.step(gradients(comm.rank, 0), ONE_BUCKET)
        broken = gradients(comm.rank, 1)
        if comm.rank == 0:
            broken["last.weight"][0] = torch.nan
        failed = rig.step(broken, ONE_BUCKET)
        for flat_buffer in rig.reducer.layout.flat_buffers:
            object.__setattr__(flat_buffer.exchange, "where", "nowhere")
        following = rig.step(gradients(comm.rank, 1), ONE_BUCKET)
        rig.reducer.commit_deferred()
        return failed, following

    for number, (failed, following) in enumerate(run_ranks(3, rank)):
        assert isinstance(failed.error, Accident) == (number == 1)
        assert not failed.step.has_failed_unheard
        assert not failed.step.committed
        assert following.error is None
        assert following.step.committed


@looped("commits", ["now", "late"])
def test_ranks_that_share_a_replica_hear_of_any_decoder_in_its_step(commits: CommitTime) -> None:
    """They gather means after the status vote, and would wait for the one that failed."""

    def rank(comm: Comm) -> BaseException | None:
        rig = _with_accident(comm, "int8", "decode", on_rank=1, per_node=2, commits=commits)
        rig.step(gradients(comm.rank, 0), ONE_BUCKET)
        return rig.step(gradients(comm.rank, 1), ONE_BUCKET).error

    for number, error in enumerate(run_ranks(4, rank)):
        assert isinstance(error, Accident if number == 1 else PeerFailed)


ALIKE = next(
    step
    for step in range(288, 10**6, 288)
    if all(
        round_robin(ExchangeContext(step, 0, 0, 2), interval, whose=whose)
        == round_robin(ExchangeContext(0, 0, 0, 2), interval, whose=whose)
        for interval, whose in ((2, "phase"), (3, "phase"), (4, "phase"), (2, "leader"), (2, "factor"))
    )
    and all(Gcomp(refresh=each).renews(ExchangeContext(step, 0, 0, 2)) for each in (2, 3))
)
"""A step in which every interval and cycle of the table issues the rounds of step 0."""


@looped("name", EVERY_RECIPE, by=kind, few=1)
def test_ranks_in_different_steps_disagree_on_all_ranks(name: str) -> None:
    def rank(comm: Comm) -> Outcome:
        rig = Rig(comm, EVERY_RECIPE[name])
        rig.reducer.step = ALIKE * comm.rank
        return rig.step(gradients(comm.rank, 0))

    for outcome in run_ranks(2, rank):
        assert isinstance(outcome.error, RanksDisagree)
        assert "step differ" in str(outcome.error)
        assert not outcome.step.committed
        assert not any(memory.any() for memory in outcome.memory.values())


class Torn(Comm):
    """A comm whose link breaks in the n-th collective of its rank, and only in that one."""

    def __init__(self, comm: Comm, at: int) -> None:
        self._comm, self._left = comm, at
        self.rank, self.world = comm.rank, comm.world

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        self._left -= 1
        if self._left == -1:
            raise TransportError("the link is gone")
        return self._comm.issue(round_, tensor, out)


@looped("name", ["dense", "topk", "leader_topk", "covap", "auto"])
@looped("at", range(6))
def test_a_broken_transport_ends_this_step_and_all_later_ones_with_its_error(name: str, at: int) -> None:
    def rank(comm: Comm) -> None:
        rig = Rig(Torn(comm, at), EVERY_RECIPE[name], unit_elements=3000)
        outcomes = [rig.step(gradients(0, step)) for step in range(6)]
        broken = [isinstance(outcome.error, TransportError) for outcome in outcomes]
        assert any(broken)
        assert broken == sorted(broken), "once broken, always broken"
        last_good = broken.index(True)
        after = outcomes[last_good - 1].memory if last_good else {}
        for outcome in outcomes[last_good:]:
            assert all(torch.equal(outcome.memory[each], kept) for each, kept in after.items())
        assert rig.reducer.step == last_good

    run_ranks(1, rank)


@looped("bucket", [0, 1, 2])
def test_an_error_of_our_own_ends_the_step_instead_of_hanging(
    bucket: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rank(comm: Comm) -> Outcome:
        rig = Rig(comm, "topk(ratio=0.1)")
        honest, seen = Layout.bucket_plan, []

        def broken(layout: Layout, gradient_bucket: GradientBucket) -> Any:
            seen.append(gradient_bucket)
            if len(seen) == bucket + 1:
                raise KeyError("a mistake in the reducer")
            return honest(layout, gradient_bucket)

        monkeypatch.setattr(Layout, "bucket_plan", broken)
        return rig.step(gradients(0, 0))

    (outcome,) = run_ranks(1, rank)
    assert isinstance(outcome.error, TransportError)
    assert isinstance(outcome.error.__cause__, KeyError)
