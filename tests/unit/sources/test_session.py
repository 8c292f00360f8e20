"""When buckets are handed to the engine."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from gradwire.engine import worker as waiting
from gradwire.engine.arrival import Arrival
from gradwire.engine.worker import Worker
from gradwire.errors import GradwireError, TransportError
from gradwire.sources.ddp.buffers import Buffers
from gradwire.sources.ddp.session import Session


class Bucket:
    """The n-th of three."""

    def __init__(self, number: int) -> None:
        self.number = number

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.number == 2


class Wrapped:
    """As much of DDP as is looked at."""

    module, broadcast_buffers, require_forward_param_sync = None, False, True


DDP = Wrapped()


def no_buffers() -> Buffers:
    """None are wanted."""
    return Buffers(DDP, rank=0, world=2)  # type: ignore[arg-type]


class Map:
    """Knows which bucket is the last."""

    def arrival(self, bucket: Bucket) -> Arrival:
        return Arrival(torch.zeros(1), (), bucket.number)


@pytest.mark.parametrize(
    ("overlap", "apart", "posted"),
    [(True, False, [2, 3, 5]), (True, True, [0, 0, 5]), (False, False, [0, 0, 5])],
)
def test_buckets_wait_for_the_end_of_backward_without_overlap_and_in_a_step_taken_apart(
    overlap: bool, apart: bool, posted: list[int]
) -> None:
    jobs: list[object] = []
    engine = SimpleNamespace(apart=apart, open=print, arrive=print, close=print)
    session = Session(Map(), no_buffers(), SimpleNamespace(post=jobs.append), lambda _concluded: engine)
    session.overlap = overlap
    seen = []
    for number in range(3):
        session.take(Bucket(number))
        seen.append(len(jobs))
    assert seen == posted


def _session() -> Session:
    engine = SimpleNamespace(
        apart=False,
        open=print,
        arrive=print,
        close=print,
        layout=SimpleNamespace(is_plain=True),
        watch=SimpleNamespace(end=print),
        runner=SimpleNamespace(broken=None),
    )
    worker = SimpleNamespace(post=lambda _job: None, wait=waiting.wait_for)
    return Session(Map(), no_buffers(), worker, lambda _concluded: engine)


def test_nothing_else_is_asked_while_a_step_is_under_way() -> None:
    session = _session()
    session.rest()
    for number in range(3):
        session.take(Bucket(number))
    ended_s: list[float] = []

    def end() -> None:
        time.sleep(0.2)
        ended_s.append(time.monotonic())
        session._ended.set()

    thread = threading.Thread(target=end)
    thread.start()
    session.rest()
    assert ended_s
    assert time.monotonic() >= ended_s[0]
    thread.join()


def test_nobody_waits_for_a_step_of_a_thread_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_AWAKE_S", 0.001)
    worker = Worker(crashed=print)
    engine = SimpleNamespace(apart=False, open=print, arrive=print, close=print)
    session = Session(Map(), no_buffers(), worker, lambda _concluded: engine)
    for number in range(3):
        session.take(Bucket(number))
    worker.stop()
    for wait in (session._wait, session.rest):
        with pytest.raises(GradwireError, match="thread has ended"):
            wait()


def test_after_a_backward_pass_that_broke_off_it_is_said_what_to_do() -> None:
    session = _session()
    session.take(Bucket(0))
    for ask in (session.rest, lambda: session.take(Bucket(0))):
        with pytest.raises(GradwireError, match=r"broke off .* Start all ranks again"):
            ask()


def test_buffers_land_before_the_next_forward_pass_if_the_wait_for_them_was_interrupted() -> None:
    session = _session()
    for number in range(3):
        session.take(Bucket(number))
    landed: list[bool] = []
    carried = SimpleNamespace(land=lambda: landed.append(True))

    def end() -> None:
        time.sleep(0.05)
        session.buffers.packed = carried  # type: ignore[assignment]
        session.buffers.arrived(here=True, in_vain=False)
        session._ended.set()

    thread = threading.Thread(target=end)
    thread.start()
    session.before_forward(DDP)  # type: ignore[arg-type]
    thread.join()
    assert landed == [True]
    assert not DDP.require_forward_param_sync


def test_it_is_sound_between_steps_until_the_transport_breaks() -> None:
    session = _session()
    assert session.is_sound
    session.take(Bucket(0))
    assert not session.is_sound, "buckets are missing"
    for number in (1, 2):
        session.take(Bucket(number))
    assert not session.is_sound, "there is no verdict"
    session._ended.set()
    assert session.is_sound
    session.engine.runner.broken = TransportError("torn")
    assert not session.is_sound
