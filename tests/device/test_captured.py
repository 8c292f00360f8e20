"""Record and replay: steps whose kernels are captured in graphs leave the bits of eager ones."""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gradwire.codec.select.topk import TopK
from gradwire.codec.sparse import Sparse
from gradwire.comm import Comm, Pending, Round, ThreadComm, run_ranks
from gradwire.exchange.captured import EAGER, MOST, TRIES, Captures, _Kept, _Recorder, _Tape
from gradwire.exchange.payloads import Gather
from gradwire.kernels.topk import topk_indices
from gradwire.kernels.uploads import TooEarly, holding, kept_by_stream
from gradwire.laws import Laws
from gradwire.placement import stream
from gradwire.recipes import recipe as parsed
from gradwire.step.gradient_bucket import GradientBucket
from gradwire.step.step import Step
from gradwire.unit.context import ExchangeContext, Fates
from tests.device.test_streaming import Unready
from tests.support import rig
from tests.support.looped import looped
from tests.support.recording import Pool, Recording, Recordings, within_kernels
from tests.support.rig import ALONE, ONE_BUCKET, REVERSED, Outcome, Rig, flat, gradients
from tests.support.simulated import Near
from tests.support.tiers import rest

WORLD, NEVER = 2, 1 << 20
UNIT = 2000
"""Elements of a unit: parameters are cut, so that some means land by a copy and others in place."""


@dataclass
class Run:
    """A rank's training, with what it leaves."""

    rig: Rig
    device: Near
    rank: int
    number: int = 0
    means: list[Tensor] = field(default_factory=list)
    replays: list[int] = field(default_factory=list)
    """In each step."""

    def step(self, buckets: Any = REVERSED, change: Callable[[dict[str, Tensor]], Any] = len) -> Step:
        """The next one, with its gradients changed."""
        grads = gradients(self.rank, self.number)
        change(grads)
        before = self.device.replays
        found: Outcome = self.rig.step(grads, buckets)
        self.means.append(found.flat().nan_to_num(7.0))
        self.replays.append(self.device.replays - before)
        self.number += 1
        return found.step

    def steps(self, number: int) -> None:
        """As they come."""
        for _each in range(number):
            self.step()


def plain(run: Run) -> None:
    run.steps(10)


def not_finite(run: Run) -> None:
    """On one rank, when all is captured and when it is not."""

    def spoil(grads: dict[str, Tensor]) -> None:
        if run.rank == 1:
            grads["last.weight"][3] = torch.nan

    for step in range(12):
        run.step(change=spoil if step in (1, 8, 9) else len)


def idle(run: Run) -> None:
    """A parameter brings nothing."""
    for step in range(12):
        run.step(change=(lambda grads: grads["middle.weight"].zero_()) if step in (2, 8) else len)


def left_out(run: Run) -> None:
    """Steps whose gradients no optimizer has used."""
    for step in range(12):
        run.step()
        if step in (3, 8):
            run.rig.reducer.catch_up(Fates(dropped=frozenset(run.rig.reducer.layout.slots), made=False))


def accumulated(run: Run) -> None:
    """Several exchanges for one step of the optimizer. In the end none uses what they have brought."""
    for step in range(18):
        run.step()
        every = frozenset(run.rig.reducer.layout.slots)
        if step % 6 in (1, 2, 3):
            run.rig.reducer.catch_up(Fates(open=every, made=False))
        elif step % 6 == 4:
            run.rig.reducer.catch_up(Fates(dropped=every, made=False))


def rebuilt(run: Run) -> None:
    """Buckets as DDP makes them anew: other addresses, and other ways for the means."""
    run.steps(8)
    for buckets in (ONE_BUCKET, ALONE, REVERSED):
        for _step in range(8):
            run.step(buckets)


def switched(run: Run) -> None:
    """To another recipe and back: memory moves along."""
    run.steps(8)
    for text in ("int8", "topk(ratio=0.05)"):
        run.rig.reducer.commit_deferred()
        run.rig.reducer.install(parsed(text).build())
        run.steps(8)


