"""The verbs over a `torch.distributed` process group: the one file that talks to c10d."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from gradwire.comm import ahead
from gradwire.comm.algorithms import (
    STRIPE_BYTES,
    Collective,
    PointToPointComm,
    add_by_rank,
    collective_of,
    gloo_all_reduce,
    ring_all_gather,
    stripes,
)
from gradwire.comm.base import DONE, Finishing, Pending, Round, Unannounced, Verb
from gradwire.comm.progress import STOP_S, Progress
from gradwire.errors import TransportError

# torch 2.13 renamed the flat all-gather and warns about the old name; 2.11 has only the old one.
_all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class _Callback:
    """Callback owned by gloo's thread; it drops its reference after the call, so that tensors are freed."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        with _callbacks_lock:
            while _callbacks and _callbacks[0]() is None:
                _callbacks.popleft()
            _callbacks.append(weakref.ref(self))

    def __call__(self, _future: object) -> None:
        function, self._function = self._function, None
        if function is not None:
            function()


_PAUSE_S = 0.001
_LET_GO_S = 0.1
"""Seconds that a thread of gloo may take, after the end of a collective, to release its tensors."""
_has_comms = threading.Event()
_callbacks: deque[weakref.ref[_Callback]] = deque()
_callbacks_lock = threading.Lock()


def _let_callbacks_end() -> None:
    """Wait until no thread of gloo is in a callback, or will be, for instance of an abandoned step.

    Such a thread takes the interpreter's lock. If the interpreter exits meanwhile, Python ends the thread in
    the middle of C++, which aborts the process. Freeing a tensor takes the lock, too; a thread of gloo may do
    so just after `wait` has returned, and nothing tells when it has.
    """
    for _ in range(int(STOP_S / _PAUSE_S)):
        if all(callback() is None for callback in list(_callbacks)):
            break
        threading.Event().wait(_PAUSE_S)
    if _has_comms.is_set():
        threading.Event().wait(_LET_GO_S)


# Registered before the finalizers of threads that issue collectives, and so called after them.
weakref.finalize(_Callback, _let_callbacks_end)


is_lost: WeakKeyDictionary[dist.ProcessGroup, Callable[[], bool]] = WeakKeyDictionary()
"""By group, where that can be told: whether all that still waits will wait in vain. See `_end`."""

LOOK_S = 0.5
LOOKS = 2
"""Seconds between two questions of a wait, and how many in a row must find it lost: what has come then has
ended."""


def _end(work: Any, lost: Callable[[], bool]) -> None:
    """Wait for `work`. Raises `RuntimeError` if it fails, or once it is `lost`.

    If a connection closes in the middle of a message, gloo tells all that wait for it but the receiver of
    that message and its sender. Nothing ends their wait before the timeout, so it is on another thread.
    """
    ended, errors, looks = threading.Event(), list[BaseException](), 0

    def wait() -> None:
        try:
            work.wait()
        except BaseException as error:
            errors.append(error)
        ended.set()

    threading.Thread(target=wait, name="gradwire waits for gloo", daemon=True).start()
    while not ended.wait(LOOK_S):
        looks = looks + 1 if lost() else 0
        if looks == LOOKS:
            raise RuntimeError("a connection was closed")
    if errors:
        raise errors[0]


class WorkPending:
    """A collective's c10d work, or those of several messages, over `group`."""

    def __init__(self, works: list[Any], group: dist.ProcessGroup | None = None) -> None:
        """Without a `group`, nothing tells whether the works are lost."""
        self._works, self._lost = works, None if group is None else is_lost.get(group)

    def wait(self) -> None:
        """Block until all works are done; a broken transport raises `TransportError`."""
        for work in self._works:
            try:
                work.wait() if self._lost is None else _end(work, self._lost)
            except RuntimeError as error:
                raise TransportError(f"a collective failed: {error}") from error

    def then(self, callback: Callable[[], None]) -> None:
        """Call back when the work has ended; not for messages, which have no future."""
        [work] = self._works
        # Not `then`: its future would keep the callback's result.
        work.get_future().add_done_callback(_Callback(callback))


def _stays(_comm: object, _tensor: Tensor, _out: Tensor) -> Pending:
    return DONE


def _copies(_comm: object, tensor: Tensor, out: Tensor) -> Pending:
    out.view(-1).copy_(tensor.view(-1))
    return DONE


