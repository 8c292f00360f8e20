"""A process group over gloo with the speed of a link, for machines that allow no network namespaces.

A collective runs on the loopback at once; its result is delayed to the time at which the link would have
carried its bytes. All groups of a process share one wire, on which transfers queue. The traffic counted is
that of the busiest rank in gloo's algorithm. Packet headers and the incast of a real network are not
modelled.
"""

import atexit
import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradwire_lab.emulate.link import WIRE_VARIABLE, WireFile
from gradwire_lab.emulate.python_work import Carried

BOTH = ("out", "in")


class Cable:
    """One rank's cable: full duplex, and in each direction transfers go one after the other."""

    def __init__(self, file: WireFile) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._free_at_s = dict.fromkeys(BOTH, 0.0)
        self._carriers: set[threading.Thread] = set()
        # A thread that comes back from native code while the interpreter shuts down aborts the process.
        atexit.register(self._settle)

    def _settle(self, patience_s: float = 2.0) -> None:
        deadline_s = now_s() + patience_s
        for carrier in list(self._carriers):
            carrier.join(max(deadline_s - now_s(), 0.0))

    def reserve(self, hops: int, wire_bytes: float, directions: Sequence[str], now_s: float) -> float:
        """Reserve the cable for a transfer of `wire_bytes` in `directions` that is ready at `now_s`. Returns
        the time at which it has gone through, in seconds of the same clock; later transfers queue behind
        it.

        Latency (`hops` times the delay) does not occupy the wire: the next transfer starts meanwhile.
        """
        rate_bit_per_s, delay_s = self._file.read()
        with self._lock:
            start_s = max(now_s, *(self._free_at_s[direction] for direction in directions))
            end_s = start_s + wire_bytes * 8 / rate_bit_per_s
            for direction in directions:
                self._free_at_s[direction] = end_s
        return end_s + hops * delay_s

    def deliver(
        self, work: Any, result: Any, hops: int, wire_bytes: float, directions: Sequence[str] = BOTH
    ) -> Carried:
        """Make a work that completes, with `result`, when the cable has carried what `work` has moved over
        the loopback. The other arguments are those of `reserve`.

        The wire is taken when the loopback is done, not before: only then have all ranks joined. A thread per
        transfer, since a receive may wait for ever while others must complete.
        """

        def collective() -> Any:
            work.wait()
            time.sleep(max(self.reserve(hops, wire_bytes, directions, now_s()) - now_s(), 0.0))
            return result

        delivered = Carried(collective)

        def carry() -> None:
            delivered.carry()
            self._carriers.discard(threading.current_thread())

        carrier = threading.Thread(target=carry, name="gradwire-wire", daemon=True)
        self._carriers.add(carrier)
        carrier.start()
        return delivered


def now_s() -> float:
    """The clock of the wire."""
    return time.monotonic()


NAME = "gradwire_delayed"
# torch's stubs describe how groups are called, not how they are written: the overloads of every verb end up
# in one method, and the native class has no stub for the verbs at all.
_ProcessGroup: Any = dist.ProcessGroup
_c10d: Any = dist.distributed_c10d
_wire: Cable | None = None


def _bytes(tensors: Sequence[Any]) -> int:
    """Payload of tensors, or of lists of tensors."""
    return sum(
        tensor.numel() * tensor.element_size() if isinstance(tensor, Tensor) else _bytes(tensor)
        for tensor in tensors
    )