def resumed(run: Run) -> None:
    """A snapshot is installed again, as when a step was tried and given up."""
    run.steps(8)
    run.rig.reducer.commit_deferred()
    run.rig.reducer.restore(run.rig.reducer.snapshot())
    run.steps(8)


def scaled(run: Run) -> None:
    """A loss scale that changes: compensation divides it out, and means that land are multiplied by it."""
    for step in range(16):
        SCALE[0] = (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 8.0, 4.0)[step % 8]
        run.step(change=lambda grads: [each.mul_(SCALE[0]) for each in grads.values()])


SCALE = [1.0]
SCENES: dict[str, Callable[[Run], None]] = {
    each.__name__: each
    for each in (plain, not_finite, idle, left_out, accumulated, rebuilt, switched, resumed, scaled)
}


class Left(NamedTuple):
    """By a run."""

    means: Tensor
    memory: Tensor
    replays: list[int]
    races: list[str]
    graphs: int


def trained(
    scene: Callable[[Run], None],
    comm: ThreadComm,
    *,
    captured: bool,
    text: str = "topk(ratio=0.1)",
    over: Callable[[Comm], Comm] = Unready,
    watched: bool = False,
    device: Near | None = None,
) -> Left:
    """Train a rank through a scene."""
    device = device or Near()
    options: dict[str, Any] = {"captures_for": Captures} if captured else {}
    if scene is scaled:
        options["loss_scale"] = lambda: SCALE[0]
    with device.watching() if watched else nullcontext(), device.using(device.new_stream()):
        rigged = Rig(
            comm,
            text,
            unit_elements=UNIT,
            place=lambda _post: stream(over(comm), comm, device),
            timed_every=NEVER,
            **options,
        )
        run = Run(rigged, device, comm.rank)
        scene(run)
        rigged.reducer.commit_deferred()
        memory = flat(rigged.memory) if rigged.memory else torch.empty(0)
        return Left(torch.stack(run.means), memory, run.replays, device.races, len(device.recorded))


@pytest.fixture(autouse=True)
def untimed_steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Otherwise the first ones under a recipe are timed, and so eager."""
    monkeypatch.setattr("gradwire.step.installed._FIRST", 0)
    with within_kernels():
        yield


@pytest.fixture(autouse=True)
def buckets_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients come in the same memory in every step, as DDP's do, as long as buckets are the same."""
    made, kept = rig._gradient_bucket, dict[tuple[int, tuple[str, ...]], Tensor]()

    def bucket(grads: Mapping[str, Tensor], names: Sequence[str], index: int) -> GradientBucket:
        new = made(grads, names, index)
        room = kept.setdefault((threading.get_ident(), tuple(names)), new.buffer)
        return replace(new, buffer=room if room is new.buffer else room.copy_(new.buffer))

    monkeypatch.setattr(rig, "_gradient_bucket", bucket)


def both(scene: Callable[[Run], None], **how: Any) -> tuple[list[Left], list[Left]]:
    """Captured and eager, on all ranks."""
    there = run_ranks(WORLD, lambda comm: trained(scene, comm, captured=True, **how))
    here = run_ranks(WORLD, lambda comm: trained(scene, comm, captured=False, **how))
    assert not any(sum(each.replays) for each in here)
    return there, here


def same(there: list[Left], here: list[Left]) -> bool:
    """The bits."""
    return all(
        torch.equal(one.means, other.means) and torch.equal(one.memory, other.memory)
        for one, other in zip(there, here, strict=True)
    )


RECIPES = (
    "topk(ratio=0.1)",
    "leader_topk(ratio=0.5)",
    "scalecom(rate=10, warmup_steps=0)",
    "powersgd",
    "acpsgd",
)
"""One of each kind that is captured. Half of the elements are a bitmap, and sound by `see` and not a mark."""


@pytest.mark.parametrize("text", rest(RECIPES, but=("topk(ratio=0.1)", "powersgd")))
@looped("scene", SCENES, few=3)
def test_replayed_steps_leave_the_bits_of_eager_ones(text: str, scene: str) -> None:
    there, here = both(SCENES[scene], watched=scene == "plain", text=text)
    assert same(there, here)
    assert all(max(each.replays) > 2 for each in there), "they were replayed"
    assert not any(each.races for each in there)


