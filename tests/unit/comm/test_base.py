"""What a round costs on the wire."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gradwire.comm.base import DONE, Finishing, Round, Unannounced, Verb
from gradwire.errors import TransportError
from tests.support.looped import looped


@looped("world", [1, 2, 3, 4, 5, 7])
@looped(
    ("verb", "total_sends"),
    [
        # Payloads sent by all ranks together, counted by hand per algorithm.
        ("all_reduce", lambda w: 2 * (w - 1)),  # a ring: W ranks, 2(W-1) chunks of M/W each
        ("all_gather", lambda w: w * (w - 1)),  # everybody's payload reaches everybody else
        ("broadcast", lambda w: w - 1),  # every other rank receives it once
        ("all_to_all", lambda w: w - 1),  # W ranks send W-1 rows of M/W each
        ("shift", lambda w: w if w > 1 else 0),  # everybody sends once, nobody to itself
    ],
)
def test_bytes_are_what_the_algorithm_sends(verb: Verb, total_sends, world: int) -> None:
    round_ = Round(verb, 210, torch.float32)
    assert round_.wire_bytes(world) == pytest.approx(total_sends(world) * 840 / world, rel=1e-15)


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.uint8, 1), (torch.float16, 2), (torch.int32, 4), (torch.float64, 8)]
)
def test_payload_counts_bytes_of_the_type(dtype: torch.dtype, size: int) -> None:
    assert Round("all_gather", 11, dtype).payload_bytes == 11 * size


def test_done_calls_back_at_once() -> None:
    called = []
    DONE.wait()
    DONE.then(lambda: called.append(True))
    assert called == [True]


class _Running:
    """A collective that has been waited for some times, and whose end is told when `end` is called."""

    def __init__(self) -> None:
        self.waited, self.told = 0, list[Callable[[], None]]()

    def wait(self) -> None:
        """See `Pending`."""
        self.waited += 1

    def then(self, callback: Callable[[], None]) -> None:
        """See `Pending`."""
        self.told.append(callback)


def test_what_is_left_to_do_is_done_once_by_the_one_that_waits() -> None:
    running, done = _Running(), []
    pending = Finishing(running, lambda: done.append(running.waited))
    pending.then(lambda: done.append(-1))
    assert done == []
    running.told[0]()
    assert done == [-1], "told, and nothing finished"
    pending.wait()
    pending.wait()
    assert done == [-1, 1]


def test_nothing_is_finished_of_what_did_not_end_well() -> None:
    def broken() -> None:
        raise TransportError("torn")

    running, done = _Running(), []
    running.wait = broken  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="torn"):
        Finishing(running, lambda: done.append(True)).wait()
    assert done == []


def test_one_is_called_back_at_once_where_no_end_is_announced_and_waits_then() -> None:
    running, told = _Running(), []
    pending = Unannounced(running)
    pending.then(lambda: told.append(running.waited))
    pending.wait()
    assert (told, running.waited) == ([0], 1)
