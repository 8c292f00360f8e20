"""Process groups of gradwire's own: lent to one attached model, and to the next one when that is gone.

A group costs sockets and threads. None is ended here: torch must end a group on all ranks at the same time,
because it names later groups by their number, whereas a model goes at different times on different ranks.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import default_pg_timeout

from gradwire.comm import Pending, ProcessGroupComm
from gradwire.comm.base import Finishing, Round
from gradwire.errors import TransportError

LENDS_NEW = False
"""Another model may have used a group before."""

_OFFERS = 16
"""A rank offers as many free groups at most, because all ranks must send messages of one length."""

_TRIED_SHARE, _TRIED_S = 0.05, 30.0
"""Limit for a first connection, as a share of the timeout and in seconds. A timeout allows for ranks that
come late; here they come together. Two ranks connect in milliseconds if they can. If a firewall drops
packets, no time is enough."""

_lent: WeakKeyDictionary[dist.ProcessGroup, bool] = WeakKeyDictionary()
"""Groups made here, oldest first, and whether a model has borrowed them. torch keeps them until it
ends them."""

_CPU = torch.device("cpu")
_Terms = tuple[list[int], str, Any]
"""Ranks, backend, and the timeout as torch has it."""


def borrow(
    like: dist.ProcessGroup, where: torch.device = _CPU, backend: str | None = None
) -> dist.ProcessGroup:
    """A group with the ranks, backend and timeout of `like` that no other model uses on any rank.

    `like` carries tensors at `where`. With another `backend`, such as gloo's, the group carries others.

    A collective over `like`: one all-gather of 128 bytes per rank, and none for the first such group. A group
    of another backend than `like` takes three numbers more. Raises `TransportError` where torch cannot create
    a group; if the backend is another, on all ranks, and after a small part of the timeout.
    """
    ranks, own, timeout = _terms(like, where)
    terms = ranks, backend or own, timeout
    known = _known(terms, _CPU if backend else where)
    free = _free_everywhere(_free(known), like, range(like.size()), where) if known else None
    if free is None and backend is not None:
        free = _new_everywhere(terms, like, where)
    return _lend(free, terms)


Part = tuple[Sequence[int], dist.ProcessGroup, torch.device]
"""Members of a group, by their numbers in it; a group of any ranks, whose backend and timeout the new one
takes; and the device of its tensors."""


class CannotConnect(TransportError):
    """Some ranks could not make a new group, and have told all others so. The groups that exist work."""


def borrow_parts(like: dist.ProcessGroup, *parts: Part) -> tuple[dist.ProcessGroup, ...] | None:
    """Borrow a group for each of `parts`: over members of `like`, this rank among them.

    A collective over all of `like`, which carries CPU tensors: an all-gather of 128 bytes per rank and part,
    and two of a few numbers. All ranks are in some part of each kind.

    `None`, on all ranks, if torch could not make a group: it names a group by the number of groups of a rank,
    and ranks that choose different names wait until the timeout. Raises `CannotConnect`, on all ranks, if
    some cannot make one: the others may be in other parts, and would go on.
    """
    terms: list[_Terms] = []
    free: list[dist.ProcessGroup | None] = []
    ranks = dist.get_process_group_ranks(like)
    for members, model, where in parts:
        _, backend, timeout = _terms(model, where)
        terms.append(([ranks[each] for each in members], backend, timeout))
        known = [group for group in _known(terms[-1], where) if group not in free]
        free.append(_free_everywhere(_free(known), like, members, _CPU))
    count = len(dist.distributed_c10d._world.pg_names)
    needs: list[int] = []
    for group, (members, *_) in zip(free, parts, strict=True):
        needs += [group is None, count, min(members)]
        count += group is None
    if not _can_be_made(_all_say(needs, like), len(parts)):
        return None
    failure: TransportError | None = None
    borrowed: list[dist.ProcessGroup] = []
    for group, of in zip(free, terms, strict=True):
        try:
            borrowed.append(_lend(group, of))
        except TransportError as error:  # members of the next part wait for this rank all the same
            failure = failure or error
    missing = [rank for rank, [came] in enumerate(_all_say([failure is None], like)) if not came]
    if missing:
        for group in borrowed:
            give_back(group)
        raise CannotConnect(f"ranks {missing} could not connect to those of their node") from failure
    return tuple(borrowed)


def _all_say(mine: Sequence[int], like: dist.ProcessGroup) -> list[list[int]]:
    """The numbers of all ranks of `like`."""
    comm, row = ProcessGroupComm(like), torch.tensor(list(mine), device="cpu")
    everybody = torch.empty(comm.world, len(row), dtype=row.dtype, device="cpu")
    comm.all_gather(everybody, row).wait()
    told: list[list[int]] = everybody.tolist()
    return told


def _can_be_made(needs: Sequence[Sequence[int]], parts: int) -> bool:
    """True if ranks that need a new group of a part are in equally many groups. `needs` are by rank,
    see above.
    """
    for part in range(parts):
        named: dict[int, set[int]] = {}
        for row in needs:
            is_new, count, first = row[3 * part : 3 * part + 3]
            if is_new:
                named.setdefault(first, set()).add(count)
        if any(len(counts) > 1 for counts in named.values()):
            return False
    return True


def _free(known: Sequence[dist.ProcessGroup]) -> list[dist.ProcessGroup]:
    if known and all(_lent[group] for group in known):
        gc.collect()  # a model in a cycle of references goes only now
    return [group for group in known if not _lent[group]]


def _lend(free: dist.ProcessGroup | None, terms: _Terms) -> dist.ProcessGroup:
    group = _new(terms) if free is None else free
    _lent[group] = True
    return group


def give_back(group: dist.ProcessGroup) -> None:
    """Let the next model have `group`: no collective runs on it, and nothing on it has failed.

    Does nothing to a group of the user's.
    """
    if group in _lent:
        _lent[group] = False


class Borrowed(ProcessGroupComm):
    """`Comm` over a group that may be borrowed; `close` gives it back if nothing runs on it or has failed."""

    _running = 0

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """See `ProcessGroupComm.issue`."""
        self._running += 1
        return Finishing(super().issue(round_, tensor, out), self._ended)

    def _ended(self) -> None:
        self._running -= 1

    def close(self) -> None:
        """End the helper thread, and let the next model have the group. Call it once."""
        super().close()
        if not self._running:
            give_back(self.group)


def lent() -> list[dist.ProcessGroup]:
    """The groups that models have borrowed and not given back, oldest first."""
    return [group for group, is_lent in _lent.items() if is_lent]


@contextmanager
def given_back_if_refused(groups: Callable[[], Sequence[dist.ProcessGroup]]) -> Iterator[None]:
    """`attach` refuses on all ranks at once, so no collective is running; a broken transport stays broken."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CannotConnect) or not isinstance(error, TransportError):
            for group in groups():
                give_back(group)
        raise