def _issued(
    verb: Callable[..., Any],
    comm: ProcessGroupComm,
    tensor: Tensor,
    out: Tensor,
    *,
    in_place: bool = False,
    **options: Any,
) -> Pending:
    """Issue the library's collective; one that is always `in_place` takes one tensor. Raises
    `TransportError`.
    """
    tensors = (tensor,) if in_place else (out.view(-1), tensor.view(-1))
    try:
        pending = WorkPending([verb(*tensors, group=comm.group, async_op=True, **options)], comm.group)
    except RuntimeError as error:
        raise TransportError(f"a collective could not be issued: {error}") from error
    return comm._beside().issue(pending.wait) if comm.group in is_lost else pending


SWAP_BYTES = 4 * 2**20
"""Size up to which two ranks on gloo swap and add instead of running a ring of two. The bytes are the same
and the messages fewer. A swap takes a quarter of the CPU time at 800 kB and below, and the same from about
20 MB on, where it would only need a second buffer."""


SHORT_BYTES = 2**15
"""Size up to which, for each pair of ranks, gloo runs a swap or all-to-all and announces its end without a
thread of gradwire's own. Ranks that drift apart then send half-duplex (see `_under_way`); for 32 kB this
costs about 1 ms at 200 Mbit/s."""

TURN_S = 0.005
"""Scheduling delay of that thread if all cores compute (measured with two ranks on two cores). A message that
takes longer on the wire gains more from sending both ways at once."""


PIECE_BYTES = 2**17
"""Largest message of an all-to-all on gloo, in bytes. With longer ones, ranks that send to the same peer
saturate its link while other links idle."""


Addressed = tuple[Tensor, int]
"""A message, and the rank at its other end."""


Way: TypeAlias = "Callable[[ProcessGroupComm, Tensor, Tensor], Pending]"
"""Issues rounds that are alike: takes the comm, the tensor that is handed in, and the one for what comes. The
comm keeps it, so it must not refer to the comm: that would live until garbage is collected."""

_MOST_WAYS = 1024
"""Rounds of sizes that never come again must not fill memory."""


class _Collectives:
    """The collectives of a group as c10d has them, with their options, looked up once.

    Functions of `torch.distributed` look up the group, check types and make options in each call. The options
    are those that they make for `async_op=True`. torch 2.13 renamed two of the methods.
    """

    def __init__(self, group: Any) -> None:
        self.all_reduce = group.allreduce
        self.all_gather = getattr(group, "all_gather_single", None) or group._allgather_base
        self.all_to_all = getattr(group, "all_to_all_single", None) or group.alltoall_base
        options: Any = c10d
        self.reducing, self.gathering = options.AllreduceOptions(), options.AllgatherOptions()
        self.exchanging = options.AllToAllOptions()
        self.reducing.reduceOp = dist.ReduceOp.SUM
        for each in (self.reducing, self.gathering, self.exchanging):
            each.asyncOp = True


class _InStream(Unannounced):
    """c10d's work on tensors of a device: waiting for it makes a stream wait."""

    def __init__(self, verb: Verb, bound: _Collectives, _comm: object, tensor: Tensor, out: Tensor) -> None:
        """Issue it. Raises `TransportError`."""
        try:
            match verb:
                case "all_reduce":
                    self._work = bound.all_reduce([tensor], bound.reducing)
                case "all_gather":
                    self._work = bound.all_gather(out.view(-1), tensor, bound.gathering)
                case _:
                    self._work = bound.all_to_all(out, tensor, [], [], bound.exchanging)
        except RuntimeError as error:
            raise TransportError(f"a collective could not be issued: {error}") from error

    def wait(self) -> None:
        """Let work in the current stream come after the collective. Raises `TransportError`."""
        try:
            self._work.wait()
        except RuntimeError as error:
            raise TransportError(f"a collective failed: {error}") from error


