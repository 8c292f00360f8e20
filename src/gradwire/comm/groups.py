"""Process groups of gradwire's own: lent to one attached model, and to the next one once that has gone.

A group costs sockets and threads. None is ended here: torch must end one on all ranks at once, because it
names later groups after how many there are, whereas a model goes on each rank in that rank's own time.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from gradwire.comm import ProcessGroupComm
from gradwire.errors import TransportError

_OFFERS = 16
"""A rank offers as many free groups at most, because all ranks must send messages of one length."""

_lent: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()
"""The groups made here, oldest first, and whether a model has them. torch keeps them until it ends them."""

_Terms = tuple[list[int], str, Any]
"""Ranks, backend, and the timeout as torch has it."""


def borrow(like: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group with the ranks, backend and timeout of `like` that no other model uses on any rank.

    A collective over `like`: one all-gather of 128 bytes per rank, and none for the first such group. Raises
    `TransportError` where torch cannot create a group.
    """
    terms = _terms(like)
    known = _known(terms)
    if known and all(_lent[group] for group in known):
        gc.collect()  # a model in a cycle of references goes only now
    group = _free_everywhere([group for group in known if not _lent[group]], like) if known else None
    if group is None:
        group = _new(terms)
    _lent[group] = True
    return group


def give_back(group: dist.ProcessGroup) -> None:
    """Let the next model have `group`: nothing is under way on it, and nothing on it has failed.

    Does nothing to a group of the user's.
    """
    if group in _lent:
        _lent[group] = False


@contextmanager
def given_back_if_refused(group: dist.ProcessGroup) -> Iterator[None]:
    """`attach` refuses on all ranks at once, so nothing is under way; a broken transport stays broken."""
    try:
        yield
    except TransportError:
        raise
    except Exception:
        give_back(group)
        raise


def _terms(group: dist.ProcessGroup) -> _Terms:
    """What a group must have in common with another to stand in for it. Raises `KeyError` if it was ended."""
    ranks, timeout = dist.get_process_group_ranks(group), None
    # A group in Python has no backend per device; its own group then has the default timeout.
    with suppress(RuntimeError, AttributeError):
        native: Any = group
        timeout = native._get_backend(torch.device("cpu")).options._timeout
    return ranks, dist.get_backend(group), timeout


def _known(terms: _Terms) -> list[dist.ProcessGroup]:
    """The groups made here with these terms: the same on all ranks, but for which of them are lent."""
    found = []
    for group in list(_lent):
        with suppress(KeyError):
            if _terms(group) == terms:
                found.append(group)
    return found


def _free_everywhere(free: Sequence[dist.ProcessGroup], like: dist.ProcessGroup) -> dist.ProcessGroup | None:
    """The first of rank 0's `free` groups that is among those of every other rank."""
    offered = {_number(group): group for group in free[:_OFFERS]}
    mine = torch.tensor([*offered, *[0] * (_OFFERS - len(offered))], device="cpu")
    comm = ProcessGroupComm(like)
    everybody = torch.empty(comm.world, _OFFERS, dtype=mine.dtype, device="cpu")
    comm.all_gather(everybody, mine).wait()
    first, *others = everybody.tolist()
    agreed = (number for number in first if number and all(number in other for other in others))
    return offered.get(next(agreed, 0))


def _number(group: dist.ProcessGroup) -> int:
    """Its name, which is the same on all its ranks, as a number above 0."""
    return 1 + int.from_bytes(hashlib.blake2b(group.group_name.encode(), digest_size=7).digest())


def _new(terms: _Terms) -> dist.ProcessGroup:
    ranks, backend, timeout = terms
    try:
        # Without the other ranks torch names a group after the number of groups that a rank is in, which
        # may differ between ranks: so locally only where there are others.
        own: dist.ProcessGroup = dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
    except RuntimeError as error:
        raise TransportError(
            f"could not create gradwire's own process group over ranks {ranks} ({error}). If these ranks "
            "are members of different numbers of groups, create one with torch.distributed.new_group on "
            "all ranks and pass it as process_group="
        ) from error
    return own
