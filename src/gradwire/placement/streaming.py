"""Gradients, memory, codecs and bytes on a device: for a transport whose collectives are work in a stream.

The thread that brings gradients enqueues all of it, and the host waits for none. Collectives of several
communicators must be issued in one order on all ranks, most safely by one thread (NCCL's user guide, "Using
multiple NCCL communicators concurrently"): the one that computes has collectives of its own to issue.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from gradwire.comm.base import Comm, Pending, Round

_AWAKE_S = 0.5


def _by_library(round_: Round) -> Round:
    return round_ if round_.algorithm == "library" else replace(round_, algorithm="library")


class StreamComm(Comm):
    """`Comm` over one whose collectives are enqueued: waiting for one puts the current stream after it.

    The host is not told of its end, so `then` calls back at once: what the callback enqueues comes after the
    collective, once it has waited. No time can be read from the end either.

    Sums and broadcasts go as the library likes: hops of our own are messages, for which the host waits.
    """

    announces = False

    def __init__(self, comm: Comm) -> None:
        self.rank, self.world, self._comm = comm.rank, comm.world, comm

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """Enqueue the collective by the library's own algorithm; the host does not wait."""
        return _Enqueued(self._comm.issue(_by_library(round_), tensor, out))


class _Enqueued:
    def __init__(self, inner: Pending) -> None:
        self.wait = inner.wait

    def then(self, callback: Callable[[], None]) -> None:
        callback()


class ThroughComm(Comm):
    """`Comm` for tensors on the CPU over one for tensors at `where`, on a device: the host waits for each."""

    announces = False

    def __init__(self, comm: Comm, where: torch.device) -> None:
        self.rank, self.world, self._comm, self._where = comm.rank, comm.world, comm, where

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        sent = tensor.to(self._where, copy=True)
        received = sent if out is tensor else torch.empty_like(out, device=self._where)
        return _Through(self._comm.issue(_by_library(round_), sent, received), received, out)


class _Through:
    def __init__(self, inner: Pending, received: Tensor, out: Tensor) -> None:
        self._inner, self._received, self._out = inner, received, out

    def wait(self) -> None:
        self._inner.wait()
        self._out.copy_(self._received)

    def then(self, callback: Callable[[], None]) -> None:
        callback()


class LaterComm(Comm):
    """`Comm` whose ends are announced on the thread that waits for them, through `later`, and on no other."""

    def __init__(self, comm: Comm, later: Callable[[Callable[[], None]], None]) -> None:
        self.rank, self.world, self._comm, self._later = comm.rank, comm.world, comm, later

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        return _Later(self._comm.issue(round_, tensor, out), self._later)


class _Later:
    def __init__(self, inner: Pending, later: Callable[[Callable[[], None]], None]) -> None:
        self.wait, self._inner, self._later = inner.wait, inner, later

    def then(self, callback: Callable[[], None]) -> None:
        self._inner.then(lambda: self._later(callback))


class Inline:
    """A `Post` that runs jobs on the calling thread, `within` a context: one by one, none in another.

    What other threads have to say, they say `later`: it is run on the thread that waits. `crashed` takes what
    a job raises; without it the calling thread does.

    >>> post, order = Inline(), []
    >>> post(lambda: [order.append(1), post(lambda: order.append(3)), order.append(2)])
    >>> order
    [1, 2, 3]
    """

    def __init__(
        self,
        within: Callable[[], AbstractContextManager[None]] = nullcontext,
        crashed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._within, self._crashed = within, crashed
        self._jobs: deque[Callable[[], None]] = deque()
        self._is_running = False
        self._later: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def __call__(self, job: Callable[[], None]) -> None:
        """Run `job`, or leave it to the call that is running one."""
        self._jobs.append(job)
        if self._is_running:
            return
        self._is_running = True
        try:
            with self._within():
                while self._jobs:
                    self._run(self._jobs.popleft())
        finally:
            self._is_running = False

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:
            if self._crashed is None:
                raise
            self._crashed(error)

    def later(self, job: Callable[[], None]) -> None:
        """Leave `job` to the thread that waits, or will; from any thread."""
        self._later.put(job)

    def wait(self, event: threading.Event, look: Callable[[], None] = lambda: None) -> None:
        """Run what is left to do until `event` is set; see `gradwire.placement.base.Wait`."""
        while not event.is_set():
            try:
                job = self._later.get(timeout=_AWAKE_S)
            except queue.Empty:
                look()
            else:
                self(job)