STREAMED = frozenset({"nccl", "xccl"})
"""Backends whose collectives are work in a stream."""


def backend_at(group: dist.ProcessGroup, where: torch.device) -> str | None:
    """The backend that carries tensors at `where`, as far as torch knows; `None` if there is none."""
    configured: str = str(dist.get_backend_config(group))
    backends = dict(each.split(":", 1) for each in configured.split(",") if ":" in each)
    return backends.get(where.type)


def carries_cpu(group: dist.ProcessGroup) -> bool:
    """True if a group carries tensors on the CPU."""
    return backend_at(group, _CPU) is not None


def _terms(group: dist.ProcessGroup, where: torch.device = _CPU) -> _Terms:
    """Properties that two groups must share to be interchangeable. Raises `KeyError` if the group was ended.

    The timeout is that of the backend for tensors at `where`.
    """
    ranks, timeout = dist.get_process_group_ranks(group), None
    # A group in Python has no backend per device; its own group then has the default timeout.
    with suppress(RuntimeError, AttributeError):
        native: Any = group
        timeout = native._get_backend(where).options._timeout
    return ranks, dist.get_backend(group), timeout


def _known(terms: _Terms, where: torch.device = _CPU) -> list[dist.ProcessGroup]:
    """Groups made here with these terms: the same on all ranks, except for which of them are lent.

    Their timeout is that of the backend for tensors at `where`.
    """
    found = []
    for group in list(_lent):
        with suppress(KeyError):
            if _terms(group, where) == terms:
                found.append(group)
    return found


