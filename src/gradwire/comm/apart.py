"""Process groups of ranks without a common default group: ranks of several jobs, as long as they meet.

All groups are made from one store, by lists of ranks. torch's `new_group` knows only the ranks of the default
group. Other functions of torch that ask a group for its ranks, its backend or its store find them here, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.distributed_c10d import (
    BackendConfig,
    GroupName,
    PrefixStore,
    ProcessGroupGloo,
    Store,
    _world,
)

from gradwire.comm.groups import Part
from gradwire.comm.process_group import LOOK_S, is_lost
from gradwire.errors import TransportError

T = TypeVar("T")

_CPU = torch.device("cpu")
_FILES = "/proc/self/fd"
_QUIET_MS = 500
"""Milliseconds without a byte after which nothing moves on a connection."""
_ESTABLISHED = 1
"""State of a TCP connection that is open on both sides, as Linux numbers it."""
_ADDRESSES = "addresses"
"""Prefix of the keys by which ranks tell each other their addresses."""


class Lending(Protocol):
    """Makes process groups beside a model's own: `gradwire.comm.groups`, or `Apart`."""

    LENDS_NEW: bool
    """True if no other model has used the groups before."""

    def borrow(
        self, like: dist.ProcessGroup, where: torch.device = ..., backend: str | None = None
    ) -> dist.ProcessGroup:
        """See `gradwire.comm.groups.borrow`."""

    def borrow_parts(self, like: dist.ProcessGroup, *parts: Part) -> tuple[dist.ProcessGroup, ...] | None:
        """See `gradwire.comm.groups.borrow_parts`."""