class ProcessGroupComm(PointToPointComm):
    """`Comm` over a c10d group. Only one thread may use it, so that the order of rounds is the program's.

    `groups` are that group and further ones; long messages are spread over all of them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.groups: tuple[dist.ProcessGroup, ...] = (group,)
        self.rank: int = group.rank()
        self.world: int = group.size()
        self._peers = [rank for rank in range(self.world) if rank != self.rank]
        self.series: ahead.ReceiveSeries | None = None
        """Receives announced ahead, or `None`."""
        self._shares_links = False
        self._ways: dict[tuple[object, ...], Way] = {}
        """How rounds are issued, by what tells them apart."""
        self._progress: Progress | None = None
        self._short_bytes = SHORT_BYTES
        _has_comms.set()

    @cached_property
    def _bound(self) -> _Collectives | None:
        """`None` with a version of torch that has other names."""
        try:
            return _Collectives(self.group)
        except AttributeError:
            return None

    def close(self) -> None:
        """End the helper thread, if there is one. The caller has waited for all of its rounds."""
        if self._progress is not None:
            self._progress.stop()

    def spread(self, more: Sequence[dist.ProcessGroup]) -> None:
        """Send long messages over this group and `more`; call it on all ranks between the same collectives.

        gloo has one connection between two ranks of a group, and it carries at most one TCP window per round
        trip. CPU messages are cut into `gradwire.comm.algorithms.stripes`, one for each group. The library
        sends long sums and gathers over one connection; here they use gradwire's own hops, in the library's
        order of addition. So the number of groups changes neither the bits of a result nor the order of
        messages. Broadcasts by the library stay on one connection.

        `more` has the same ranks in the same order. A broken connection breaks the collective.
        """
        self.groups = (self.group, *more)
        self.connections = len(self.groups)
        self._ways.clear()

    def expect(self, byte_s: float) -> None:
        """Adapt to a link of `byte_s` seconds per byte; call it on all ranks between the same collectives."""
        self._short_bytes = min(SHORT_BYTES, int(TURN_S / max(byte_s, 1e-12)))
        self._ways.clear()

    def announce(self, series: ahead.ReceiveSeries | None) -> None:
        """Announce receives ahead, if there is a series; call it on all ranks between the same
        collectives."""
        self.series = series
        self._ways.clear()

    def share_links(self) -> None:
        """Ranks share a node's link: all-gathers cross it once, in a ring, instead of from each rank to each.
        Call it on all ranks."""
        self._shares_links = True
        self._ways.clear()

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """Issue a round: by the library, as point-to-point messages if these are faster, or by hops of our
        own. Rounds that are alike go the same way, which is chosen once.
        """
        # Not the round itself: the hash of a dataclass is a function of Python.
        nbytes, is_cpu = tensor.nbytes, tensor.is_cpu
        key = round_.verb, round_.algorithm, round_.by, round_.src, nbytes, is_cpu
        way = self._ways.get(key)
        if way is None:
            if len(self._ways) >= _MOST_WAYS:
                self._ways.clear()
            way = self._ways[key] = self._way(round_, nbytes, is_cpu)
        return way(self, tensor, out)

    def _way(self, round_: Round, nbytes: int, is_cpu: bool) -> Way:
        """The way of a round with a tensor of `nbytes`, on the CPU or on a device.

        For tensors of a device the library is called without `torch.distributed` in between. A single rank
        copies its own data; its group need not exist any more.
        """
        if self.world == 1:
            return _stays if round_.verb in ("all_reduce", "broadcast") else _copies
        if round_.algorithm != "library":
            if round_.algorithm == "direct" and is_cpu:
                return self._direct(nbytes)
            return lambda comm, tensor, _out: comm.hop(collective_of(round_, tensor))
        bound = None if is_cpu else self._bound
        if bound is not None and round_.verb in ("all_reduce", "all_gather", "all_to_all"):
            return partial(_InStream, round_.verb, bound)
        match round_.verb:
            case "all_reduce":
                return self._all_reduce(nbytes, is_cpu)
            case "broadcast":
                return partial(_issued, dist.broadcast, in_place=True, group_src=round_.src)
            case "all_gather":
                return self._all_gather(nbytes, is_cpu)
            case "all_to_all":
                return self._all_to_all(nbytes, is_cpu)
            case "shift":
                target, source = self._neighbours(round_.by)
                if target == self.rank:  # a copy
                    return _copies
                return lambda comm, tensor, out: comm._shift(target, source, tensor, out)

    def hop(self, collective: Collective) -> Pending:
        """See `PointToPointComm.hop`: on a thread beside the caller."""
        if self.world == 1:
            return DONE
        return self._beside().issue(partial(collective, GroupPeers(self.groups, self.series)))

    def _all_reduce(self, nbytes: int, is_cpu: bool) -> Way:
        """Sum in place: by a swap with the only peer, by gradwire's own hops in gloo's order, or by the
        library.

        Two addends commute, so a swap gives the same bits as a ring.
        """
        if self.world == 2 and is_cpu and nbytes <= SWAP_BYTES:
            return self._direct(nbytes)
        if is_cpu and (self._is_striped(nbytes // self.world) or self.series is not None):
            return lambda comm, tensor, _out: comm.hop(partial(gloo_all_reduce, tensor))
        return partial(_issued, dist.all_reduce, in_place=True)

    def _direct(self, nbytes: int) -> Way:
        """Exchange tensors among all ranks; the waiting thread adds them.

        In rank order, so that all ranks get the same bits, even if several have a NaN.
        """
        swap = self._swap(nbytes)

        def direct(comm: ProcessGroupComm, tensor: Tensor, _out: Tensor) -> Pending:
            others = tensor.new_empty(comm.world - 1, tensor.numel())
            come = swap(comm, tensor.view(-1), others)
            return Finishing(come, partial(add_by_rank, tensor.view(-1), others, comm.rank))

        return direct

    def _all_gather(self, nbytes: int, is_cpu: bool) -> Way:
        if self.world == 2 and is_cpu:
            swap, peer = self._swap(nbytes), 1 - self.rank

            def gather(comm: ProcessGroupComm, tensor: Tensor, out: Tensor) -> Pending:
                out[comm.rank].copy_(tensor)
                return swap(comm, tensor.view(-1), out[peer])

            return gather
        if is_cpu and self.series is not None and not self._shares_links:
            return ProcessGroupComm._gather_in_messages
        if is_cpu and (self.series is not None or self._is_striped(nbytes)):
            return ProcessGroupComm._gather_in_a_ring
        return partial(_issued, _all_gather_flat)

    def _gather_in_messages(self, tensor: Tensor, out: Tensor) -> Pending:
        """As many bytes as a ring, and one latency."""
        out[self.rank].copy_(tensor)
        neighbours = [self._neighbours(by) for by in range(1, self.world)]
        return self._messages(
            [(out[source].view(-1), source) for _target, source in neighbours],
            [(tensor.view(-1), target) for target, _source in neighbours],
        )

    def _gather_in_a_ring(self, tensor: Tensor, out: Tensor) -> Pending:
        out[self.rank].copy_(tensor)
        return self.hop(partial(ring_all_gather, out))

    def _is_striped(self, message_bytes: int) -> bool:
        """True if messages of the CPU with this many bytes take several connections."""
        return self.connections > 1 and message_bytes >= 2 * STRIPE_BYTES

    def _swap(self, nbytes: int) -> Way:
        """Send a flat tensor to every peer and receive as much from each, in one message each way.

        Rows of what is received are those of the peers, by rank.
        """
        is_short = nbytes <= self._short_bytes and self.series is None
        return ProcessGroupComm._short_swap if is_short else ProcessGroupComm._long_swap

    def _long_swap(self, sent: Tensor, received: Tensor) -> Pending:
        rows, peers = received.view(self.world - 1, -1), self._peers
        return self._messages(list(zip(rows, peers, strict=True)), [(sent, rank) for rank in peers])

    def _short_swap(self, sent: Tensor, received: Tensor) -> Pending:
        splits = [sent.numel()] * self.world
        splits[self.rank] = 0
        copies = sent if self.world == 2 else sent.repeat(self.world - 1)
        cut: dict[str, Any] = {"output_split_sizes": splits, "input_split_sizes": splits}
        return _issued(dist.all_to_all_single, self, copies, received, **cut)

    def _beside(self) -> Progress:
        """The helper thread, which waits where gloo does not call back."""
        self._progress = self._progress or Progress()
        return self._progress

    def _all_to_all(self, nbytes: int, is_cpu: bool) -> Way:
        if not is_cpu or (nbytes <= self.world * self._short_bytes and self.series is None):
            return partial(_issued, dist.all_to_all_single)
        return ProcessGroupComm._exchange_pieces

    def _exchange_pieces(self, tensor: Tensor, out: Tensor) -> Pending:
        rows, received = tensor.view(self.world, -1), out.view(self.world, -1)
        received[self.rank].copy_(rows[self.rank])
        step, others = self.connections * PIECE_BYTES // tensor.element_size(), range(1, self.world)
        pieces = [slice(start, start + step) for start in range(0, rows.shape[1], step)]
        neighbours = [self._neighbours(by) for by in others]
        return self._messages(
            [(received[source, here], source) for here in pieces for _target, source in neighbours],
            [(rows[target, here], target) for here in pieces for target, _source in neighbours],
        )

    def _shift(self, target: int, source: int, tensor: Tensor, out: Tensor) -> Pending:
        """Send `tensor` to rank `target`, and receive `out` from `source`. gloo's messages have no future, so
        none announces its end.
        """
        return Unannounced(WorkPending(self._under_way([(out, source)], [(tensor, target)]), self.group))

    def _neighbours(self, by: int) -> tuple[int, int]:
        """The ranks that a shift sends to and receives from."""
        return (self.rank + by) % self.world, (self.rank - by) % self.world

    def _messages(self, receives: Sequence[Addressed], sends: Sequence[Addressed]) -> Pending:
        """Exchange tensors with the ranks beside them; `then` is told when all have ended."""
        works = self._under_way(receives, sends)
        return self._beside().issue(WorkPending(works, self.group).wait) if works else DONE

    def _under_way(self, receives: Sequence[Addressed], sends: Sequence[Addressed]) -> list[Any]:
        """Issue the messages that are not empty, and return their works.

        Receives come first. gloo sends only to a rank that has announced its receive. An announcement queued
        after this rank's sends would delay the peer's messages until those have passed, so the link would be
        used in one direction at a time. (50 kB each way at 30 Mbit/s, ranks 3 ms apart: 14 ms, against 26 ms
        in the other order; the wire alone takes 13 ms. gloo's own all-to-all has the other order.)

        Messages of a device are issued as one group. NCCL runs ungrouped messages one after another, so ranks
        that all receive first would wait for each other.
        """
        messages = [(dist.irecv, *each) for each in receives] + [(dist.isend, *each) for each in sends]
        messages = [each for each in messages if each[1].numel()]
        try:
            if any(not each.is_cpu for _verb, each, _rank in messages):
                return dist.batch_isend_irecv(
                    [
                        dist.P2POp(verb, each, group=self.group, group_peer=rank)
                        for verb, each, rank in messages
                    ]
                )
            return [work for each in messages for work in _striped(self.groups, *each, series=self.series)]
        except RuntimeError as error:
            raise TransportError(f"a message could not be issued: {error}") from error


def _striped(
    groups: Sequence[dist.ProcessGroup],
    verb: Callable[..., Any],
    message: Tensor,
    rank: int,
    tag: int = 0,
    *,
    series: ahead.ReceiveSeries | None = None,
) -> list[Any]:
    """Send or receive `message` in stripes, one over each of `groups`.

    Args:
        groups: groups of the same ranks.
        verb: `dist.isend` or `dist.irecv`.
        message: sent, or written.
        rank: the other rank.
        tag: tag of the message.
        series: receives that are announced ahead; `None` without.

    Returns the works, one for each stripe.
    """
    works: list[Any] = []
    for part, group in zip(stripes(message, len(groups)), groups, strict=False):
        own = tag if series is None else series.tag_of(part, tag)
        if verb is dist.isend:
            works.append(dist.isend(part, group=group, group_dst=rank, tag=own))
        elif series is None or own == tag:
            works.append(dist.irecv(part, group=group, group_src=rank, tag=tag))
        else:
            works.append(ahead.Receive(series, group, part, rank, own))
    return works


ALGORITHM_TAG = 1
"""Tag of messages in hops. Shifts, all-to-alls and swaps, which another thread sends, have tag 0."""


class GroupPeers:
    """`gradwire.comm.algorithms.Peers` over c10d groups of the same ranks, one for each stripe of a
    message."""

    def __init__(
        self, groups: Sequence[dist.ProcessGroup], series: ahead.ReceiveSeries | None = None
    ) -> None:
        self._groups, self._series = groups, series
        self.rank: int = groups[0].rank()
        self.world: int = groups[0].size()

    def send(self, tensor: Tensor, target: int) -> Pending:
        return self._message(dist.isend, tensor, target)

    def receive(self, out: Tensor, source: int) -> Pending:
        return self._message(dist.irecv, out, source)

    def _message(self, verb: Callable[..., Any], tensor: Tensor, rank: int) -> Pending:
        if tensor.numel() == 0:
            return DONE
        try:
            series = self._series if tensor.is_cpu else None
            works = _striped(self._groups, verb, tensor, rank, ALGORITHM_TAG, series=series)
            return WorkPending(works, self._groups[0])
        except RuntimeError as error:
            raise TransportError(f"a message could not be issued: {error}") from error
