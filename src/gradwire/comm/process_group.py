"""The verbs over a `torch.distributed` process group: the one file that talks to c10d."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.comm.base import DONE, Algorithm, Broadcasting, Pending
from gradwire.comm.hops import ALL_REDUCES, BROADCASTS
from gradwire.comm.progress import Progress
from gradwire.errors import TransportError

# torch 2.13 renamed the flat all-gather and warns about the old name; 2.11 has only the old one.
_all_gather_flat: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class WorkPending:
    """One or several c10d works that end together."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self) -> None:
        """Block until all works are done; a broken transport raises `TransportError`."""
        for work in self._works:
            try:
                work.wait()
            except RuntimeError as error:
                raise TransportError(f"a collective failed: {error}") from error

    def then(self, callback: Callable[[], None]) -> None:
        """Call back when the last work has ended."""
        # Works of one rank may end in any order; waiting in the event loop for all of them but the
        # last is brief, because shift's send and receive end at nearly the same moment.
        self._works[-1].get_future().then(lambda _future: callback())


class SumPending(WorkPending):
    """Two ranks have swapped their tensors; the sum is taken by whoever waits.

    In rank order, which decides whose NaN comes out when both have one.
    """

    def __init__(self, works: list[Any], tensor: Tensor, other: Tensor, rank: int) -> None:
        super().__init__(works)
        self._tensor = tensor
        self._addends = (tensor, other) if rank == 0 else (other, tensor)
        self._summed = False

    def wait(self) -> None:
        """Block until both tensors are here, and add them, once."""
        super().wait()
        if not self._summed:
            self._summed = True
            torch.add(*self._addends, out=self._tensor)


SWAP_BYTES = 4 * 2**20
"""Up to here two ranks on gloo swap and add instead of running a ring of two. The bytes are the same, the
messages are fewer: a quarter of the CPU time at 800 kB and below, the same from about 20 MB on, where the
second buffer would buy nothing."""


PIECE_BYTES = 2**17
"""An all-to-all on gloo goes in messages no longer than this. Between two ranks gloo moves one large
message at a time, not one each way, and ranks that send to one peer at once fill its cable while others idle:
with 1 MB for each of four ranks at 500 Mbit/s whole messages take 74 ms, these 57, and the wire alone 49."""


class ProcessGroupComm:
    """`Comm` over a c10d group. Only one thread may use it, so that the order is the program's."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.world: int = group.size()
        self._progress: Progress | None = None

    def _issue(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Pending:
        return WorkPending([self._work(verb, *args, **kwargs)])

    def _work(self, verb: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return verb(*args, group=self._group, async_op=True, **kwargs)
        except RuntimeError as error:
            raise TransportError(f"a collective could not be issued: {error}") from error

    def _hop(self, collective: Callable[[GroupPeers], None]) -> Pending:
        """Run `collective` beside the caller, after those issued before."""
        if self.world == 1:
            return DONE
        self._progress = self._progress or Progress()
        return self._progress.issue(partial(collective, GroupPeers(self._group)))

    def all_reduce(self, tensor: Tensor, algorithm: Algorithm = "library") -> Pending:
        """See `Comm.all_reduce`. Two addends commute, so a swap gives the same bits as a ring."""
        if algorithm != "library":
            return self._hop(partial(ALL_REDUCES[algorithm], tensor))
        if not self._swaps(tensor) or tensor.numel() * tensor.element_size() > SWAP_BYTES:
            return self._issue(dist.all_reduce, tensor)
        other = torch.empty_like(tensor)
        return SumPending([self._swap(other, tensor)], tensor, other, self.rank)

    def all_gather(self, out: Tensor, tensor: Tensor) -> Pending:
        """See `Comm.all_gather`."""
        if not self._swaps(tensor):
            return self._issue(_all_gather_flat, out.view(-1), tensor)
        out[self.rank].copy_(tensor)
        return WorkPending([self._swap(out[1 - self.rank], tensor)])

    def _swaps(self, tensor: Tensor) -> bool:
        return self.world == 2 and tensor.device.type == "cpu"

    def _swap(self, received: Tensor, sent: Tensor) -> Any:
        """Send `sent` to the only peer and receive as much, in one message each way."""
        splits = [0, 0]
        splits[1 - self.rank] = sent.numel()
        return self._work(dist.all_to_all_single, received.view(-1), sent.view(-1), splits, splits)

    def broadcast(self, tensor: Tensor, src: int, algorithm: Broadcasting = "library") -> Pending:
        """See `Comm.broadcast`."""
        if algorithm != "library":
            return self._hop(partial(BROADCASTS[algorithm], tensor, src))
        return self._issue(dist.broadcast, tensor, group_src=src)

    def all_to_all(self, out: Tensor, tensor: Tensor) -> Pending:
        """See `Comm.all_to_all`."""
        row_bytes = tensor.numel() // self.world * tensor.element_size()
        if tensor.device.type != "cpu" or row_bytes <= PIECE_BYTES:
            return self._issue(dist.all_to_all_single, out, tensor)
        step, rows = PIECE_BYTES // tensor.element_size(), tensor.view(self.world, -1)
        received, works = out.view(self.world, -1), []
        received[self.rank].copy_(rows[self.rank])
        for start in range(0, rows.shape[1], step):
            here = slice(start, start + step)
            for by in range(1, self.world):
                target, source = self._neighbours(by)
                works += self._pass(received[source, here], rows[target, here], target, source)
        return ShiftPending(works)

    def shift(self, out: Tensor, tensor: Tensor, by: int = 1) -> Pending:
        """See `Comm.shift`. A shift onto oneself is a copy."""
        target, source = self._neighbours(by)
        if target == self.rank:
            out.copy_(tensor)
            return DONE
        return ShiftPending(self._pass(out, tensor, target, source))

    def _neighbours(self, by: int) -> tuple[int, int]:
        """To whom a shift goes, and from whom it comes."""
        return (self.rank + by) % self.world, (self.rank - by) % self.world

    def _pass(self, out: Tensor, tensor: Tensor, target: int, source: int) -> list[Any]:
        """The works of a message to `target` and one from `source`."""
        try:
            send = dist.isend(tensor, group=self._group, group_dst=target)
            receive = dist.irecv(out, group=self._group, group_src=source)
        except RuntimeError as error:
            raise TransportError(f"a message could not be issued: {error}") from error
        return [send, receive]


class ShiftPending(WorkPending):
    """gloo's point-to-point works have no future, so the end cannot be announced, only waited for."""

    def then(self, callback: Callable[[], None]) -> None:
        """Announce at once: whoever is called back waits, briefly, in `wait`."""
        callback()


HOPS_TAG = 1
"""Messages of hops are told by it from those of `shift` and `all_to_all`, which another thread sends."""


class GroupPeers:
    """The ranks of a c10d group; see `gradwire.comm.hops.Peers`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank: int = group.rank()
        self.world: int = group.size()

    def send(self, tensor: Tensor, target: int) -> Pending:
        """See `Peers.send`."""
        return self._message(dist.isend, tensor, group_dst=target)

    def receive(self, out: Tensor, source: int) -> Pending:
        """See `Peers.receive`."""
        return self._message(dist.irecv, out, group_src=source)

    def _message(self, verb: Callable[..., Any], tensor: Tensor, **peer: int) -> Pending:
        if tensor.numel() == 0:
            return DONE
        try:
            return ShiftPending([verb(tensor, group=self._group, tag=HOPS_TAG, **peer)])
        except RuntimeError as error:
            raise TransportError(f"a message could not be issued: {error}") from error