class Apart:
    """The groups of one meeting: one over all of its ranks, and others over some of them.

    Ranks are numbered within the meeting. Groups carry tensors on the CPU, over gloo.
    """

    LENDS_NEW = True

    def __init__(
        self,
        store: Store,
        name: str,
        rank: int,
        world: int,
        *,
        address: str,
        connect_s: float,
        timeout_s: float,
        lost: Callable[[], bool] = lambda: False,
    ) -> None:
        """Meet the other ranks at `store`, under a `name` that no other meeting has.

        `address` is this rank's, to which others connect. Making any group takes `connect_s` at most, and a
        collective `timeout_s`. Until all ranks are connected, `lost` tells whether one has gone; then their
        connections do. Raises `TransportError` if not all ranks come and connect.
        """
        self.name, self.rank, self.world = name, rank, world
        self._store = PrefixStore(f"gradwire/{name}", store)
        self._address, self._connect_s, self._timeout_s = address, connect_s, timeout_s
        self._cut: dict[tuple[int, ...], int] = {}
        """Number of groups made so far, by their ranks."""
        self._groups: list[dist.ProcessGroup] = []
        self._addresses: list[_Addresses] = []
        """One for each group. gloo asks them again if it connects late, as the environment may tell it."""
        self._connections = _Connections()
        self._lost = lost
        (self.group,) = self.make(range(world))
        """Over all ranks."""
        self._lost = self._connections.are_lost

    # -- groups

    def make(self, *parts: Sequence[int]) -> tuple[dist.ProcessGroup, ...]:
        """Make a new group over each of `parts`, which are lists of ranks that include this one, all at once.

        All ranks that are in a part with this one call it at this point, with that part among theirs. Raises
        `TransportError` if some cannot connect.
        """
        lists = [tuple(each) for each in parts]
        names = [self._new_name(ranks) for ranks in lists]
        most = max(map(len, lists))
        what = f"not all {most} ranks of {self.name} have come and connected"
        made = within(self._connect_s, partial(self._connect, names, lists), what, self._lost)
        self._connections.note()
        return tuple(map(self._registered, names, lists, made))

    def _new_name(self, ranks: tuple[int, ...]) -> GroupName:
        number = self._cut[ranks] = self._cut.get(ranks, 0) + 1
        digest = hashlib.blake2b(f"{self.name} {ranks} {number}".encode(), digest_size=8).hexdigest()
        return GroupName(f"gradwire-{digest}")

    def _connect(self, names: Sequence[GroupName], lists: Sequence[tuple[int, ...]]) -> list[Any]:
        """gloo's part of each group. Addresses go over the store once for all groups: each rank says its own
        before it waits for any, so none waits for one that waits.
        """
        stores, begun = [_Addresses() for _ in names], []
        self._addresses += stores
        for store, ranks in zip(stores, lists, strict=True):
            device = self._connections.device(self._address)
            begun.append(begin(partial(self._gloo, store, ranks.index(self.rank), len(ranks), device)))
        try:
            for name, store, connects in zip(names, stores, begun, strict=True):
                wait([store.mine, connects], return_when=FIRST_COMPLETED)
                mine = store.mine.result() if store.mine.done() else connects.result()
                self._store.set(f"{_ADDRESSES}/{name}/{self.rank}", json.dumps(mine))
            keys = [
                f"{_ADDRESSES}/{name}/{each}" for name, of in zip(names, lists, strict=True) for each in of
            ]
            told = iter(self._store.multi_get(keys))
            for store, ranks in zip(stores, lists, strict=True):
                store.all.set_result(dict(json.loads(next(told)) for _ in ranks))
        except BaseException as error:
            for store in stores:
                if not store.all.done():
                    store.all.set_exception(error)
            raise
        return [each.result() for each in begun]

    def _gloo(self, store: Store, rank: int, world: int, device: Any) -> Any:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=self._timeout_s)
        options._devices = [device]
        own: Any = ProcessGroupGloo
        return own(store, rank, world, options)

    def _registered(self, name: GroupName, ranks: tuple[int, ...], made: Any) -> dist.ProcessGroup:
        """Group over what gloo has `made`, as torch and gradwire know groups."""
        store = PrefixStore(name, self._store)
        group = dist.ProcessGroup(store, ranks.index(self.rank), len(ranks))
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        group._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, made)
        group._set_group_name(name)
        group._set_group_desc("gradwire")
        _world.pg_map[group] = ("gloo", store)
        _world.pg_names[group] = name
        _world.pg_group_ranks[group] = {each: place for place, each in enumerate(ranks)}
        _world.pg_backend_config[group] = str(BackendConfig(dist.Backend("cpu:gloo")))
        self._groups.append(group)
        is_lost[group] = self._connections.are_lost
        return group

    # -- as `gradwire.comm.groups` lends groups

    def borrow(
        self, like: dist.ProcessGroup, where: torch.device = _CPU, backend: str | None = None
    ) -> dist.ProcessGroup:
        """Return `like` itself, whatever the other arguments are: nothing else uses this group."""
        return like

    def borrow_parts(self, like: dist.ProcessGroup, *parts: Part) -> tuple[dist.ProcessGroup, ...]:
        """A new group over each of `parts`, as `gradwire.comm.groups.borrow_parts` does it."""
        ranks = dist.get_process_group_ranks(like)
        return self.make(*([ranks[each] for each in members] for members, _model, _where in parts))

    # -- the end

    def abort(self) -> None:
        """Break all connections: whatever runs on them, here and on other ranks, ends with an error.

        Where the system is not Linux, that happens at the timeout on other ranks.
        """
        self._connections.shut()

    def close(self) -> None:
        """Let go of all groups. Nothing runs on them any more."""
        for group in self._groups:
            for known in (_world.pg_map, _world.pg_names, _world.pg_group_ranks, _world.pg_backend_config):
                known.pop(group, None)
        self._groups.clear()
        del self.group, self._store


