"""Short texts that ranks leave for one another, beside the collectives, in the store of their process group.

A collective that only some ranks issue waits for the timeout, or meets another one of other ranks, of which
gloo ends the process where lengths differ. So before such a risk ranks ask here what the others are doing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    Store,
    _get_default_store,
    default_pg_timeout,
)

from gradwire.errors import TransportError

T = TypeVar("T")

_made: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()
"""Number of boards that each group has had; equal on all ranks, because all make them together."""


class Board:
    """Pages of texts, one for each rank.

    All methods but `clear` raise `TransportError` where the store cannot be reached, at the timeout at the
    latest. None waits for another rank.
    """

    def __init__(self, store: Store, rank: int, world: int, timeout_s: float) -> None:
        """`store` is for this board alone, and shared by `world` ranks; `timeout_s` is how long they wait."""
        self.rank, self.world, self.timeout_s = rank, world, timeout_s
        self._store = store

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Board:
        """Make a board in the store of `group`; called on all its ranks, in the same order."""
        number = _made[group] = _made.get(group, 0) + 1
        store = PrefixStore(f"gradwire/{group.group_name}/{number}", _store_of(group))
        return cls(store, group.rank(), group.size(), _timeout_s(group))

    def write(self, page: str, text: str) -> None:
        """Put this rank's text on `page`, in the place of an earlier one."""
        self._ask(lambda: self._store.set(f"{page}/{self.rank}", text))

    def read(self, page: str) -> dict[int, str]:
        """The entries on `page`, by rank: one question to the store for each rank, one more if it wrote."""

        def found(rank: int) -> bytes | None:
            key = f"{page}/{rank}"
            return self._store.get(key) if self._store.check([key]) else None

        texts = [(rank, self._ask(partial(found, rank))) for rank in range(self.world)]
        return {rank: text.decode() for rank, text in texts if text is not None}

    def count(self, page: str, more: int) -> int:
        """Add to the number that ranks share on `page`, 0 at first. Returns the sum."""
        return self._ask(lambda: self._store.add(f"{page}/count", more))

    def clear(self, page: str) -> None:
        """Remove this rank's text on `page`, and the number, if the store can."""
        for key in (f"{page}/{self.rank}", f"{page}/count"):
            # What stays behind is overwritten or of no use, and the next question meets a store that is lost.
            with suppress(TransportError):
                self._ask(partial(self._store.delete_key, key))

    def _ask(self, question: Callable[[], T]) -> T:
        """The answer, or an error at the timeout.

        torch's client waits for as long as the connection stays open: for ever, where one direction of it is
        silent. So it waits on a thread of its own.
        """
        answer: Future[T] = Future()

        def ask() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="gradwire store", daemon=True).start()
        try:
            return answer.result(self.timeout_s)
        except TimeoutError as error:
            why = f"no answer in {self.timeout_s:.0f} s"
            raise TransportError(f"the store of the process group cannot be reached: {why}") from error
        except RuntimeError as error:
            raise TransportError(f"the store of the process group cannot be reached: {error}") from error


def _store_of(group: dist.ProcessGroup) -> Store:
    """The store of a group, or that of all groups if it is a group in Python, which has none."""
    with suppress(RuntimeError, AttributeError):
        own: Store | None = group.get_group_store()
        if own is not None:
            return own
    return _get_default_store()


def _timeout_s(group: dist.ProcessGroup) -> float:
    """Timeout of the group's collectives; the default where a group in Python does not say."""
    with suppress(RuntimeError, AttributeError):
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    return default_pg_timeout.total_seconds()
