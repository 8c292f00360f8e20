"""When gradients are handed to the reducer, and what the thread that trains waits for."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Hashable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comm import Comm, Pending, Round, run_ranks
from gradwire.control.controller import controller_for
from gradwire.errors import GradwireError, TransportError
from gradwire.measure.clock import now_s
from gradwire.placement import CommitTime, HostDevice, Placement, host
from gradwire.placement.transfer import BufferTransfer, TransferredBuffer
from gradwire.recipes import recipe
from gradwire.sources import source_of
from gradwire.sources.source import Source
from gradwire.step.environment import ReducerEnvironment
from gradwire.step.gradient_bucket import GradientBucket
from gradwire.step.moods import PASSES, Mood
from gradwire.step.on_device import DeviceBackward
from gradwire.step.optimizer_log import OptimizerLog
from gradwire.step.reducer import Backward, Reducer
from gradwire.step.step import Step
from gradwire.step.worker import Worker, wait_for
from gradwire.unit.context import Fates
from gradwire.unit.parameters import Slot
from tests.support.rig import gradients, specs


class ByName(Source):
    """Gradients of no model at all, one buffer for each name."""

    kind, parameters, device = "a test", {}, torch.device("cpu")

    def __init__(self) -> None:
        self.specs = specs()
        self.calls: list[str] = []
        self.last_gradient_s = 0.0

    @property
    def group(self) -> dist.ProcessGroup:
        raise NotImplementedError("threads as ranks have none")

    def begin(self, *_: Any, **_named: Any) -> None:
        """Its steps are made by `one_step`."""

    def step_ended(self, step: Step) -> None:
        self.calls.append(f"ended {step.committed}")
        self.last_gradient_s = step.come.last_s

    def release(self) -> None:
        self.calls.append("release")

    def complete(self) -> None:
        self.calls.append("complete")

    def one_step(self, backward: Backward, grads: dict[str, Tensor], order: list[int]) -> dict[str, Tensor]:
        """In any order of arrival; returns the means."""
        backward.begin()
        gradient_buckets = [
            GradientBucket(grads[spec.name].clone(), (Slot(spec, 0),), index)
            for index, spec in enumerate(self.specs)
        ]
        for index in order:
            backward.submit(gradient_buckets[index])
        backward.close()
        backward.settle()
        return {bucket.entries[0].spec.name: bucket.buffer for bucket in gradient_buckets}


def attached(
    source: Source, worker: Worker, placement: Placement, text: str, side: type[Backward] = Backward
) -> Backward:
    """The reducer of `source`, with no hooks, and the thread that trains on its `side`."""
    env = ReducerEnvironment(
        placement,
        controller_for=controller_for,
        finished=lambda step: backward.deliver(step),
        outcome_known=lambda step: backward.note(step),
    )
    backward = side(source, worker, Reducer(source.specs, recipe(text), env))
    return backward


@pytest.mark.parametrize("commits", ["now", "late"])
@pytest.mark.parametrize("text", ["dense", "topk(ratio=0.1)"])
def test_any_source_brings_gradients_and_gets_means_back(text: str, commits: CommitTime) -> None:
    def rank(comm: Comm) -> dict[str, Tensor]:
        source = ByName()
        worker = Worker(crashed=lambda error: backward.reducer.crash(error))

        placement = replace(host(comm, worker.post), commits=commits)
        backward = attached(source, worker, placement, text)
        order = sorted(range(len(source.specs)), key=lambda index: (index * (comm.rank + 2)) % 7)
        try:
            means = source.one_step(backward, gradients(comm.rank, 0), order)
            assert backward.is_sound
        finally:
            worker.stop()
        # The thread that trains goes on before the reducer's releases the step.
        assert source.calls[0] == f"ended {commits == 'now'}"
        assert backward.reducer.step == 1, "known at the latest when the step has to rest"
        assert sorted(source.calls[1:]) == ["complete", "release"]
        return means

    first, *others = run_ranks(3, rank)
    for other in others:
        assert all(torch.equal(other[name], mean) for name, mean in first.items())
    if text == "dense":
        for name, mean in first.items():
            expected = sum(gradients(each, 0)[name] for each in range(3)) / 3
            # Three products and two sums of numbers below 8, each rounded once.
            assert torch.allclose(mean, torch.as_tensor(expected), rtol=0, atol=5 * 8 * 2**-24)


class Heard(Comm):
    """A comm that notes when it is first waited for a payload, which is then decoded."""

    def __init__(self, comm: Comm) -> None:
        self.rank, self.world, self._comm = comm.rank, comm.world, comm
        self.decoded, self.decoded_s = threading.Event(), 0.0

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        pending = self._comm.issue(round_, tensor, out)

        def wait() -> None:
            pending.wait()
            if not self.decoded.is_set():
                self.decoded_s = now_s()
            self.decoded.set()

        return cast(Pending, SimpleNamespace(wait=wait, then=pending.then))


class Slow(BufferTransfer):
    """The last gradient is computed until something of the first has been decoded."""

    def __init__(self, last: int, event: threading.Event) -> None:
        self._last, self._event = last, event

    def start(self, key: Hashable, source: Tensor) -> TransferredBuffer:
        return TransferredBuffer(source, self._ready) if key == self._last else TransferredBuffer(source)

    def _ready(self) -> None:
        """It is there once the event is set; or too late, after some seconds."""
        if not self._event.wait(10.0):
            raise TimeoutError("nothing was decoded while this gradient was computed")


def test_what_has_come_is_decoded_while_a_device_still_computes() -> None:
    """The thread that trains runs far ahead of a device, and has brought all before the first is computed."""

    def rank(comm: Comm) -> bool:
        source, heard = ByName(), Heard(comm)
        worker = Worker(crashed=lambda error: backward.reducer.crash(error))

        transfer = Slow(len(source.specs) - 1, heard.decoded)
        placement = replace(host(heard, worker.post), transfer=transfer, post_after=worker.post_after)
        backward = attached(source, worker, placement, "topk(ratio=0.1)", DeviceBackward)
        try:
            source.one_step(backward, gradients(comm.rank, 0), list(range(len(source.specs))))
            assert source.last_gradient_s > heard.decoded_s > 0.0, (
                "when it was there, not when it was enqueued"
            )
            return backward.reducer.step == 1
        finally:
            worker.stop()

    assert all(run_ranks(2, rank))


class Nothing(Source):
    """No model, and nothing to take back."""

    def __init__(self) -> None:
        self.completed = 0

    @property
    def group(self) -> dist.ProcessGroup:
        raise NotImplementedError

    def begin(self, *_: Any, **_named: Any) -> None:
        """Nothing to register."""

    def complete(self) -> None:
        self.completed += 1


class LeftOut(OptimizerLog):
    """No optimizer has stepped, and gradients were cleared."""

    def fates(self) -> Fates:
        return Fates()


def _reducer(**other: Any) -> Any:
    usual = {
        "is_serial": False,
        "begin_step": print,
        "bucket_ready": print,
        "all_ready": print,
        "running": "dense",
        "layout": SimpleNamespace(is_plain=True),
        "watch": SimpleNamespace(end=print),
        "broken": None,
        "is_caught_up": True,
        "roll_back": print,
    }
    return SimpleNamespace(**{**usual, **other})


def _backward(source: Source | None = None, worker: Any = None, **reducer: Any) -> Backward:
    worker = worker or SimpleNamespace(post=lambda _job: None, wait=wait_for, call=lambda job: job())
    placement: Any = host(None, worker.post)  # type: ignore[arg-type]
    env = SimpleNamespace(on_host=None, control=SimpleNamespace(rank=1))
    return Backward(source or Nothing(), worker, _reducer(env=env, placement=placement, **reducer))


def _bring(backward: Backward, index: int) -> None:
    backward.submit(GradientBucket(torch.zeros(1), (), index))


def _whole_pass(backward: Backward) -> None:
    backward.begin()
    for index in range(3):
        _bring(backward, index)
    backward.close()


@pytest.mark.parametrize(
    ("overlap", "is_serial", "posted"),
    [(True, False, [2, 3, 4, 5]), (True, True, [0, 0, 0, 5]), (False, False, [0, 0, 0, 5])],
)
def test_gradients_wait_for_the_end_of_backward_without_overlap_and_in_a_step_taken_apart(
    overlap: bool, is_serial: bool, posted: list[int]
) -> None:
    jobs: list[object] = []
    backward = _backward(worker=SimpleNamespace(post=jobs.append), is_serial=is_serial)
    backward.overlap = overlap
    backward.begin()
    seen = []
    for index in range(3):
        _bring(backward, index)
        seen.append(len(jobs))
    backward.close()
    assert [*seen, len(jobs)] == posted


def _end(backward: Backward) -> None:
    """The step ends, as the worker tells it."""
    backward.history = SimpleNamespace(add=print, waited=print)  # type: ignore[assignment]
    step: Any = SimpleNamespace(error=None, has_failed_unheard=False)
    backward.deliver(step)


def _ending(backward: Backward, ended_s: list[float]) -> threading.Thread:
    def end() -> None:
        time.sleep(0.1)
        ended_s.append(time.monotonic())
        _end(backward)

    thread = threading.Thread(target=end)
    thread.start()
    return thread


def test_moods_follow_one_another_as_the_table_says() -> None:
    seen: set[tuple[Mood, Mood]] = set()

    class Watched(Backward):
        def __setattr__(self, name: str, value: object) -> None:
            if isinstance(value, Mood) and "mood" in self.__dict__ and value is not self.mood:
                seen.add((self.mood, value))
            super().__setattr__(name, value)

    def happens(what: str, backward: Backward, is_running: bool) -> bool:
        """Returns whether a step runs afterwards."""
        if what == "a gradient":
            backward.begin()
        elif what == "the last gradient" and backward.mood is Mood.BEGUN:
            backward.close()
        elif what == "the end of the step" and backward.mood is not Mood.BEGUN and is_running:
            _end(backward)
        elif what == "a call" and not (backward.mood is Mood.GIVEN and is_running):  # or it would wait
            backward.settle()
        return not backward._ended.is_set()

    events = ("a gradient", "the last gradient", "the end of the step", "a call")
    for course in product(events, repeat=5):
        backward, is_running = _backward(), False
        backward.__class__ = Watched
        for what in course:
            with contextlib.suppress(GradwireError):  # where it refuses
                is_running = happens(what, backward, is_running)
    assert seen == {(one, other) for one, others in PASSES.items() for other in others}


def test_nothing_else_is_asked_while_a_step_is_running() -> None:
    backward = _backward()
    backward.settle()
    _whole_pass(backward)
    ended_s: list[float] = []
    thread = _ending(backward, ended_s)
    backward.settle()
    assert time.monotonic() >= ended_s[0]
    thread.join()


def test_a_step_of_a_thread_that_has_ended_is_not_waited_for() -> None:
    worker = Worker(crashed=print, awake_s=0.001)
    backward = _backward(worker=worker)
    _whole_pass(backward)
    worker.stop()
    for wait in (backward.wait_for_outcome, backward.settle):
        with pytest.raises(GradwireError, match="thread has ended"):
            wait()


def test_after_a_backward_pass_that_broke_off_it_is_said_what_to_do() -> None:
    backward = _backward()
    backward.begin()
    _bring(backward, 0)
    for ask in (backward.settle, backward.begin):
        with pytest.raises(GradwireError, match=r"broke off .* Start all ranks again"):
            ask()


@pytest.mark.parametrize("broken", [None, TransportError("the peer is gone")])
def test_over_a_broken_transport_neither_ranks_nor_the_user_are_told_of_a_step_that_was_left_out(
    broken: TransportError | None,
) -> None:
    told: list[str] = []
    reducer = {"roll_back": lambda _fates: True, "is_counted": True, "step": 3, "commit_deferred": print}
    backward = _backward(broken=broken, **reducer)
    backward.optimizer_log = LeftOut({}, (), HostDevice())
    backward.calls.begin = lambda what, step: told.append(f"{what} at {step}")  # type: ignore[method-assign]
    backward.event_log = SimpleNamespace(dropped=lambda *_: told.append("news"))  # type: ignore[assignment]
    backward.begin()
    assert told == ([] if broken else ["news", "a backward pass after a step that was left out at 3"])


def test_a_failure_of_which_no_status_vote_told_is_told_before_the_next_exchange() -> None:
    told: list[str] = []
    backward = _backward(step=3)
    backward.calls.begin = lambda what, step: told.append(f"{what} at {step}")  # type: ignore[method-assign]
    backward.history = SimpleNamespace(add=print)  # type: ignore[assignment]
    failed: Any = SimpleNamespace(error=None, has_failed_unheard=True)
    backward.deliver(failed)
    backward.begin()
    assert told == ["a backward pass after a step that failed when its vote was out at 3"]


def test_what_a_step_brought_lands_before_the_next_forward_pass_after_an_interrupt() -> None:
    source = Nothing()
    backward = _backward(source)
    _whole_pass(backward)
    thread = _ending(backward, [])
    backward.before_forward()
    thread.join()
    assert source.completed == 1


def test_it_is_sound_between_steps_until_the_transport_breaks() -> None:
    backward = _backward()
    assert backward.is_sound
    backward.begin()
    _bring(backward, 0)
    assert not backward.is_sound, "gradients are missing"
    backward.close()
    assert not backward.is_sound, "there is no vote"
    _end(backward)
    assert backward.is_sound
    backward.reducer.broken = TransportError("torn")
    assert not backward.is_sound


def test_what_a_source_says_of_its_model(world_of_one: None) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)))
    source = source_of(model)
    assert (source.model, source.module) == (model, model.module)
    assert [spec.name for spec in source.specs] == ["1.bias", "1.weight", "0.bias", "0.weight"]
    late = torch.arange(6.0)
    for times in (1, 2):
        source.adding(source.specs[-1], late.clone())()
        weight = model.module[0].weight
        assert weight.grad is not None
        assert torch.equal(weight.grad, times * late.view(3, 2))
    assert source_of(nn.Linear(2, 2)).kind == "plain parameters", "as one rank has no others"