@dataclass(frozen=True)
class _Together:
    """Works that end when the last of them has."""

    works: Sequence[Any]

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class DelayedGroup(_ProcessGroup):  # type: ignore[misc]
    """Process group that delays the messages of gloo: it has every verb that DDP and torch's comm hooks use.
    `hops` and bytes are those of gloo's algorithm.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, wire: Cable) -> None:
        super().__init__(rank, size)
        self._inner = _c10d.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._wire = wire
        self._world = size
        self._ring = size - 1
        self._depth = math.ceil(math.log2(size)) if size > 1 else 0

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name  # torch keeps it with a backend per device, of which there is none

    @property
    def group_name(self) -> str:
        return self._name

    def _after(self, work: Any, result: Any, hops: int, wire_bytes: float) -> Any:
        return self._wire.deliver(work, result, hops, wire_bytes)

    def _around(self, wire_bytes: float) -> float:
        """Bytes that each rank of a ring sends when every byte visits all ranks but one, split evenly."""
        return wire_bytes * self._ring / self._world

    def _to_others(self, tensor: Any, splits: Sequence[int]) -> float:
        """Bytes of an all-to-all's tensor that are not for this rank itself; no splits mean even ones."""
        if not splits:
            return self._around(_bytes([tensor]))
        foreign = sum(splits) - int(splits[self.rank()])
        return _bytes([tensor]) * foreign / max(sum(splits), 1)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        work = self._inner.allreduce(tensors, opts or _c10d.AllreduceOptions())
        return self._after(work, tensors, 2 * self._ring, 2 * self._around(_bytes(tensors)))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        work = self._inner.allreduce_coalesced(tensors, opts or _c10d.AllreduceCoalescedOptions())
        return self._after(work, tensors, 2 * self._ring, 2 * self._around(_bytes(tensors)))

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        work = self._inner.broadcast(tensors, opts or _c10d.BroadcastOptions())
        return self._after(work, tensors, self._depth, self._depth * _bytes(tensors))

    def reduce(self, tensors: Any, opts: Any = None) -> Any:
        work = self._inner.reduce(tensors, opts or _c10d.ReduceOptions())
        return self._after(work, tensors, 2 * self._ring, 2 * self._around(_bytes(tensors)))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        work = self._inner.allgather(outputs, inputs, opts or _c10d.AllgatherOptions())
        return self._after(work, outputs, self._ring, self._ring * _bytes(inputs))

    def _allgather_base(self, output: Any, source: Any, opts: Any = None) -> Any:
        work = self._inner._allgather_base(output, source, opts or _c10d.AllgatherOptions())
        return self._after(work, [output], self._ring, self._ring * _bytes([source]))

    all_gather_single = _allgather_base

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        work = self._inner.allgather_coalesced(outputs, inputs, opts or _c10d.AllgatherOptions())
        return self._after(work, outputs, self._ring, self._ring * _bytes(inputs))

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        # gloo's own object has this verb for one tensor only.
        options = opts or _c10d.AllgatherOptions()
        pairs = zip(outputs, inputs, strict=True)
        works = [self._inner._allgather_base(output, source, options) for output, source in pairs]
        return self._after(_Together(works), outputs, self._ring, self._ring * _bytes(inputs))

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        work = self._inner.gather(outputs, inputs, opts or _c10d.GatherOptions())
        return self._after(work, outputs, 1, self._ring * _bytes(inputs))

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        work = self._inner.scatter(outputs, inputs, opts or _c10d.ScatterOptions())
        return self._after(work, outputs, 1, self._ring * _bytes(outputs))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        work = self._inner.reduce_scatter(outputs, inputs, opts or _c10d.ReduceScatterOptions())
        return self._after(work, outputs, self._depth, self._around(_bytes(inputs)))

    def _reduce_scatter_base(self, output: Any, source: Any, opts: Any = None) -> Any:
        work = self._inner._reduce_scatter_base(output, source, opts or _c10d.ReduceScatterOptions())
        return self._after(work, [output], self._depth, self._around(_bytes([source])))

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(
        self, output: Any, source: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> Any:
        options = opts or _c10d.AllToAllOptions()
        work = self._inner.alltoall_base(output, source, output_splits, input_splits, options)
        sent = self._to_others(source, input_splits)
        received = self._to_others(output, output_splits)
        return self._after(work, [output], 1, max(sent, received))

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        work = self._inner.alltoall(outputs, inputs, opts or _c10d.AllToAllOptions())
        return self._after(work, outputs, 1, self._around(max(_bytes(outputs), _bytes(inputs))))

    def barrier(self, opts: Any = None) -> Any:
        work = self._inner.barrier(opts or _c10d.BarrierOptions())
        return self._after(work, [], 2 * self._depth, 0)

    def send(self, tensors: Any, destination: int, tag: int = 0) -> Any:
        work = self._inner.send(tensors, destination, tag)
        return self._wire.deliver(work, tensors, 0, _bytes(tensors), ("out",))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        work = self._inner.recv(tensors, source, tag)
        return self._wire.deliver(work, tensors, 1, _bytes(tensors), ("in",))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        work = self._inner.recv_anysource(tensors, tag)
        return self._wire.deliver(work, tensors, 1, _bytes(tensors), ("in",))


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> DelayedGroup:
    assert _wire is not None
    return DelayedGroup(store, rank, size, timeout, _wire)


def register() -> str:
    """Register the backend under its name, once, and return the name."""
    global _wire
    if _wire is None:
        _wire = Cable(WireFile(os.environ[WIRE_VARIABLE]))
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])
    return NAME
