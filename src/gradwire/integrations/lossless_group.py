"""A process group over gloo that sums floats with fewer bytes and the same results.

For code that calls `all_reduce` on gradients and takes no hook::

    from gradwire.integrations import lossless_group

    dist.init_process_group(lossless_group.register())        # or dist.new_group(backend="gradwire")

Sums of large float32, bfloat16 or float16 tensors on the CPU go around gradwire's ring in lossless frames
(GComp's codec); everything else goes to gloo. On two ranks the sums have gloo's bits; on more they are those
of a ring in another order than gloo's. Tables of exponents are kept by size and type of the tensors, made
anew once in 50 sums of a kind.

Sums run one after the other on the group's own thread, over their own connections, so other collectives do
not disturb them. A sum that fails raises `PeerFailed` if another rank could not encode or decode, and
`TransportError` if a message was lost. Under DDP, which is C++, it is a `RuntimeError` with that name in its
text.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire._api.prepare import kernels_of, prepare
from gradwire.comm.base import Pending
from gradwire.comm.python_work import Carried
from gradwire.errors import PeerFailed, TransportError
from gradwire.exchange.gcomp import Frames, gcomp
from gradwire.exchange.ring import RingAllReduce
from gradwire.step.context import ExchangeContext, ExchangeState, Part

NAME = "gradwire"
SMALLEST_BYTES = 1 << 16
"""Below that a sum takes as long as its 2(N − 1) messages, however short they are."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EXCHANGE = gcomp("lossless")
# torch's stubs describe how groups are called, not how they are written.
_ProcessGroup: Any = dist.ProcessGroup
_c10d: Any = dist.distributed_c10d


class LosslessGroup(_ProcessGroup):  # type: ignore[misc]
    """gloo, with an all-reduce of its own for sums of floats."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._plain = _c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
        env = _c10d.PrefixStore("gradwire-ring", store)
        self._ring = _Ring(_c10d.ProcessGroupGloo(env, rank, size, timeout=timeout))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradwire-lossless")
        prepare(NAME, lambda: kernels_of(EXCHANGE), rank)

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name  # torch keeps it with a backend per device, of which there is none

    @property
    def group_name(self) -> str:
        return self._name

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        opts = opts or _c10d.AllreduceOptions()
        if opts.reduceOp != dist.ReduceOp.SUM or not (len(tensors) == 1 and _fits(tensors[0], self.size())):
            return self._plain.allreduce(tensors, opts)

        def collective() -> Any:
            self._ring.sum(tensors[0].detach().view(-1))
            return tensors

        work = Carried(collective)
        self._thread.submit(work.carry)
        return work


def _to_gloo(verb: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._plain, verb)(*args, **kwargs)

    return call


VERBS = """
    _allgather_base _reduce_scatter_base allgather allgather_coalesced allreduce_coalesced alltoall
    alltoall_base barrier broadcast gather monitored_barrier recv recv_anysource reduce reduce_scatter scatter
    send
""".split()  # noqa: SIM905  a list of 17 strings would be 17 lines
for _verb in VERBS:
    setattr(LosslessGroup, _verb, _to_gloo(_verb))
# What torch 2.13 calls by new names, gloo's own object knows by the old ones.
for _verb, _old in (
    ("all_gather_single", "_allgather_base"),
    ("all_to_all_single", "alltoall_base"),
    ("reduce_scatter_single", "_reduce_scatter_base"),
):
    setattr(LosslessGroup, _verb, _to_gloo(_old))


def _fits(tensor: Tensor, world: int) -> bool:
    return (
        world > 1
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and tensor.is_contiguous()
        and tensor.dtype in DTYPES
        and tensor.nbytes >= SMALLEST_BYTES
    )


@dataclass
class _Ring:
    """Sums over raw connections. Also the `Comm` of its rings, which need no more than two verbs."""

    group: Any
    kept: ExchangeState = field(default_factory=ExchangeState)
    done: dict[str, int] = field(default_factory=dict)
    broken: BaseException | None = None

    @property
    def rank(self) -> int:
        return int(self.group.rank())

    @property
    def world(self) -> int:
        return int(self.group.size())

    def sum(self, data: Tensor) -> None:
        """Sum `data` over ranks, in place. Raises on every rank that lost something.

        After an error of the transport, or between messages, this rank's order is lost: all later sums raise.
        """
        if self.broken is not None:
            raise TransportError(f"an earlier sum of this group has failed: {self.broken}")
        try:
            ring = self._around(data)
        except BaseException as error:
            self.broken = error
            raise
        for failure in ring.failures:
            raise failure
        if ring.is_lost:
            raise PeerFailed("another rank could not encode or decode its part of this sum")

    def _around(self, data: Tensor) -> RingAllReduce:
        name = f"{data.numel()} {data.dtype}"
        number = self.done.get(name, 0)
        parts = (Part(name, (data.numel(),), 0, data.numel()),)
        ctx = ExchangeContext(number, 0, self.rank, self.world, parts=parts, kept=self.kept)
        frames = Frames(EXCHANGE, data.numel(), data.dtype, ctx, EXCHANGE.renews(ctx))
        ring = RingAllReduce(data, frames, self, EXCHANGE.schedule(data.numel(), ctx))
        ring.start()
        ring.finish()
        if frames.counts is not None:
            counts = [frames.counts]
            _issued(lambda: [self.group.allreduce(counts)]).wait()
            frames.keep()
            self.kept.commit()
        self.done[name] = number + 1
        return ring

    def shift(self, out: Tensor, tensor: Tensor, by: int = 1, tells: int = 0) -> Pending:
        target, source = (self.rank + by) % self.world, (self.rank - by) % self.world
        # The receive first: see `ProcessGroupComm`.
        return _issued(lambda: [self.group.recv([out], source, 0), self.group.send([tensor], target, 0)])


def _issued(issue: Callable[[], list[Any]]) -> _Works:
    try:
        return _Works(issue())
    except RuntimeError as error:
        raise TransportError(f"a message of an all-reduce could not be issued: {error}") from error


@dataclass(frozen=True)
class _Works:
    works: list[Any]

    def wait(self) -> None:
        for work in self.works:
            try:
                work.wait()
            except RuntimeError as error:
                raise TransportError(f"a message of an all-reduce was lost: {error}") from error

    def then(self, callback: Callable[[], None]) -> None:
        """Call back at once; the callback then blocks in `wait`."""
        callback()


_registered = False


def register() -> str:
    """Make the backend known to `torch.distributed`, once, and return its name."""
    global _registered
    if not _registered:
        _registered = True
        dist.Backend.register_backend(NAME, LosslessGroup, devices=["cpu"])
    return NAME