def _free_everywhere(
    free: Sequence[dist.ProcessGroup], like: dist.ProcessGroup, members: Sequence[int], where: torch.device
) -> dist.ProcessGroup | None:
    """The first of the first member's `free` groups that is free on every other member of `like`.

    Members exchange them over `like`, in tensors at `where`; only the ranks `members` of it count.
    """
    offered = {_number(group): group for group in free[:_OFFERS]}
    mine = torch.tensor([*offered, *[0] * (_OFFERS - len(offered))], device=where)
    comm = ProcessGroupComm(like)
    everybody = torch.empty(comm.world, _OFFERS, dtype=mine.dtype, device=where)
    comm.all_gather(everybody, mine).wait()
    first, *others = everybody[list(members)].tolist()
    agreed = (number for number in first if number and all(number in other for other in others))
    return offered.get(next(agreed, 0))


def _number(group: dist.ProcessGroup) -> int:
    """Number above 0 made of the group's name, which is the same on all of its ranks."""
    return 1 + int.from_bytes(hashlib.blake2b(group.group_name.encode(), digest_size=7).digest())


def _new_everywhere(terms: _Terms, like: dist.ProcessGroup, where: torch.device) -> dist.ProcessGroup:
    """Make a new group of the ranks, backend and timeout in `terms`. Raises the same error on all ranks if
    one fails: that rank may reach the others by `like` alone, with tensors at `where`.

    Ranks first try with a group of a short timeout, and end it. It cannot be kept: gloo's messages keep the
    timeout with which a group was made.
    """
    ranks, backend, timeout = terms
    whole = default_pg_timeout if timeout is None else timeout
    short = min(_TRIED_SHARE, _TRIED_S / whole.total_seconds()) * whole
    _without(like, where, True)  # so that all begin together
    tried = _made_everywhere((ranks, backend, short), like, where)
    try:
        return _made_everywhere(terms, like, where)
    finally:
        # Not before: torch could reuse its name for the other group, which would find old addresses in the
        # store.
        dist.destroy_process_group(tried)


def _made_everywhere(terms: _Terms, like: dist.ProcessGroup, where: torch.device) -> dist.ProcessGroup:
    """Try once to make a group by `terms`, for up to its timeout; ranks tell each other the result by `like`,
    with tensors at `where`. Raises `TransportError` on all ranks if one has failed.
    """
    group: dist.ProcessGroup | None = None
    failure: TransportError | None = None
    try:
        group = _new(terms)
    except TransportError as error:
        failure = error
    missing = _without(like, where, group is not None)
    if group is not None and not missing:
        return group
    if group is not None:
        dist.destroy_process_group(group)  # or ranks would be in different numbers of groups
    raise TransportError(
        f"gradwire needs a process group for tensors on the CPU beside the model's, and gloo could not "
        f"connect ranks {missing}: set GLOO_SOCKET_IFNAME to an interface by which all ranks reach each "
        "other, or pass process_group="
    ) from failure


def _without(like: dist.ProcessGroup, where: torch.device, mine: bool) -> list[int]:
    """Ranks of `like` on which `mine` is false. A collective."""
    comm = ProcessGroupComm(like)
    told = torch.zeros(comm.world, dtype=torch.float32, device=where)
    told[comm.rank] = mine
    comm.all_reduce(told).wait()
    return [rank for rank, has in enumerate(told.tolist()) if not has]


def _new(terms: _Terms) -> dist.ProcessGroup:
    ranks, backend, timeout = terms
    try:
        # Without the other ranks, torch names a group after the number of groups that a rank is in, which may
        # differ between ranks. So the group is local only if there are others.
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
