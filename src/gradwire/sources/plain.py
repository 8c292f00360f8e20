"""Plain modules: gradients come from hooks on the parameters, into flat buckets of our own.

DDP does more than send gradients, and so does this source: all ranks begin with rank 0's parameters and
buffers, and rank 0's buffers travel with every step.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradwire.comm import ProcessGroupComm
from gradwire.errors import GradwireError
from gradwire.sources.buckets import OwnBucket, assigned, cap_for
from gradwire.sources.buffers import BufferBroadcast
from gradwire.sources.checks import in_words
from gradwire.sources.observe import (
    Entrance,
    leave_out_of_copies,
    refuse_changed,
    register_observers,
)
from gradwire.sources.source import Source
from gradwire.sources.unwrap import Optimizers
from gradwire.step.reducer import Backward
from gradwire.step.step import SideBroadcast, Step
from gradwire.unit.context import Replicas, Replicated
from gradwire.unit.parameters import specs_of
from gradwire.untraced import untraced

_LOG = logging.getLogger("gradwire")


class PlainParameters(Source):
    """The parameters of a module without a wrapper, in buckets in reverse order of registration.

    Every exchanging backward pass replaces `p.grad` by the mean over ranks of what was there at its end:
    gradients that were accumulated before are part of it, and none at all counts as zeros. So all ranks hand
    their optimizer a gradient for every parameter, whether it was used or not.
    """

    kind = "plain parameters"

    def __init__(self, model: nn.Module, replicas: dist.ProcessGroup) -> None:
        super().__init__(model)
        self.specs = specs_of(model)
        self.parameters = dict(model.named_parameters())
        self._replicas = replicas
        self.rows: dict[str, int] = {}
        """Number of rows of a shard on this rank, by name, if it is below that of the shard's shape."""
        used = [parameter for parameter in self.parameters.values() if parameter.requires_grad]
        if not used:
            raise ValueError("no parameter of the model needs a gradient: leave at least one unfrozen")
        self.device = used[0].device
        self._wanted = 0
        """About how many buckets to make."""
        self._buckets: list[OwnBucket] = []
        self._homes: dict[str, OwnBucket] = {}
        self._hooks: dict[str, RemovableHandle] = {}
        """Hooks on parameters, by name."""
        self._is_open = self._exchanges_now = False
        self._exchanges = True
        self._at_end: Callable[[], object] = _nothing
        self._known: BufferBroadcast | None = None
        self._packed: BufferBroadcast | None = None
        self._landing: BufferBroadcast | None = None
        self._warned: set[str] = set()
        self._strides = {name: each.stride() for name, each in self.parameters.items() if each.dim() > 1}
        """The order of memory in which gradients are, by parameter name."""
        self._beside: list[tuple[Tensor, Tensor]] = []
        """Gradients that are no views of buckets, with the views of buckets in which their means come."""

    @property
    def group(self) -> dist.ProcessGroup:
        """The user's."""
        return self._replicas

    def check(self) -> None:
        """Check that nothing else exchanges these gradients, and everything that every source checks."""
        for name, each in self.model.named_modules():
            if isinstance(each, DistributedDataParallel):
                raise ValueError(
                    f"{name!r} inside this module is wrapped in DistributedDataParallel, which would "
                    "exchange its gradients a second time: take that wrapper off, or attach it instead"
                )
        super().check()

    def facts(self) -> dict[str, str]:
        """Names, shapes and types of buffers and frozen parameters, which are sent by their number."""
        frozen = ((name, each) for name, each in self.parameters.items() if not each.requires_grad)
        return {"buffers": in_words(self.model.named_buffers()), "frozen parameters": in_words(frozen)}

    def begin(
        self,
        backward: Backward,
        uses: dict[str, float] | None,
        *,
        scaled: bool,
    ) -> None:
        """Give all ranks rank 0's parameters and buffers; register the hooks on parameters and model."""
        model = self.model
        if self.group.size() == 1:
            _LOG.info("one rank: gradients stay as they are")
        self._spread_first()
        hooks = register_observers(self, backward, Entrance(model, self._entered), uses, scaled=scaled)
        hooks.append(model.register_forward_pre_hook(untraced(_refuse_under_ddp)))
        leave_out_of_copies(model, hooks)
        self._backward = backward
        self._hooks = {spec.name: self._watch(spec.name, self.parameters[spec.name]) for spec in self.specs}
        # They and the parameters would hold each other for good: the garbage collector cannot see such hooks.
        weakref.finalize(model, _let_go, list(self._hooks.values())).atexit = False

    def _watch(self, name: str, parameter: nn.Parameter) -> RemovableHandle:
        register: Callable[[Any], RemovableHandle] = parameter.register_post_accumulate_grad_hook
        return register(partial(self._ready, name))

    def _come_last(self, running: str) -> None:
        """Move our hooks on parameters behind those registered since, as DDP's are.

        A later hook may replace our gradient by one that is this rank's alone. Hooks of the parameter
        `running` stay, because they are being called.
        """
        for name, handle in self._hooks.items():
            hooks = handle.hooks_dict_ref()
            if name != running and hooks and not _is_last(handle):
                hooks[handle.id] = hooks.pop(handle.id)  # torch goes by the order of a plain dict

    def _spread_first(self) -> None:
        """Overwrite parameters and buffers by those of the first rank. Raises `TransportError`."""
        parameters = [self.local(parameter.detach()) for parameter in self.parameters.values()]
        spread(parameters, self._replicas)
        spread(list(self.model.buffers()), self.group)

    def replicas_of(self, optimizers: Callable[[], Optimizers]) -> Replicas:
        """Replicated values, in the order of memory that gradients have, even if parameters have another one
        by now.
        """
        return partial(self._ordered, super().replicas_of(optimizers))

    def _ordered(self, present: Replicas, name: str) -> Replicated | None:
        seen, strides = present(name), self._strides.get(name)
        if seen is None or strides is None or strides == seen.parameter.stride():
            return seen

        def ordered(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor) or tensor.stride() != seen.parameter.stride():
                return tensor
            room = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
            return room.copy_(tensor)

        state = {key: ordered(each) for key, each in seen.state.items()}
        return replace(seen, parameter=ordered(seen.parameter), state=state)

    @property
    def is_exchanging(self) -> bool:
        """True unless `no_sync` is active."""
        return self._exchanges

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Context in which backward passes add to `p.grad` on this rank, and exchange nothing."""
        before, self._exchanges = self._exchanges, False
        try:
            yield
        finally:
            self._exchanges = before

    # -- what a parameter's gradient is, for sources that keep it elsewhere

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a parameter or gradient that is on this rank."""
        return tensor

    def give(self, name: str, view: Tensor, *, is_there: bool) -> None:
        """Make `view`, the place of the parameter `name` in its bucket, the memory of its gradient. If it
        `is_there`, it already is that memory.

        A parameter whose strides differ gets a gradient of its own, with a copy.
        """
        parameter, strides = self.parameters[name], self._strides.get(name)
        if strides is not None and strides != parameter.stride():
            # Fused optimizers take a gradient's memory to be in the order of the parameter's.
            parameter.grad = torch.empty_like(parameter).copy_(view)
            self._beside.append((parameter.grad, view))
        elif not is_there:
            parameter.grad = view.detach()

    # -- in a backward pass

    def _entered(self) -> None:
        """Note that the backward pass enters the model.

        Its exit would be too late: inside a reentrant checkpoint that belongs to an inner backward pass,
        which ends before all gradients are there.
        """
        if self._at_end() is None:
            self._begin()
        self._backward.entered()

    def _begin(self, running: str = "") -> None:
        """Begin a backward pass: register a callback at its end. May be called inside hooks of the parameter
        `running`.

        Only autograd keeps the callback, and drops it if the pass is broken off by an exception, which the
        user may catch. So the next pass is recognised as another one.
        """
        if self._at_end is not _nothing and self._exchanges_now and not self._is_open:
            self._backward.broke_off()
        self._come_last(running)
        finish = partial(self._finish)
        self._is_open, self._at_end, self._exchanges_now = False, weakref.ref(finish), self.is_exchanging
        _at_the_end(finish)

    def _ready(self, name: str, parameter: Tensor) -> None:
        """Hook on a parameter: put its gradient, which is in `p.grad`, into the bucket.

        Raises `ValueError` for a second gradient in one backward pass.
        """
        if self._at_end() is None:  # no output has told that it enters, as of `model.forward(…)`
            refuse_changed(self._backward, self)
            self._begin(running=name)
            self._backward.entered(written={name: self._is_new(name, parameter)})
        if not self.is_exchanging:
            return
        if not self._is_open:
            self._open()
        bucket = self._homes[name]
        if not bucket.missing:
            raise ValueError(
                f"parameter {name!r} got a second gradient in one backward pass, after the first was sent: "
                "is it used in several checkpoints? Use checkpoint(…, use_reentrant=False)"
            )
        if not _is_last(self._hooks[name]):
            return  # a hook that is to run after this one may put another gradient there: see `_finish`
        self._fill(bucket, name)
        if not bucket.missing:
            self._backward.submit(bucket.gradient_bucket)

    def _is_new(self, name: str, parameter: Tensor) -> bool:
        """True if a gradient was `None` before this pass.

        A gradient that stood has been added to in its place in the bucket. If that cannot be told, it is not
        new: under `create_graph=True`, and if a gradient is no view of its bucket.
        """
        home, gradient, strides = self._homes.get(name), parameter.grad, self._strides.get(name)
        if torch.is_grad_enabled() or (strides is not None and strides != parameter.stride()):
            return False
        return home is None or gradient is None or not home.holds(name, self.local(gradient))

    def _fill(self, bucket: OwnBucket, name: str) -> None:
        gradient = self.parameters[name].grad
        is_there = bucket.fill(name, None if gradient is None else self.local(gradient))
        if bucket.failure is None:
            self.give(name, bucket.views[name], is_there=is_there)

    def _open(self) -> None:
        self._backward.begin()
        self._is_open = True
        self._build()
        for bucket in self._buckets:
            bucket.begin()
        self._pack()

    def _build(self) -> None:
        """Make the buckets that this step's recipe needs; equal on all ranks."""
        reducer = self._backward.reducer
        whole = reducer.measuring or reducer.layout.is_plain
        wanted = 1 if whole else reducer.placement.granularity.buckets
        if wanted == self._wanted:
            return
        self._wanted = wanted
        total_bytes = sum(spec.numel * spec.dtype.itemsize for spec in self.specs)
        groups = assigned(self.specs, cap_for(total_bytes, wanted))
        self._buckets = [
            OwnBucket(index, group, self.device, self.rows) for index, group in enumerate(groups)
        ]
        self._homes = {entry.spec.name: bucket for bucket in self._buckets for entry in bucket.entries}

    def _finish(self) -> None:
        """End the backward pass: fill in missing gradients, and submit the remaining buckets."""
        self._at_end = _nothing
        if not self._is_open:  # inside no_sync, or gradients of something else were asked for
            return
        self._is_open = False
        left = [bucket for bucket in self._buckets if bucket.missing]
        unused = [name for bucket in left for name in sorted(bucket.missing)]
        if without := [name for name in unused if self.parameters[name].grad is None]:
            self._say(
                f"no gradient came for {', '.join(without[:3])} ({len(without)} in all): zeros are sent for "
                "them, and the optimizer gets the mean, so that weight decay and momentum act on them too"
            )
        for bucket in left:
            for name in sorted(bucket.missing):
                self._fill(bucket, name)
            self._backward.submit(bucket.gradient_bucket)
        if self._packed is not None:
            self._packed.look(list(self.model.buffers()), self._backward.placement.device)
        self._backward.close()

    def _say(self, what: str) -> None:
        """Log `what` as a warning on rank 0, once for each kind: its first word."""
        kind = what.split()[0]
        if kind not in self._warned and self.group.rank() == 0:
            self._warned.add(kind)
            _LOG.warning(what)

    # -- buffers

    def _pack(self) -> None:
        """Copy rank 0's buffers for the broadcast, unless dense steps measure the collectives of gradients
        alone.
        """
        self._packed, backward = None, self._backward
        buffers = list(self.model.buffers())
        if not buffers or self.group.size() == 1 or backward.reducer.is_serial:
            return
        if self._known is None or not self._known.holds(buffers):
            self._known = BufferBroadcast(buffers, self.group.rank())
        self._known.pack(backward.placement.transfer)
        self._packed = self._known

    def side_broadcast(self) -> SideBroadcast | None:
        """Broadcast of the buffers in this pass; `None` if there is none."""
        return self._packed

    def step_ended(self, step: Step) -> None:
        """Note whether the buffers have arrived, and warn if they changed during the backward pass."""
        self._landing = self._packed if bool(step.flight.carried) and step.error is None else None
        if step.flight.stale:
            self._say(
                "buffers changed during the backward pass, as where activations are computed again: they are "
                "not sent in such steps, so ranks keep their own"
            )

    def complete(self) -> None:
        """Write the buffers that have come, and the means of gradients that are no views of buckets."""
        beside, self._beside = self._beside, []
        for gradient, view in beside:
            gradient.copy_(view)
        landing, self._landing = self._landing, None
        if landing is not None:
            landing.land()