def test_a_rank_that_captures_beside_one_that_does_not_leaves_the_same_bits() -> None:
    found = run_ranks(WORLD, lambda comm: trained(plain, comm, captured=comm.rank == 0))
    here = run_ranks(WORLD, lambda comm: trained(plain, comm, captured=False))
    assert same(found, here)
    assert max(found[0].replays) > 0
    assert max(found[1].replays) == 0


def test_a_graph_is_captured_once_its_addresses_have_come_back() -> None:
    """The memory of a unit has two places, which take turns."""
    [left] = run_ranks(1, lambda comm: trained(plain, comm, captured=True))
    assert left.replays[: 2 * EAGER] == [0] * (2 * EAGER)
    assert left.replays[2 * EAGER] >= 2
    assert len(set(left.replays[2 * EAGER :])) == 1, "all units, also those whose means land by a copy"


class Looks:
    """An observer that wants nothing."""

    def before(self, step: Step, env: Any) -> None:
        """See `StepObserver`."""


def observed(run: Run) -> None:
    """In some steps."""
    for step in range(14):
        run.rig.reducer.env.observers[:] = [Looks()] if step in (8, 9) else []
        run.step()


def timed(run: Run) -> None:
    """In some steps."""
    times = run.rig.reducer.times
    run.rig.reducer.times = lambda step: step in (8, 9) or times(step)  # type: ignore[method-assign]
    run.steps(14)


@pytest.mark.parametrize("scene", [observed, timed])
def test_a_step_that_somebody_looks_at_is_eager(scene: Callable[[Run], None]) -> None:
    there, here = both(scene)
    assert same(there, here)
    for left in there:
        assert left.replays[8:10] == [0, 0]
        assert left.replays[7] > 0
        assert left.replays[10] > 0, "and those after it are not"


def test_a_step_that_is_profiled_is_eager() -> None:
    def profiled(run: Run) -> None:
        run.steps(8)
        with torch.autograd.profiler.profile():
            run.steps(2)
        run.steps(2)

    [left] = run_ranks(1, lambda comm: trained(profiled, comm, captured=True))
    assert left.replays[7] > 0
    assert left.replays[8:10] == [0, 0]
    assert left.replays[10] > 0


def test_after_a_restore_all_is_captured_anew() -> None:
    [left] = run_ranks(1, lambda comm: trained(resumed, comm, captured=True))
    assert left.replays[7] > 0
    assert left.replays[8 : 8 + 2 * EAGER] == [0] * (2 * EAGER)
    assert left.replays[-1] > 0


@pytest.mark.parametrize("text", ["int8", "randomk", "lwtopk", "dense"])
def test_other_recipes_stay_eager(text: str) -> None:
    """`randomk` and its like have other numbers in every step, and one kernel gains nothing."""
    there, here = both(plain, text=text)
    assert same(there, here)
    assert not any(each.graphs for each in there)


def elsewhere(_ctx: ExchangeContext, _step: int) -> int:
    return 1


def drawn_within(x: Tensor, ctx: ExchangeContext) -> int:
    """In the context of a shard, say."""
    return ctx.within(ctx.unit, (), {}).shared().initial_seed() % 8


def made_in_each_step(x: Tensor, ctx: ExchangeContext) -> int:
    """A table, say, whose kernels would only be recorded."""
    return ctx.once(elsewhere, ctx.step)


