"""When a backward pass begins, and when gradients are there."""

from __future__ import annotations

from itertools import count

import pytest
import torch
from torch import nn

from gradwire.measure import clock
from gradwire.measure.clock import BackwardWatch, EventStopwatch, HostStopwatch, stopwatch_for
from gradwire.placement import Accelerator, HostDevice


class FakeEvent:
    """Like `torch.cuda.Event` with timing: times in milliseconds, known once the device has come so far."""

    recorded = count()

    def __init__(self) -> None:
        self.at_ms: float | None = None
        self.done = False

    def record_event(self, event: FakeEvent) -> None:
        """Stands for the stream, too."""
        event.at_ms = 10.0 * next(self.recorded)

    def synchronize(self) -> None:
        self.done = True

    def elapsed_time(self, other: FakeEvent) -> float:
        assert other.done, "nobody has waited for it"
        assert self.at_ms is not None
        assert other.at_ms is not None
        return other.at_ms - self.at_ms


class Ticks:
    """A clock and stopwatch in one: every look at it is a second later."""

    def __init__(self) -> None:
        self._ticks = count()

    def __call__(self) -> float:
        return float(next(self._ticks))

    mark = __call__

    def seconds(self, start: float, stop: float) -> float:
        return stop - start


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def test_gradients_are_ready_in_the_order_of_the_backward_pass() -> None:
    watch, model = BackwardWatch(Ticks()), _model()
    watch.watch(model.named_parameters())
    loss = model(torch.ones(1, 3)).sum()
    watch.begin()
    loss.backward()
    ready = watch.ready_s()
    assert set(ready) == {name for name, _ in model.named_parameters()}
    assert sorted(ready.values()) == [1.0, 2.0, 3.0, 4.0]
    assert max(ready["1.weight"], ready["1.bias"]) < min(ready["0.weight"], ready["0.bias"])


def test_a_pass_that_begins_forgets_the_one_before() -> None:
    watch, model = BackwardWatch(Ticks()), _model()
    watch.watch(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    watch.begin()
    assert watch.ready_s() == {}


def test_nobody_is_watched_any_more_after_release_and_only_once_before() -> None:
    watch, model = BackwardWatch(Ticks()), _model()
    watch.watch(model.named_parameters())
    watch.watch(model.named_parameters())
    watch.begin()
    model(torch.ones(1, 3)).sum().backward()
    assert max(watch.ready_s().values()) == 4.0
    watch.release()
    assert watch.ready_s() == {}
    watch.begin()
    model(torch.ones(1, 3)).sum().backward()
    assert watch.ready_s() == {}


def test_frozen_parameters_are_never_ready() -> None:
    watch, model = BackwardWatch(Ticks()), _model()
    model[0].bias.requires_grad_(False)
    watch.watch(model.named_parameters())
    watch.begin()
    model(torch.ones(1, 3)).sum().backward()
    assert set(watch.ready_s()) == {"0.weight", "1.weight", "1.bias"}


def test_the_beginning_is_taken_once_and_is_now_where_nobody_has_marked_it() -> None:
    clock = Ticks()
    watch = BackwardWatch(clock=clock)
    watch.begin()
    assert clock() == 1.0
    assert watch.take_begun_s() == 0.0
    assert watch.take_begun_s() == 2.0


def test_the_end_of_a_pass_is_known_by_the_clock_that_marked_its_beginning() -> None:
    watch = BackwardWatch(Ticks())
    assert watch.mark_end() is None
    watch.begin()
    watch.take_begun_s()
    ended = watch.mark_end()
    assert ended is not None
    watch.begin()
    assert ended() == 1.0, "of its own pass, whenever it is asked"
    watch.take_begun_s()
    watch.take_begun_s()
    assert watch.mark_end() is None, "a pass without a beginning has not that of the one before"


def test_what_precedes_a_pass_counts_from_the_end_of_the_last_one() -> None:
    watch = BackwardWatch(clock=Ticks())
    assert watch.before_s(5.0) == 0.0
    watch.end()
    assert watch.before_s(7.5) == 7.5


def test_events_are_read_when_somebody_asks_and_waits_for_them() -> None:
    watch, model = BackwardWatch(EventStopwatch(FakeEvent, FakeEvent)), _model()
    watch.watch(model.named_parameters())
    loss = model(torch.ones(1, 3)).sum()
    watch.begin()
    loss.backward()
    assert sorted(watch.ready_s().values()) == pytest.approx([0.01, 0.02, 0.03, 0.04])


def test_the_stopwatch_is_that_of_the_device_which_computes() -> None:
    assert isinstance(stopwatch_for(HostDevice()), HostStopwatch)
    assert isinstance(stopwatch_for(Accelerator(torch.device("cuda"))), EventStopwatch)


def test_a_host_looks_at_its_clock() -> None:
    watch = HostStopwatch()
    start = watch.mark()
    assert 0.0 <= watch.seconds(start, watch.mark()) < 60.0


@pytest.mark.parametrize(("spent_s", "busy"), [((0.0, 0.0, 0.0, 6.0, 8.0), 2.0), ((5.0,) * 5, 0.0)])
def test_the_cores_that_a_backward_pass_keeps_busy_are_its_processor_time_over_its_time(
    spent_s: tuple[float, ...], busy: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the beginning to the last gradient four seconds pass, one for each gradient."""
    monkeypatch.setattr(clock, "now_s", Ticks())
    monkeypatch.setattr(clock, "process_s", iter(spent_s).__next__)
    watch, model = BackwardWatch(Ticks(), clock=Ticks(), exact=Ticks()), _model()
    assert watch.busy() == 0.0, "nothing is watched"
    watch.watch(model.named_parameters())
    loss = model(torch.ones(1, 3)).sum()
    watch.begin()
    loss.backward()
    assert watch.busy() == busy


def test_what_is_spent_after_a_backward_pass_counts_from_its_last_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "process_s", Ticks())
    watch, model = BackwardWatch(Ticks(), clock=Ticks(), exact=Ticks()), _model()
    assert watch.spent_since_s() == 0.0, "nothing is watched"
    watch.watch(model.named_parameters())
    loss = model(torch.ones(1, 3)).sum()
    watch.begin()
    loss.backward()
    assert [watch.spent_since_s(), watch.spent_since_s()] == [1.0, 2.0]
