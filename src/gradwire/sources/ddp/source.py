"""Source for DDP: takes its buckets, sets the futures for which it waits, and broadcasts its buffers.

DDP checks the signature of its communication hook, `DDPBuckets.on_bucket`: the parameter must be called
`bucket`, and annotations must not be postponed.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from gradwire.placement import Device, fetch
from gradwire.sources.carried import Carrier
from gradwire.sources.checks import in_words
from gradwire.sources.ddp.buffers import Buffers, joins
from gradwire.sources.ddp.finer import fit_buckets
from gradwire.sources.observe import Entrance, leave_out_of_copies, register_observers
from gradwire.sources.same_parameters import Known
from gradwire.sources.source import Source
from gradwire.step.gradient_bucket import GradientBucket
from gradwire.step.reducer import Backward
from gradwire.step.step import SideBroadcast, Step
from gradwire.unit.parameters import ParameterSpec, Slot, slots_of, specs_of
from gradwire.untraced import untraced

_Future: TypeAlias = torch.futures.Future[Tensor]
_Promise: TypeAlias = tuple[_Future, Tensor]


_PERMUTED = (
    "the memory format of {!r} has changed since DistributedDataParallel was built, whose buckets have "
    "another order: elements of its gradient would change places. Call .to(memory_format=…) before wrapping "
    "the model"
)


class _Homes(NamedTuple):
    """The places of gradients in a bucket of DDP's, whose memory begins at the address `start`."""

    start: int
    entries: tuple[Slot, ...]
    each: list[tuple[int, tuple[int, ...], Slot]]
    """The address and the strides of each gradient."""


class BucketMap:
    """Map from DDP's buckets to parameter names.

    It is computed anew for each bucket, because DDP rebuilds buckets. Under `join()` a finished rank gets
    buckets without parameters: these count as those it saw last.
    """

    def __init__(self, module: nn.Module, specs: Sequence[ParameterSpec], *, are_views: bool = False) -> None:
        """Map the buckets of `module`, whose exchanged parameters are `specs`. `are_views` is True if DDP
        makes gradients views of its buckets.
        """
        self._specs = {spec.name: spec for spec in specs}
        self._names = {id(p): name for name, p in module.named_parameters() if name in self._specs}
        self._are_views = are_views
        self._strides = {
            spec.name: spec.shaped(torch.empty(spec.numel, dtype=spec.dtype, device="meta")).stride()
            for spec in specs
        }
        self._seen: dict[int, tuple[Slot, ...]] = {}
        self._keys: dict[int, list[int]] = {}
        self._homes: dict[int, _Homes] = {}
        self._looks: list[tuple[list[str], Callable[[], Tensor]]] = []
        self._permuted = ""
        """The first parameter whose gradients were found permuted."""

    def gradient_bucket(self, bucket: GradBucket, device: Device) -> GradientBucket:
        """Describe `bucket`, which `device` has computed. Raises `ValueError` if the buffer does not hold its
        parameters densely.

        Under `backward(create_graph=True)` the buffer has a graph; it is detached, because the mean over
        ranks is no part of it.
        """
        buffer, index = bucket.buffer().detach(), bucket.index()
        parameters = bucket.parameters()
        key = list(map(id, parameters))
        is_new = bool(key) and key != self._keys.get(index)
        if is_new:
            self._seen[index] = self._entries(index, parameters)
        entries = self._seen[index]
        if buffer.is_sparse or buffer.numel() != entries[-1].stop:
            raise ValueError(
                f"bucket {index} of {buffer.numel()} elements is sparse or does not match its parameters; "
                "use sparse=False in embeddings"
            )
        # The host does not wait for a device in the pass in which it looks: the next one fails.
        if self._looks and index == 0:
            self._read_looks()
        if is_new:
            self._keys[index] = key
            self._look(buffer, entries, parameters, device)
            if device.is_host:
                self._read_looks()
        failure = ValueError(_PERMUTED.format(self._permuted)) if self._permuted else None
        if self._are_views and parameters and failure is None:
            self._bring_home(buffer, parameters, self._homes_of(buffer, index, entries))
        return GradientBucket(buffer, entries, index, failure=failure)

    def _homes_of(self, buffer: Tensor, index: int, entries: tuple[Slot, ...]) -> _Homes:
        """Memory in which the gradients of bucket `index`, with the flat `buffer` and these `entries`,
        belong; computed again if DDP has made other buckets.
        """
        known, start, itemsize = self._homes.get(index), buffer.data_ptr(), buffer.itemsize
        if known is None or known.start != start or known.entries is not entries:
            homes = [(start + each.start * itemsize, self._strides[each.spec.name], each) for each in entries]
            known = self._homes[index] = _Homes(start, entries, homes)
        return known

    @torch.no_grad()
    def _bring_home(self, buffer: Tensor, parameters: Sequence[Tensor], homes: _Homes) -> None:
        """Copy gradients of `parameters` into `buffer` if they have got other memory than in `homes`, where
        DDP made them views of it.

        DDP identifies its views by the tensor objects, whose memory users can replace: after `p.grad.data =
        …`, DDP assumes that the gradient is in the bucket, and sends an earlier step's contents.
        """
        for parameter, (address, stride, entry) in zip(parameters, homes.each, strict=True):
            grad = parameter.grad
            if grad is not None and grad.data_ptr() == address and grad.stride() == stride:
                continue
            place = entry.spec.shaped(buffer[entry.start : entry.stop])
            if grad is None:
                place.zero_()
            else:
                place.copy_(grad.clone())
                grad.data = place

    def _entries(self, index: int, parameters: Sequence[Tensor]) -> tuple[Slot, ...]:
        unknown = [tuple(p.shape) for p in parameters if id(p) not in self._names]
        if unknown:
            raise ValueError(
                f"bucket {index} holds parameters of shape {unknown} that were frozen when gradwire "
                "was attached; freeze before building DistributedDataParallel"
            )
        return slots_of([self._specs[self._names[id(p)]] for p in parameters])

    @torch.no_grad()
    def _look(
        self, buffer: Tensor, entries: Sequence[Slot], parameters: Sequence[Tensor], device: Device
    ) -> None:
        """Find out on the `device` whether gradients lie in `buffer` with other strides than their parameters
        have now; `_read_looks` reads that.

        DDP lays a bucket out by the strides at that time, and reads means by the present ones. `p.grad` is
        the tensor that DDP has copied. If it has other numbers in the same places, and the same sum of bits,
        its elements are permuted. A gradient of an earlier step, beside zeros in the bucket, has another sum.
        """
        names, permuted = [], []
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[buffer.itemsize]
        for entry, parameter in zip(entries, parameters, strict=True):
            if parameter.grad is None or len(entry.spec.shape) < 2:
                continue
            sent, own = buffer[entry.start : entry.stop].view(bits), parameter.grad.view(bits)
            differs = (entry.spec.shaped(sent) != own).any()
            permuted.append(differs & (sent.sum(dtype=torch.int64) == own.sum(dtype=torch.int64)))
            names.append(entry.spec.name)
        if names:
            self._looks.append((names, fetch(device, torch.stack(permuted))))

    def _read_looks(self) -> None:
        looks, self._looks = self._looks, []
        for names, fetched in looks:
            for name, is_permuted in zip(names, fetched().tolist(), strict=True):
                if is_permuted:
                    self._permuted = self._permuted or name