@pytest.mark.parametrize("number", rest([drawn_within, made_in_each_step], but=[made_in_each_step]))
def test_what_a_graph_could_not_know_is_not_captured_nor_tried_for_ever(
    number: Callable[[Tensor, ExchangeContext], int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def select(self: TopK, x: Tensor, ctx: ExchangeContext) -> Tensor:
        seen = x.roll(number(x, ctx))
        return ctx.kernels[topk_indices](seen, self.count(x.numel(), ctx))

    monkeypatch.setattr(TopK, "select", select)
    caplog.set_level(logging.WARNING, "gradwire")
    there, here = both(lambda run: run.steps((TRIES + 4) * (EAGER + 1)))
    assert same(there, here)
    assert not any(sum(each.replays) for each in there)
    said = set(caplog.messages)
    assert all("launched one by one: in 16 tries something" in each for each in said), "one for each unit"
    assert all(each.graphs == TRIES * len(said) > TRIES for each in there), "and then no more"


@pytest.mark.rest
def test_tries_in_vain_are_forgotten_once_a_unit_is_captured(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    select, is_early = TopK.select, [False]
    monkeypatch.setattr(
        TopK,
        "select",
        lambda self, x, ctx: select(self, x.roll(made_in_each_step(x, ctx) if is_early[0] else 0), ctx),
    )

    def twice(run: Run) -> None:
        for buckets in (REVERSED, ONE_BUCKET):
            for is_early[0], tries in ((True, TRIES - 4), (False, 3)):
                for _step in range(tries * (EAGER + 1)):
                    run.step(buckets)

    run_ranks(1, lambda comm: trained(twice, comm, captured=True))
    assert not caplog.messages


def test_the_memory_of_graphs_has_the_means_that_they_write_to() -> None:
    def measured(run: Run) -> None:
        run.steps(8)
        pools = sum(each.nbytes for each in run.device.recorded)
        units = run.rig.reducer.layout.flat_buffers[0].units
        copied = [
            each.numel for each in units if len(each.parts) > 1
        ]  # others lie in one stretch of a bucket
        assert run.rig.reducer.graph_bytes == pools + 4 * sum(copied) > pools

    run_ranks(1, lambda comm: trained(measured, comm, captured=True))


def test_a_table_that_is_not_there_yet_is_not_made_while_a_graph_is_captured() -> None:
    """Its copy would be recorded, and eager kernels would read it before any replay."""

    @kept_by_stream(maxsize=2)
    def table(numel: int, device: torch.device) -> Tensor:
        return torch.arange(numel, device=device)

    where = torch.device("cpu")
    with holding(), pytest.raises(TooEarly):
        table(3, where)
    made = table(3, where)
    with holding() as tables:
        assert table(3, where) is made
    assert len(tables) == 1
    assert tables[0] is made


@pytest.mark.parametrize("part", [TopK, Sparse])
def test_any_error_ends_the_capture(part: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or all that follows in the stream would be recorded, and not run."""
    name = {TopK: "select", Sparse: "average_decoded"}[part]
    work, run = getattr(part, name), list[Run]()

    def failing(self: Any, *arguments: Any) -> Any:
        if run[0].device.capturing:
            raise KeyError("a fault of its own")
        return work(self, *arguments)

    def once(now: Run) -> None:
        run.append(now)
        now.steps(2 * EAGER)
        assert isinstance(now.step().error, KeyError)
        assert not now.device.capturing
        monkeypatch.setattr(part, name, work)
        now.steps(8)
        assert now.replays[-1] > 0

    monkeypatch.setattr(part, name, failing)
    run_ranks(1, lambda comm: trained(once, comm, captured=True))


def test_no_garbage_is_collected_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have graphs and events, which a thread that captures must not free."""
    begin, seen = Recording.begin, list[bool]()
    monkeypatch.setattr(Recording, "begin", lambda self: (seen.append(gc.isenabled()), begin(self))[1])
    assert gc.isenabled()
    run_ranks(1, lambda comm: trained(plain, comm, captured=True))
    assert seen
    assert not any(seen)
    assert gc.isenabled()


class Quiet(TorchDispatchMode):
    """Allocates, and launches nothing."""

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_free = operator.is_view or operator.overloadpacket.__name__.startswith(("empty", "new_empty"))
        assert is_free, f"{operator} before the collective is waited for would be in no graph"
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("text", rest(RECIPES, but=("powersgd",)))
def test_what_is_captured_launches_nothing_between_a_collective_and_its_wait(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    issue, wait, quiet = _Recorder.issue, _Recorder.wait, dict[_Recorder, Quiet]()

    def issued(self: _Recorder, *sent: Any) -> Pending:
        pending = issue(self, *sent)
        quiet[self] = Quiet()
        quiet[self].__enter__()
        return pending

    def waited(self: _Recorder) -> None:
        if self in quiet:
            quiet.pop(self).__exit__(None, None, None)
        wait(self)

    monkeypatch.setattr(_Recorder, "issue", issued)
    monkeypatch.setattr(_Recorder, "wait", waited)
    [left] = run_ranks(1, lambda comm: trained(plain, comm, captured=True, text=text))
    assert max(left.replays) > 0


def test_a_codec_that_decodes_rank_by_rank_stays_eager() -> None:
    class OneByOne:
        laws = Laws(repeats=True)

    class AtOnce(OneByOne):
        average_decoded = len

    captures = Captures(Near().graphs())
    one_by_one, at_once = (Gather(cast(Any, codec())) for codec in (OneByOne, AtOnce))
    assert captures.around(one_by_one, "unit 0") is None
    assert captures.around(at_once, "unit 0") is not None


@pytest.mark.parametrize(("part", "name"), [(TopK, "select"), (Sparse, "average_decoded")])
def test_what_cannot_be_captured_is_said_and_stays_eager(
    part: type, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before the gather or after it: nothing of the step has run or was sent by then."""
    work = getattr(part, name)

    def waiting(self: Any, x: Tensor, *more: Any) -> Any:
        assert float(x.sum()) is not None  # the host waits
        return work(self, x, *more)

    monkeypatch.setattr(part, name, waiting)
    caplog.set_level(logging.WARNING, "gradwire")
    there, here = both(plain)
    assert same(there, here)
    assert not any(sum(each.replays) for each in there)
    assert "cannot be captured" in caplog.text
    assert "not permitted when stream is capturing" in caplog.text


def test_memory_that_moves_in_every_step_keeps_few_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = list[Tensor]()

    def elsewhere(run: Run) -> None:
        for _step in range(6 * MOST):
            for flat_buffer in run.rig.reducer.layout.flat_buffers:
                moved.extend(flat_buffer.working.values())  # or it would come back
                flat_buffer.working = {name: each.clone() for name, each in flat_buffer.working.items()}
            run.step()

    there, here = both(elsewhere)
    assert same(there, here)
    assert not any(each.graphs for each in there)


class Damaged(Comm):
    """From a step on, the payload of the last rank is no valid choice."""

    def __init__(self, comm: Comm, since: int) -> None:
        self.rank, self.world, self._comm = comm.rank, comm.world, Unready(comm)
        self._left = since

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """As `Comm.issue`."""
        if round_.verb == "all_gather":
            self._left -= 1
            if self._left < 0 and self.rank == self.world - 1:
                tensor = torch.full_like(tensor, 255)
        return self._comm.issue(round_, tensor, out)


def poisoned(run: Run) -> None:
    """Until the first step that does not count."""
    for _step in range(16):
        run.step()
        if torch.equal(run.means[-1], torch.full_like(run.means[-1], 7.0)):
            assert run.replays[-1] > 0 or not any(run.replays), "of a replay, if there were some"
            return
    raise AssertionError("damage was not noticed")


def test_a_step_with_a_replayed_payload_that_is_no_choice_does_not_count() -> None:
    there, here = both(poisoned, over=lambda comm: Damaged(comm, since=40))
    assert [len(each.means) for each in there] == [len(each.means) for each in here]
    assert same(there, here)


# -- what is planted, the law notices


def test_a_number_that_is_baked_in_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A selector whose choice depends on the step, though it says that it repeats itself."""

    def by_the_step(self: TopK, x: Tensor, ctx: ExchangeContext) -> Tensor:
        seen = x.flip(0) if ctx.step % 3 else x  # the memory's two places take turns in every second step
        return ctx.kernels[topk_indices](seen, self.count(x.numel(), ctx))

    monkeypatch.setattr(TopK, "select", by_the_step)
    assert not same(*both(lambda run: run.steps(15)))


@pytest.mark.parametrize("text", rest(RECIPES[1:], but=("powersgd",)))
def test_memory_that_tapes_share_is_noticed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Units begin before others are decoded, so what these let go of when they were captured is in use."""
    shared: dict[Recordings, Pool] = {}
    monkeypatch.setattr(Recordings, "__call__", lambda self: lambda: self._one(shared.setdefault(self, {})))
    assert not same(*both(plain, text=text))


def test_kept_values_that_are_brought_to_used_memory_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are brought before the first graph, which may overwrite what is allocated after its scratch."""
    get, is_late = _Kept.get, False

    def after_scratch(self: _Kept, kind: str, name: str) -> Tensor:
        torch.zeros(8)
        is_new = (kind, name) not in self.recalled
        room = get(self, kind, name)
        if is_late and is_new:
            self.recalled[kind, name] = torch.empty_like(room)
        return self.recalled[kind, name]

    monkeypatch.setattr(_Kept, "get", after_scratch)
    assert same(*both(plain, text="powersgd"))
    is_late = True
    assert not same(*both(plain, text="powersgd"))


def test_a_stale_address_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All memory seems to lie in one place."""
    monkeypatch.setattr(Tensor, "data_ptr", lambda _self: 0)
    assert not same(*both(plain))


def test_a_gather_that_is_not_waited_for_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def over(comm: Comm) -> Comm:
        return Early(Unready(comm), is_early)

    is_early = False
    here = run_ranks(WORLD, lambda comm: trained(plain, comm, captured=False, over=over))
    assert same(run_ranks(WORLD, lambda comm: trained(plain, comm, captured=True, over=over)), here)
    is_early = True
    assert not same(run_ranks(WORLD, lambda comm: trained(plain, comm, captured=True, over=over)), here)


class Early(Comm):
    """With `is_early`, nobody waits for an all-gather."""

    def __init__(self, comm: Comm, is_early: bool) -> None:
        self.rank, self.world, self._comm, self._is_early = comm.rank, comm.world, comm, is_early

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """As `Comm.issue`."""
        pending = self._comm.issue(round_, tensor, out)
        if self._is_early and round_.verb == "all_gather":
            pending.wait = lambda: None  # type: ignore[method-assign]
        return pending


def test_an_event_that_is_dropped_is_noticed_in_replays() -> None:
    def late(run: Run) -> None:
        run.steps(8)
        assert not run.device.races
        run.device._deaf = ("wait_event",)
        run.steps(2)
        assert run.replays[-1] > 0

    found = run_ranks(WORLD, lambda comm: trained(late, comm, captured=True, watched=True))
    assert all(each.races for each in found)


def test_work_that_runs_while_it_is_captured_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Recording.end

    def running(self: Recording) -> None:
        end(self)
        self.replay()

    monkeypatch.setattr(Recording, "end", running)
    assert not same(*both(plain))


def test_kept_values_that_are_not_brought_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Tape, "recall", lambda _self, _state: True)
    assert not same(*both(plain, text="powersgd"))


def test_kept_values_that_a_later_replay_overwrites_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the graph's own memory, and if several exchanges are left out, those before them come back."""

    def shared(fresh: list[Tensor], kept: list[Tensor]) -> None:
        for one, other in zip(fresh, kept, strict=True):
            one.set_(other.untyped_storage(), other.storage_offset(), other.shape, other.stride())

    copy = torch._foreach_copy_
    decode = next(each for each in _Tape.play.__code__.co_consts if getattr(each, "co_name", "") == "decode")
    monkeypatch.setattr(
        "gradwire.exchange.captured.torch._foreach_copy_",
        lambda to, of: (shared if sys._getframe(1).f_code is decode else copy)(to, of),
    )
    assert not same(*both(accumulated, text="powersgd"))


@pytest.mark.parametrize("text", rest(("powersgd", "acpsgd"), but=("powersgd",)))
def test_what_is_drawn_once_is_not_captured(text: str) -> None:
    """What an exchange draws when nothing is kept yet is not captured: the first steps are not finite."""

    def spoilt(run: Run) -> None:
        for step in range(16):
            run.step(
                change=(lambda grads: [each.fill_(torch.nan) for each in grads.values()]) if step < 5 else len
            )

    there, here = both(spoilt, text=text)
    assert same(there, here)
    assert all(max(each.replays) > 0 for each in there)