@torch.no_grad()
def spread(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite `tensors` by those of the group's first rank. Raises `TransportError`."""
    comm = ProcessGroupComm(group)
    for tensor in tensors:
        flat = tensor.contiguous()
        comm.broadcast(flat.view(-1).view(torch.uint8), 0).wait()
        if flat.data_ptr() != tensor.data_ptr():
            tensor.copy_(flat)


def _is_last(handle: RemovableHandle) -> bool:
    """True if no hook of its kind was registered later on the parameter."""
    hooks = handle.hooks_dict_ref()
    return not hooks or next(reversed(hooks)) == handle.id


def _nothing() -> None:
    """Stand-in for the callback while no backward pass runs."""


def _at_the_end(job: Callable[[], None]) -> None:
    """Call `job` at the end of this backward pass, after the callbacks that a wrapper queues meanwhile."""
    queue: Callable[[Callable[[], None]], None] = Variable._execution_engine.queue_callback
    queue(lambda: queue(job))


def _refuse_under_ddp(model: nn.Module, _inputs: Any) -> None:
    """Pre-hook of the model: raise `ValueError` inside a running DDP module, which would exchange the same
    gradients.
    """
    find = getattr(DistributedDataParallel, "_get_active_ddp_module", lambda: None)
    env = find()
    if env is not None and any(each is model for each in env.modules()):
        raise ValueError(
            "this module is attached with replicas=, and runs inside DistributedDataParallel, which would "
            "exchange its gradients a second time: attach the DDP module instead, or do not wrap it"
        )


def group_in(replicas: object) -> dist.ProcessGroup:
    """Process group that the argument `replicas` of `attach` names: itself, or that of a mesh dimension."""
    get_group: Any = getattr(replicas, "get_group", None)
    if get_group is not None:
        if (ndim := getattr(replicas, "ndim", 1)) != 1:
            raise ValueError(
                f"replicas= is a mesh of {ndim} dimensions: pass one of them, like mesh['nodes']"
            )
        replicas = get_group()
    if not isinstance(replicas, dist.ProcessGroup):
        raise ValueError(f"replicas= is a process group with this rank in it, or a mesh; got {replicas!r}")
    return replicas


def _let_go(handles: Iterable[RemovableHandle]) -> None:
    """Replace the hooks of a module that has been deleted by `_refuse_alone`, so that training its remaining
    parameters raises.
    """
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        if hooks and handle.id in hooks:
            hooks[handle.id] = _refuse_alone


def _refuse_alone(_parameter: Tensor) -> None:
    """Hook on a parameter whose module is gone. Raises `GradwireError`: replicas would part in silence."""
    raise GradwireError(
        "the module that was attached is gone, so nothing exchanges the gradients of its parameters: keep "
        "the module, or the wire that attach() returns; a copy of the parameters trains without gradwire"
    )