class DDPBuckets(Source):
    """Source of gradients in the buckets of a `DistributedDataParallel`, in DDP's order and numbering.

    DDP fills in zeros for a parameter without a gradient. It writes its means to `p.grad` when the futures
    are set. Under `join()`, a finished rank's hook runs outside a backward pass.
    """

    kind = "DistributedDataParallel"

    @property
    def is_exchanging(self) -> bool:
        """True unless DDP's own `no_sync` is active."""
        ddp = self._model()
        return ddp is not None and bool(ddp.require_backward_grad_sync)

    def is_uneven(self) -> bool:
        """True under `join()`, in which finished ranks take no steps; DDP stays in that mode for good."""
        ddp = self._model()
        return isinstance(ddp, DistributedDataParallel) and joins(ddp)

    def __init__(self, ddp: DistributedDataParallel) -> None:
        """Raises `ValueError` for a model that cannot be attached at all."""
        super().__init__(ddp)
        self._left_out = frozenset(ddp.parameters_to_ignore)
        self.specs = specs_of(ddp.module, self._left_out)
        if not self.specs:
            raise ValueError(
                "DDP ignores every trainable parameter of this model, or delays its all-reduce, so it has no "
                "gradient to hand over: leave some of them to it"
            )
        self.parameters = dict(ddp.module.named_parameters())
        self.device = next(p.device for p in self.parameters.values() if p.requires_grad)
        self._group: dist.ProcessGroup = ddp.process_group
        self._buckets = BucketMap(ddp.module, self.specs, are_views=ddp.gradient_as_bucket_view)
        self._buffers = Buffers(ddp, self._group.rank(), self._group.size())
        self.carries_buffers = self._buffers.may_travel()
        self._carried = [self._buffers] if self.carries_buffers else []
        self._futures: list[_Promise] = []
        self._due: list[_Promise] = []

    @property
    def _ddp(self) -> Any:
        return self.model

    @property
    def module(self) -> nn.Module:
        module: nn.Module = self._ddp.module
        return module

    @property
    def carrier(self) -> Carrier:
        """As of every source; DDP brings gradients after its own forward passes alone."""
        return super().carrier._replace(by_forward=True)

    @property
    def group(self) -> dist.ProcessGroup:
        """DDP's own."""
        return self._group

    def check(self) -> None:
        """Check everything that every source checks, and that DDP has buckets and no hook."""
        super().check()
        if getattr(self._ddp, "_comm_hooks", None) or getattr(self._ddp, "mixed_precision", None) is not None:
            raise ValueError(
                "this DDP module has a communication hook already (mixed_precision= is one); use a new one"
            )
        if getattr(self._ddp, "lazy_bucket_allocation", False):  # since torch 2.15
            raise ValueError(
                "DDP's lazy_bucket_allocation=True frees the buckets whose memory gradwire uses: leave it out"
            )
        if getattr(self._ddp, "_use_python_reducer", False):
            raise ValueError(
                "this DDP module was built under torch._dynamo.config.optimize_ddp = 'python_reducer', so it "
                "has no buckets to hand over. Set that to True, which is torch's default, and wrap the model "
                "again"
            )

    @cached_property
    def known(self) -> Known:
        """The known parameters, as for every source; strides must stay, too, because DDP has laid out
        gradients by them.
        """
        return Known(self.parameters, [spec.name for spec in self.specs], self._left_out, in_order=True)

    def facts(self) -> dict[str, str]:
        """Names, shapes and types of buffers that DDP broadcasts, and of frozen parameters that it has sent
        by their number when it was made.
        """
        left_out = self._left_out
        frozen = (
            (name, each)
            for name, each in self.parameters.items()
            if not each.requires_grad and name not in left_out
        )
        return {"buffers": self._buffers.describe(), "frozen parameters": in_words(frozen)}

    def begin(
        self,
        backward: Backward,
        uses: dict[str, float] | None,
        *,
        scaled: bool,
    ) -> None:
        """Register the communication hook and the observers; make buckets finer where that hides more."""
        ddp, reducer = self._ddp, backward.reducer
        total_bytes = sum(spec.numel * spec.dtype.itemsize for spec in self.specs)
        trained = (self.parameters[spec.name] for spec in self.specs)
        self._entrance = Entrance(ddp, backward.entered, trained)
        hooks = register_observers(self, backward, self._entrance, uses, scaled=scaled)
        hooks += [
            ddp.register_forward_pre_hook(_before_forward(self._carried)),
        ]
        fit = fit_buckets(reducer, total_bytes)
        hooks.append(ddp.register_forward_pre_hook(untraced(fit)))
        leave_out_of_copies(ddp, hooks, _comm_hooks=[])
        fit(ddp, ())
        ddp.register_comm_hook(backward, self.on_bucket)

    def on_bucket(self, backward: Backward, bucket: GradBucket) -> _Future:
        """Hand a bucket to `backward`. The future is set once the step has ended (`release`)."""
        if bucket.index() == 0:
            self._entrance.opened()
            backward.begin()
            for buffers in self._carried:
                buffers.pack(backward.placement.transfer, backward.reducer.is_serial)
        device = backward.placement.device
        gradient_bucket = self._buckets.gradient_bucket(bucket, device)
        future = device.new_future()
        self._futures.append((future, bucket.buffer()))
        is_last = bucket.is_last()  # it gives up the interpreter's lock, for which the worker would compete
        for buffers in self._carried if is_last else ():
            buffers.look(device)
        backward.submit(gradient_bucket)
        if is_last:
            backward.close()
        return future

    def side_broadcast(self) -> SideBroadcast | None:
        """The buffers, if this step broadcasts them."""
        return self._buffers.packed

    def step_ended(self, step: Step) -> None:
        """Note whether the buffers have come, and which futures are due."""
        self._due, self._futures = self._futures, []
        for buffers in self._carried:
            buffers.arrived(bool(step.flight.carried) and step.error is None, step.flight.stale)

    def release(self) -> None:
        """Set every future, also after an error: a finished rank under `join()` waits for nothing else."""
        due, self._due = self._due, []
        for future, buffer in due:
            future.set_result(buffer)

    def complete(self) -> None:
        """Write the buffers that have arrived into the model."""
        for buffers in self._carried:
            buffers.land()

    def no_sync(self) -> AbstractContextManager[None]:
        """Context of DDP's own `no_sync()`."""
        context: AbstractContextManager[None] = self._ddp.no_sync()
        return context

    def may_differ(self) -> None:
        """DDP broadcasts the buffers before the next forward pass."""
        self._buffers.current = False

    def retire(self) -> None:
        """Leave the buffers to DDP. It cannot unregister a hook, so buckets go on coming."""
        self._buffers.leave_to_ddp()


def _before_forward(carried: Sequence[Buffers]) -> Callable[..., None]:
    """Make a forward pre-hook for the DDP module. It tells `carried` buffers that a forward pass begins,
    because DDP need not broadcast those that arrived with the last backward pass.

    The hook raises `ValueError` inside `join(divide_by_initial_world_size=False)`, which has no effect here.
    """

    @untraced
    def hook(ddp: DistributedDataParallel, _inputs: Any) -> None:
        if torch.is_grad_enabled() and not getattr(ddp, "_divide_by_initial_world_size", True):
            raise ValueError("join(divide_by_initial_world_size=False) has no effect under a hook; drop it")
        for buffers in carried:
            buffers.before_forward(ddp)

    return hook
