"""What is enqueued in order needs no thread, no callback and no end: the bits are those of the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire._api.prepare import prepare_for, rehearse
from gradwire.comm import Comm, Pending, Round, ThreadComm, run_ranks
from gradwire.comm.base import DONE
from gradwire.exchange.base import Decode
from gradwire.exchange.payloads import Gather
from gradwire.exchange.scatter_reduce import ScatterReduce
from gradwire.measure.clock import Trace, clock_of, now_s
from gradwire.measure.codec import codec_cost
from gradwire.measure.metered import MeteredComm
from gradwire.memory import Gradients
from gradwire.placement import (
    BufferTransfer,
    Inline,
    Placement,
    Post,
    StreamComm,
    stream,
    through_a_device,
)
from gradwire.recipes import recipe
from gradwire.sources.buffers import BufferBroadcast
from gradwire.sources.observe import LossScale
from gradwire.step.ahead import CodedBuffer
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.unit.context import ExchangeContext
from tests.support.elsewhere import WHERE, Carrying, Elsewhere, Far, There
from tests.support.looped import looped
from tests.support.rig import Rig, flat, gradients, parted
from tests.support.simulated import Clock, Near
from tests.support.verbs import CALLS, Call

WORLD, STEPS = 2, 4


class Endless(Comm):
    """Notes what it is asked for; nobody is ever called back."""

    rank, world = 0, 2

    def __init__(self) -> None:
        self.asked: list[Round] = []
        self.waited = 0

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """As `Comm.issue`."""
        self.asked.append(round_)
        return self

    def wait(self) -> None:
        """See `Pending`."""
        self.waited += 1

    def then(self, callback: Callable[[], None]) -> None:
        """See `Pending`."""


def test_one_is_called_back_at_once_and_waits_then() -> None:
    inner, told = Endless(), []
    pending = StreamComm(inner).all_reduce(torch.ones(2))
    pending.then(lambda: told.append(inner.waited))
    pending.wait()
    assert (told, inner.waited) == ([0], 1)


def test_no_time_is_told_where_no_end_is_announced_but_by_a_clock_that_waits() -> None:
    ticks = iter((3.0, 7.0))
    for exact, expected in ((None, 0.0), (lambda: next(ticks), 4.0)):
        trace = Trace(exact=exact)
        pending = MeteredComm(StreamComm(Endless()), trace).all_reduce(torch.ones(2))
        pending.then(lambda: None)
        pending.wait()
        assert trace.rounds[0].seconds == expected
        assert trace.spans == []


def test_a_clock_of_the_device_waits_for_it() -> None:
    waited = []

    class Counting(Near):
        def learn(self, call: str, actor: str, clock: Clock) -> None:
            waited.append(call)

    assert clock_of(Counting())() <= now_s()
    assert waited == ["synchronize"]
    cost = codec_cost(recipe("int8").build().exchange, "int8", Counting(), budget_s=0.0)
    assert cost.encode.slope_s + cost.encode.base_s > 0.0
    assert len(waited) > 100, "each time was waited for"
    waited.clear()
    codec_cost(recipe("gcomp").build().exchange, "gcomp", Counting(), budget_s=0.0)
    assert not waited, "it reads the host, and is timed there"


def test_hops_of_our_own_are_left_to_the_library() -> None:
    inner = Endless()
    StreamComm(inner).all_reduce(torch.ones(2), "tree")
    StreamComm(inner).broadcast(torch.ones(2), 1, "scatter")
    assert [(each.verb, each.algorithm) for each in inner.asked] == [
        ("all_reduce", "library"), ("broadcast", "library")
    ]  # fmt: skip


def test_a_job_that_fails_ends_none_of_those_that_come_later() -> None:
    post, ran = Inline(), []

    def fail() -> None:
        raise ValueError("a job")

    with pytest.raises(ValueError, match="a job"):
        post(fail)
    post(lambda: ran.append(DONE))
    assert ran == [DONE]


class Unready(Comm):
    """What comes is there once it has been waited for, as in a stream; before that there is garbage."""

    def __init__(self, comm: Comm) -> None:
        self.rank, self.world, self._comm = comm.rank, comm.world, comm

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """As `Comm.issue`."""
        sent = tensor.clone()
        received = sent if out is tensor else torch.empty_like(out)
        pending = self._comm.issue(round_, sent, received)
        out.fill_(torch.nan if out.is_floating_point() else 1)
        return _Unready(pending, received, out)


@looped("call", CALLS)
def test_what_the_host_sends_over_a_devices_wire_is_waited_for(call: Call) -> None:
    def body(comm: ThreadComm) -> Tensor:
        return call.issue(through_a_device(Unready(comm), torch.device("cpu")))

    for rank, found in enumerate(run_ranks(3, body)):
        assert torch.equal(found, call.expected(rank, 3))


class _Unready:
    def __init__(self, inner: Pending, received: Tensor, out: Tensor) -> None:
        self._inner, self._received, self._out = inner, received, out

    def wait(self) -> None:
        self._inner.wait()
        self._out.copy_(self._received)

    def then(self, callback: Callable[[], None]) -> None:
        raise AssertionError("a stream calls nobody back")


def trained(
    recipe: str, comm: ThreadComm, enqueued: bool, per_node: int = 1, deaf: str = ""
) -> tuple[Tensor, Tensor, list[str]]:
    """Means and memory after some steps, one of which is not finite on a rank, and the races found."""
    device, means = Near(deaf), []

    def place(_post: Post) -> Placement:
        if per_node == 1:
            return stream(Unready(comm), comm, device)
        inside, between = map(Unready, parted(comm, per_node))
        return stream(between, comm, device, inside=inside, everyone=Unready(comm))

    with device.watching(), device.using(device.new_stream()):
        rig = Rig(comm, recipe, place=place if enqueued else None, per_node=per_node)
        for step in range(STEPS):
            grads = gradients(comm.rank, step)
            if step == 1 and comm.rank == 1:
                grads["last.weight"][3] = torch.nan
            means.append(rig.step(grads).flat().nan_to_num(7.0))
        rig.reducer.commit_deferred()
        memory = flat(rig.memory) if rig.memory else torch.empty(0)
        return torch.stack(means), memory, device.races


def test_what_a_late_step_took_is_the_devices_time_and_ends_before_its_outcome_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ticks = count()
    monkeypatch.setattr("tests.support.simulated.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    # All that the host would say: a step is committed when the next one begins, after an evaluation perhaps.
    monkeypatch.setattr("gradwire.step.step.now_s", lambda: 1e9)
    took: list[float] = []

    def body(comm: ThreadComm) -> None:
        device = Near()
        with device.using(device.new_stream()):
            rig = Rig(
                comm, "topk(ratio=0.1)", place=lambda _post: stream(comm, comm, device),
                outcome_known=lambda step: took.append(step.lasted_s()),
            )  # fmt: skip
            for step in range(2):
                rig.reducer.watch.begin()
                rig.step(gradients(comm.rank, step))
            rig.reducer.commit_deferred()

    run_ranks(1, body)
    assert len(took) == 2
    assert all(0.0 < seconds < next(ticks) for seconds in took), "some events after its beginning"


RECIPES = [
    "dense",
    "fp16",
    "topk(ratio=0.1)",
    "int8",
    "powersgd",
    "leader_topk(elect='norm')",
    "var_topk",
    "signsgd",
]


@looped("recipe", RECIPES, few=1)
def test_a_reducer_that_enqueues_leaves_the_same_bits(recipe: str) -> None:
    there = run_ranks(WORLD, lambda comm: trained(recipe, comm, enqueued=True))
    here = run_ranks(WORLD, lambda comm: trained(recipe, comm, enqueued=False))
    for (means, memory, races), (other_means, other_memory, _races) in zip(there, here, strict=True):
        assert torch.equal(means, other_means)
        assert torch.equal(memory, other_memory)
        assert races == []


ON_NODES = ["dense", "fp16", "topk(ratio=0.1)", "int8", "powersgd", "leader_topk(elect='norm')", "covap"]


@looped("recipe", ON_NODES, few=1)
def test_two_levels_that_are_enqueued_leave_the_same_bits(recipe: str) -> None:
    """On two nodes of two ranks; in one step a single rank has a NaN."""
    there = run_ranks(4, lambda comm: trained(recipe, comm, enqueued=True, per_node=2))
    here = run_ranks(4, lambda comm: trained(recipe, comm, enqueued=False, per_node=2))
    for (means, memory, races), (other_means, other_memory, _races) in zip(there, here, strict=True):
        assert torch.equal(means, other_means)
        assert torch.equal(memory, other_memory)
        assert races == []
    assert all(bool((means[1] == 7.0).all()) for means, *_ in there), "NaN on all ranks"


def test_the_sum_inside_a_node_waits_for_gradients() -> None:
    found = run_ranks(4, lambda comm: trained("int8", comm, enqueued=True, per_node=2, deaf="wait_event"))
    assert all(races for *_, races in found)


def test_the_sum_and_the_means_of_a_node_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.sources.nodes.level.damage", lambda _pending: None)
    found = run_ranks(4, lambda comm: trained("dense", comm, enqueued=True, per_node=2))
    assert all(bool((means == 7.0).all()) for means, *_ in found)


def stepped(recipe: str, comm: ThreadComm, per_node: int = 1) -> tuple[list[str], list[Tensor], list[int]]:
    """What made the host wait in the steps after the first, their means, and the steps that counted.

    In the second step a parameter is idle, in the third a gradient of one rank is not finite.
    """
    means, counted = [], []

    def place(_post: Post) -> Placement:
        if per_node == 1:
            return stream(Carrying(comm), comm, Far())
        inside, between = map(Carrying, parted(comm, per_node))
        return stream(between, comm, Far(), inside=inside)

    with Elsewhere() as elsewhere:
        rig = Rig(comm, recipe, place=place)
        for step in range(STEPS):
            found = rig.step({name: There(values) for name, values in graded(comm.rank, step).items()})
            means.append(flat({name: mean.inner for name, mean in found.mean.items()}))
            counted.append(rig.reducer.step)
            if step == 0:
                elsewhere.reads.clear()
        return list(elsewhere.reads), means, counted


def graded(rank: int, step: int) -> dict[str, Tensor]:
    grads = {name: values.clone() for name, values in gradients(rank, step).items()}
    if step == 1:
        grads["middle.weight"].zero_()
    if step == 2 and rank == 1:
        grads["last.weight"][3] = torch.nan
    return grads


def test_whether_buffers_have_changed_is_found_out_without_a_read_in_the_hot_path() -> None:
    with Elsewhere() as elsewhere:
        buffers = [There(torch.zeros(4)), There(torch.zeros((), dtype=torch.int64))]
        carried = BufferBroadcast(buffers, rank=0)
        for _step in range(2):
            carried.pack(BufferTransfer())
            buffers[0].add_(1.0)
            carried.look(buffers, Far())
            late = carried.is_stale(deferred=True)
        assert late
        assert not elsewhere.reads


def test_the_loss_scale_is_copied_when_a_pass_begins_and_not_read_behind_it() -> None:
    with Elsewhere() as elsewhere:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.ones((), device=WHERE))  # as users scale their loss
        scale = LossScale(scaler, Far(), WHERE)
        scale.begun()
        scaler.update(32.0)
        assert scale() == 64.0, "that of the pass which has begun"
        scale.begun()
        assert scale() == 32.0
        assert not elsewhere.reads
        assert scale() == 32.0, "of no pass"
        assert elsewhere.reads


ON_DEVICE = [
    "dense", "fp16", "bf16", "covap(interval=2)", "local_every(interval=2)", "int8", "int4", "fp8",
    "efsignsgd", "onebit", "randomk(ratio=0.1)", "topk(ratio=0.1)", "leader_topk(ratio=0.1)",
    "scalecom(rate=10, warmup_steps=0)", "star_topk", "powersgd", "qsgd", "terngrad", "var_topk",
    "acpsgd(warmup_steps=0)", "signsgd", "sketchsgd",
    "dgc(ratio=0.1, warmup_steps=0)", "lwtopk", "truncate", "signum",
]  # fmt: skip


@looped("recipe", ON_DEVICE, few=3)
def test_a_rehearsal_leaves_no_trace(recipe: str) -> None:
    def body(comm: ThreadComm, *, rehearses: bool) -> list[Tensor]:
        rig, found = Rig(comm, recipe), []
        for step in range(2):
            if rehearses:
                rehearse(rig.reducer.layout, WORLD)
            found.append(rig.step(gradients(comm.rank, step)).flat())
            found.extend(rig.planes.values())
        return found

    plain = run_ranks(WORLD, partial(body, rehearses=False))
    for found, expected in zip(run_ranks(WORLD, partial(body, rehearses=True)), plain, strict=True):
        assert all(map(torch.equal, found, expected))


@looped(
    ("recipe", "kind", "exchange"), [("int8", "code", ScatterReduce), ("efsignsgd", "compensate", Gather)]
)
def test_what_a_step_calls_was_called_in_its_rehearsal(
    recipe: str, kind: str, exchange: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = set[tuple[object, ...]]()
    flat_buffer_compensate, coded_compensate, start = (
        FlatBuffer.compensate_marked,
        CodedBuffer.compensate,
        exchange.start,
    )

    def compensate(self: FlatBuffer, grads: Gradients, *more: Any) -> None:
        # Triton compiles for addresses that are multiples of 16 bytes, and for others.
        called.update(("compensate", bucket.start % 4 == 0) for _plane, bucket in grads.pieces.slices())
        flat_buffer_compensate(self, grads, *more)

    def coded(self: CodedBuffer, grads: Gradients, *more: Any) -> None:
        called.update(("code", bucket.start % 4 == 0) for _plane, bucket in grads.pieces.slices())
        coded_compensate(self, grads, *more)

    def started(self: object, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        called.add(("start", x.data_ptr(), x.numel(), mean.data_ptr() % 16 == 0))
        return start(self, x, mean, comm, ctx)

    monkeypatch.setattr(FlatBuffer, "compensate_marked", compensate)
    monkeypatch.setattr(CodedBuffer, "compensate", coded)
    monkeypatch.setattr(exchange, "start", started)

    def body(comm: ThreadComm) -> None:
        device = Near()
        with device.using(device.new_stream()):
            rig = Rig(
                comm, recipe, place=lambda _post: stream(comm, comm, device),
                prepare=partial(prepare_for, rank=0, world=1), alone=False,
            )  # fmt: skip
            rehearsed = set(called)
            called.clear()
            rig.step(gradients(0, 0))
            assert {call[0] for call in called} == {kind, "start"}
            assert called <= rehearsed

    run_ranks(1, body)


@looped("recipe", ON_DEVICE, few=4)
def test_whole_steps_never_make_the_host_wait(recipe: str) -> None:
    def here(comm: ThreadComm) -> list[Tensor]:
        rig = Rig(comm, recipe)
        return [rig.step(graded(comm.rank, step)).flat() for step in range(STEPS)]

    expected = run_ranks(WORLD, here)[0]
    for reads, means, counted in run_ranks(WORLD, lambda comm: stepped(recipe, comm)):
        assert not reads
        assert counted == [0, 1, 2, 2]  # each is committed when the next one begins
        for mean, other in zip(means, expected, strict=True):
            # Kernels and references sum in other orders, as in `tests/laws/test_reference_path.py`.
            largest = float(other.abs().nan_to_num(0.0).max())
            assert torch.allclose(mean, other, rtol=1e-4, atol=1e-5 * largest, equal_nan=True)


@pytest.mark.rest
@looped("recipe", ["dense", "topk(ratio=0.1)", "int8", "powersgd"], few=1)
def test_steps_on_two_levels_never_make_the_host_wait(recipe: str) -> None:
    for reads, means, counted in run_ranks(4, lambda comm: stepped(recipe, comm, per_node=2)):
        assert not reads
        assert counted == [0, 1, 2, 2], "a NaN on one rank of one node counts on none"
        assert [bool(mean.isnan().all()) for mean in means] == [False, False, True, False]