class _Addresses(Store):
    """Store of one group, by which gloo tells its address and learns those of the other ranks.

    Over the store of a meeting gloo would ask for one rank after the other, each with three round trips.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mine: Future[tuple[str, str]] = Future()
        """Key and value that gloo sets: the only ones."""
        self.all: Future[dict[str, str]] = Future()
        """Values of all ranks, by key."""

    def set(self, key: str, value: Any) -> None:
        self.mine.set_result((key, bytes(value).hex()))

    def get(self, key: str) -> bytes:
        return bytes.fromhex(self.all.result()[key])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.all.result()

    def clone(self) -> _Addresses:
        return self


class _Connections:
    """The gloo devices of one `Apart`, with the means to shut down their sockets.

    gloo cannot abort a running collective: `ProcessGroup.abort` does nothing, and the group lives until its
    timeout. Shutting a connection down ends its collectives at once on both sides. gloo does not tell its
    sockets, but each device has an event poll (epoll) of its own, and Linux lists the sockets of a poll.
    """

    _lock = threading.Lock()

    def __init__(self) -> None:
        self._polls: list[int] = []
        self._counts = dict[int, int]()
        """As many files as each poll has watched, with all connections."""
        self._is_shut = False

    def device(self, address: str) -> Any:
        """New gloo device that listens and connects at `address`. Its event poll is noted for `shut`."""
        with self._lock:
            before = _event_polls()
            made = ProcessGroupGloo.create_device(hostname=address)
            self._polls += sorted(_event_polls() - before)
        return made

    def note(self) -> None:
        """Note how many connections the last device has, now that they have been made."""
        for poll in self._polls:
            self._counts.setdefault(poll, len(_polled(poll)))

    def are_lost(self) -> bool:
        """True if all were shut down, or if gloo has closed one and nothing moves on the others.

        A member that has all that it needs may leave while others still send to each other.
        """
        if self._is_shut:
            return True
        polled = [(_polled(poll), count) for poll, count in [*self._counts.items()]]
        if all(len(numbers) >= count for numbers, count in polled):
            return False
        return not any(_moves(number) for numbers, _count in polled for number in numbers)

    def shut(self) -> None:
        """Shut down all connections. Listening sockets stay: gloo would not survive their loss."""
        self._is_shut = True
        for poll in self._polls:
            for number in _polled(poll):
                with suppress(OSError), _handle(number) as own:
                    # gloo may have closed it just before, and its number may be another file's by now.
                    is_ours = number in _polled(poll)
                    if is_ours and not own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        own.shutdown(socket.SHUT_RDWR)
        self._polls.clear()


def _event_polls() -> set[int]:
    """File descriptors of this process's event polls; empty on systems other than Linux."""
    found = set()
    with suppress(OSError):
        for each in os.listdir(_FILES):
            with suppress(OSError):
                if os.readlink(f"{_FILES}/{each}") == "anon_inode:[eventpoll]":
                    found.add(int(each))
    return found


def _polled(poll: int) -> list[int]:
    """File descriptors that the event poll with descriptor `poll` watches; empty if it is closed."""
    try:
        with open(f"/proc/self/fdinfo/{poll}") as file:
            return [int(each) for each in re.findall(r"tfd:\s*(\d+)", file.read())]
    except OSError:
        return []


def _handle(number: int) -> socket.socket:
    """A second handle on the connection with this file descriptor. Raises `OSError` if it is another file."""
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _moves(number: int) -> bool:
    """True if bytes have just come over the connection with this file descriptor, or reached its other end.

    Only Linux tells.
    """
    with suppress(OSError), _handle(number) as own:  # no connection, such as a pipe; or closed just now
        told = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
        data_ms, acknowledged_ms = struct.unpack_from("=II", told, 52)
        return told[0] == _ESTABLISHED and min(data_ms, acknowledged_ms) < _QUIET_MS
    return False


def begin(function: Callable[[], T]) -> Future[T]:
    """Run `function` on a thread of its own, whose end nobody needs to wait for."""
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(function())
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=run, name="gradwire connects", daemon=True).start()
    return found


def within(
    limit_s: float, function: Callable[[], T], failure: str, lost: Callable[[], bool] = lambda: False
) -> T:
    """Result of `function`; raises `TransportError` with the text `failure` after `limit_s` seconds at most,
    and earlier once it is `lost`.

    The function runs on its own thread, because torch's waits cannot be interrupted.
    """
    found, left_s = begin(function), limit_s
    while not wait([found], min(LOOK_S, left_s)).done:
        left_s -= LOOK_S
        if left_s <= 0.0:
            raise TransportError(f"members cannot meet: {failure} in {limit_s:.0f} s")
        if lost():
            raise TransportError(f"members cannot meet: {failure}, as one of them has gone")
    try:
        return found.result()
    except RuntimeError as error:
        raise TransportError(f"members cannot meet: {failure}: {error}") from error


def alone() -> dist.ProcessGroup:
    """A group of this rank alone, which knows its number in the default group. It sends nothing."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    group = dist.ProcessGroup(HashStore(), 0, 1)
    group._set_group_name(GroupName(f"gradwire-alone-{rank}"))
    _world.pg_group_ranks[group] = {rank: 0}
    return group
