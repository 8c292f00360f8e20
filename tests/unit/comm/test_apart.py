"""Groups of ranks that no default group holds: threads of one process stand for the ranks, over real gloo."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.comm import ProcessGroupComm
from gradwire.comm.apart import Apart
from gradwire.comm.process_group import GroupPeers
from gradwire.errors import TransportError


def met(
    world: int,
    body: Callable[[Apart], Any],
    connect_s: float = 60.0,
    missing: int = 0,
    by: Callable[[dist.Store], dist.Store] = lambda store: store,
) -> list[Future[Any]]:
    """What `body` returns on each rank of a meeting `by` a store, but for the last ones, which are
    `missing`.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=60)

    def run(rank: int) -> Any:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=limit)
        options: dict[str, Any] = {"address": "127.0.0.1", "connect_s": connect_s, "timeout_s": 600.0}
        meeting = Apart(by(own), "a meeting", rank, world, **options)
        try:
            return body(meeting)
        finally:
            meeting.close()

    with ThreadPoolExecutor(world) as threads:
        return [threads.submit(run, rank) for rank in range(world - missing)]


def test_ranks_are_numbered_within_the_meeting_and_groups_are_cut_by_list() -> None:
    def body(meeting: Apart) -> Any:
        whole, mine = torch.tensor([meeting.rank + 1.0]), torch.tensor([meeting.rank + 1.0])
        ProcessGroupComm(meeting.group).all_reduce(whole).wait()
        column = [meeting.rank % 2, meeting.rank % 2 + 2]
        (cut,) = meeting.borrow_parts(meeting.group, (column, meeting.group, torch.device("cpu")))
        ProcessGroupComm(cut).all_reduce(mine).wait()
        return float(whole), float(mine), dist.get_process_group_ranks(cut), dist.get_backend(cut)

    found = [each.result() for each in met(4, body)]
    assert found == [(10.0, 4.0 + 2 * (rank % 2), [rank % 2, rank % 2 + 2], "gloo") for rank in range(4)]


class Counted(dist.Store):
    """A store that counts how often something is asked of it: a round trip or two each."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__()
        self.asked, self._store = 0, store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.asked += 1
        return self._store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        self.asked += 1
        return self._store.multi_get(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=5)) -> None:
        self.asked += 1
        self._store.wait(keys, timeout)

    def clone(self) -> Counted:
        return self


@pytest.mark.parametrize("count", [1, 3])
def test_the_store_is_asked_once_for_any_number_of_ranks_and_groups(count: int) -> None:
    stores: list[Counted] = []

    def counted(store: dist.Store) -> dist.Store:
        stores.append(Counted(store))
        return stores[-1]

    def body(meeting: Apart) -> list[float]:
        part = (range(meeting.world), meeting.group, torch.device("cpu"))
        groups = meeting.borrow_parts(meeting.group, *[part] * count)
        sums = [torch.tensor([float(meeting.rank)]) for _ in groups]
        for each, group in zip(sums, groups, strict=True):
            ProcessGroupComm(group).all_reduce(each).wait()
        return [float(each) for each in sums]

    assert [each.result() for each in met(4, body, by=counted)] == [[6.0] * count] * 4
    assert [each.asked for each in stores] == [2] * 4  # for the first group, and for the others


def test_a_rank_that_does_not_come_is_missed_in_time() -> None:
    one, other = met(3, lambda meeting: None, connect_s=0.5, missing=1)
    for each in (one, other):
        with pytest.raises(
            TransportError, match="members cannot meet: not all 3 ranks of a meeting have come"
        ):
            each.result()


class Gone(Counted):
    """A store whose machine is gone."""

    def set(self, key: str, value: Any) -> None:
        raise RuntimeError("Broken pipe")


def test_a_store_that_is_gone_is_a_meeting_that_fails() -> None:
    for each in met(2, lambda meeting: None, by=Gone):
        with pytest.raises(TransportError, match=r"members cannot meet: .*: Broken pipe"):
            each.result()


def test_an_abort_ends_what_runs_here_and_on_other_ranks() -> None:
    def body(meeting: Apart) -> str:
        if meeting.rank == 0:
            threading.Timer(0.3, meeting.abort).start()
        try:
            if meeting.rank < 2:  # the last one never comes
                ProcessGroupComm(meeting.group).all_reduce(torch.ones(100_000)).wait()
            else:
                ProcessGroupComm(meeting.group).broadcast(torch.ones(10), 0).wait()
        except TransportError:
            meeting.abort()
            return "broken"
        return "done"

    assert [each.result() for each in met(3, body)] == ["broken"] * 3


def test_a_connection_that_closes_in_the_middle_of_a_message_ends_the_wait_for_it() -> None:
    sent = torch.ones(2**26)
    came = torch.zeros_like(sent)

    def body(meeting: Apart) -> str:
        try:
            if meeting.rank == 0:
                pending = GroupPeers([meeting.group]).send(sent, 1)
                while not came[0]:
                    time.sleep(0.001)
                meeting.abort()
                pending.wait()
            else:
                GroupPeers([meeting.group]).receive(came, 0).wait()
        except TransportError:
            return "broken"
        return "done"

    assert [each.result() for each in met(2, body)] == ["broken"] * 2
    assert not came[-1]


def test_a_wait_for_a_rank_that_is_slow_goes_on_while_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.comm.process_group.LOOK_S", 0.001)
    are_done = threading.Barrier(3, timeout=60.0)

    def body(meeting: Apart) -> float:
        time.sleep(0.1 * meeting.rank)
        found = torch.ones(1)
        try:
            ProcessGroupComm(meeting.group).all_reduce(found).wait()
        finally:
            are_done.wait()
        return float(found)

    assert [each.result() for each in met(3, body)] == [3.0] * 3


@pytest.mark.rest
def test_a_rank_that_leaves_ends_no_wait_for_others_as_long_as_something_comes() -> None:
    def body(meeting: Apart) -> list[float]:
        peers, parts = GroupPeers([meeting.group]), [torch.full((1000,), float(part)) for part in range(20)]
        if meeting.rank == 1:
            came = [torch.zeros_like(part) for part in parts]
            *others, last = [peers.receive(part, 2) for part in came]
            last.wait()
            for each in others:
                each.wait()
            return [float(part[0]) for part in came]
        for part in parts if meeting.rank == 2 else ():
            time.sleep(0.1)
            peers.send(part, 1).wait()
        return []

    assert [each.result() for each in met(3, body)] == [[], [float(part) for part in range(20)], []]


@pytest.mark.rest
@pytest.mark.parametrize("is_broken", [False, True])
def test_a_meeting_leaves_no_thread_or_file_behind(is_broken: bool) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def body(meeting: Apart) -> None:
        ProcessGroupComm(meeting.group).all_reduce(torch.ones(1)).wait()
        if is_broken:
            meeting.abort()

    met(2, body)
    before = held()
    for _ in range(5):
        met(2, body)
    until_s = time.monotonic() + 5.0
    while held() > before and time.monotonic() < until_s:
        time.sleep(0.05)
    assert held() <= before
