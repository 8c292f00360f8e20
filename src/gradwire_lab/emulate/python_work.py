"""A c10d work whose collective is Python code on some thread, and whose errors reach the caller."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._C._distributed_c10d import Work


class Carried(Work):
    """Work of a process group for a collective of `carry`; `collective` returns the tensors.

    torch's `_create_work_from_future` loses errors in two places: the `wait` of its work never raises; and an
    exception set by `Future.set_exception` is a value in C++, where DDP takes it for gradients. Here `wait`
    raises the error of `collective`, and the future, which DDP reads, holds a C++ error with the same text:
    torch makes one when a callback given to `then` raises.
    """

    def __init__(self, collective: Callable[[], list[Any]]) -> None:
        super().__init__()
        self._collective: Callable[[], list[Any]] | None = collective
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._begun: torch.futures.Future[None] = torch.futures.Future()
        self._future: torch.futures.Future[list[Any]] = self._begun.then(self._perform)
        self._future.add_done_callback(lambda _future: self._ended.set())

    def carry(self) -> None:
        """Perform the collective on this thread, once. Raises nothing: see `wait`."""
        self._begun.set_result(None)

    def _perform(self, _begun: object) -> list[Any]:
        assert self._collective is not None, "carried once"
        try:
            return self._collective()
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._collective = None  # or its tensors would live as long as the work

    def wait(self, timeout: Any = None) -> bool:
        """Block until the tensors are in place; raises the error of the collective.

        `timeout` is a `timedelta`; C++ passes one of zero, which means none.
        """
        limit_s = timeout.total_seconds() if timeout else None
        if not self._ended.wait(limit_s):
            raise RuntimeError(f"the collective has not ended after {limit_s:g} s")
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[list[Any]]:
        """Future of the collective's tensors, or of its error."""
        return self._future

    def result(self) -> list[Any]:
        """The tensors; raises the error of the collective."""
        return self._future.wait()

    def is_completed(self) -> bool:
        """Whether the collective has ended, well or badly."""
        return self._ended.is_set()

    def is_success(self) -> bool:
        return self._ended.is_set() and self._error is None

    def exception(self) -> BaseException | None:
        """The exception of the collective, if it has failed."""
        return self._error
