"""The interface of a source, which brings gradients: DDP's buckets, shards, plain parameters."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.comm import groups
from gradwire.comm.apart import Lending
from gradwire.measure.connections import Tried
from gradwire.planning.tuning import USUAL, Tuning
from gradwire.sources.carried import Carrier, require_unclaimed
from gradwire.sources.checks import check_momentum
from gradwire.sources.same_parameters import Known
from gradwire.sources.unwrap import Optimizers
from gradwire.step.environment import SourceState
from gradwire.step.layout import Layout
from gradwire.step.reducer import Backward
from gradwire.step.step import SideBroadcast, Step
from gradwire.unit.context import Replicas, Replicated
from gradwire.unit.parameters import ParameterSpec


class Source(ABC):
    """Brings the gradients of one model to the reducer, and takes their means back.

    From `begin` on, a source calls `Backward.begin`, `submit` and `close` in every backward pass whose
    gradients are to be exchanged, on the thread of that pass. It promises:

    - Each `GradientBucket` is one dense flat tensor of one dtype, of gradients on `device`. Element i of an
      entry is element i of the parameter as `ParameterSpec.shaped` has it.
    - Every parameter of `specs` comes exactly once per step, in a single entry. One without a gradient in
      this step comes as zeros: the reducer takes gradients that are all zero for idle, and leaves their
      memory as it is.
    - Buckets are numbered 0, 1, 2, … without gaps. A number stands for the same parameters in the same order
      on all ranks, in this step; from step to step that may change. They may arrive in any order.
    - From `submit` until the step has ended, a bucket belongs to the reducer, which writes the mean over
      ranks into it, in place. After that the source alone decides what becomes of it: NaN throughout if the
      step failed, or if a gradient was not finite where something is remembered.

    A step asks six methods of it: `begin` has registered hooks; then `is_exchanging`, `side_broadcast`,
    `step_ended`, `release` and `complete`. Beside them it answers while attaching (`group`, `over`,
    `members`, `check`, `suits`, `applying`, `facts`, `replicas_of`) and between steps (`note_changes`,
    `no_sync`, `is_uneven`, `adding`, `may_differ`, `retire`). All but `begin` and `group` have an answer here
    that suits most sources.

    A source holds its model weakly, because the worker's thread refers to the source and has to end with the
    model. It may keep the parameters.
    """

    kind: ClassVar[str]
    """The kind of source, in words. Must be the same on all ranks."""

    tuning: ClassVar[Tuning] = USUAL
    """Tuning that suits the way in which its gradients arrive."""

    specs: tuple[ParameterSpec, ...]
    """Layout order: the reverse of registration."""
    parameters: Mapping[str, nn.Parameter]
    """Parameters by the names in `specs`; there may be others."""
    device: torch.device
    """The device of the gradients."""
    carries_buffers: bool = True
    """True if any step may have a `side_broadcast`."""
    lending: Lending = groups
    """Makes process groups beside `group`."""
    links: Tried | None = None
    """Known links between ranks; equal on all ranks."""
    source_state: SourceState | None = None
    """State of the source that checkpoints hold beside the reducer's; `None` if there is none."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)

    @property
    def model(self) -> nn.Module:
        """The attached model. Only for the thread that trains, which keeps it alive."""
        model = self._model()
        assert model is not None, "asked by the user of the model"
        return model

    @property
    def module(self) -> nn.Module:
        """The module of parameters and buffers, under the names in `specs`."""
        return self.model

    @cached_property
    def known(self) -> Known:
        """The parameters as they are when this is first asked for: at the end of attaching."""
        carried = [spec.name for spec in self.specs]
        return Known(self.parameters, carried)

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """The parameters of the module that are carried, by name."""
        return {spec.name: self.parameters[spec.name] for spec in self.specs}

    @property
    def carrier(self) -> Carrier:
        """Parameters that no other wire may carry over the same ranks. Only for the thread that trains."""
        return Carrier(self.kind, self.model, self.module, self.over, self.trained)

    def current(self) -> Mapping[str, Tensor]:
        """The parameters of the module by name, as they are now. Only for the thread that trains."""
        return dict(self.module.named_parameters())

    # -- while attaching

    @property
    @abstractmethod
    def group(self) -> dist.ProcessGroup:
        """The model's own process group, over whose ranks the mean is taken."""

    @property
    def over(self) -> Sequence[int]:
        """The ranks over which the mean is taken, by their global numbers."""
        return dist.get_process_group_ranks(self.group)

    def applying(self, optimizers: Optimizers) -> Optimizers:
        """Optimizers that use the means, if the user's are `optimizers`."""
        return optimizers

    def suits(self, layout: Layout, optimizers: Optimizers) -> None:
        """Raise `ValueError` for a layout that cannot run here, or not with `optimizers` that use means."""
        check_momentum(layout, optimizers)

    def facts(self) -> dict[str, str]:
        """Facts of its own, by name, that must be the same on all ranks."""
        return {"buffers": "not broadcast"}

    def check(self) -> None:
        """Raise `ValueError` if the gradients of the model cannot be carried; all ranks are told."""
        require_unclaimed(self.carrier)
        devices = sorted({str(each.device) for each in self.parameters.values() if each.requires_grad})
        if len(devices) > 1:
            raise ValueError(
                f"parameters are on {' and '.join(devices)}; gradwire carries gradients of one device per "
                "process: start a process for each"
            )
        if early := [
            s.name for s in self.specs if hasattr(self.parameters[s.name], "_in_backward_optimizers")
        ]:
            raise ValueError(
                f"parameter {early[0]!r} has an optimizer that steps inside backward(), before the mean over "
                f"ranks is there ({len(early)} such parameters): call optimizer.step() after backward()"
            )
        for name, parameter in self.parameters.items():
            if parameter.is_complex():
                raise ValueError(f"parameter {name!r} is complex; keep it as two real ones")
        for name, module in self.module.named_modules():
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
                raise ValueError(f"module {name!r} has sparse gradients; build it with sparse=False")

    @property
    def members(self) -> tuple[Sequence[int], Sequence[int]] | None:
        """Ranks that share this replica, and ranks with this rank's shard, by numbers in `group`; `None`
        without shards.

        The first are in the order of their shards. Means are over the second.
        """
        return None

    def replicas_of(self, optimizers: Callable[[], Optimizers]) -> Replicas:
        """Function from a parameter's name to the values that all ranks hold alike; `None` for a parameter
        without an optimizer.
        """
        return partial(_replicated, self.parameters, optimizers)

    @abstractmethod
    def begin(
        self,
        backward: Backward,
        uses: dict[str, float] | None,
        *,
        scaled: bool,
    ) -> None:
        """Register all hooks. `scaled` says whether gradients carry a loss scale.

        `uses`, if given, is filled in the first forward pass: multiply-adds per weight, by parameter name.
        `register_observers` registers the hooks that every source needs.
        """

    # -- in a step

    def side_broadcast(self) -> SideBroadcast | None:
        """Tensors that travel beside the step's gradients, such as buffers. On the worker's thread."""
        return None

    @property
    def is_exchanging(self) -> bool:
        """True if a backward pass exchanges gradients now."""
        return True

    def is_uneven(self) -> bool:
        """True if ranks may take different numbers of steps, as under `join()`; equal on all ranks."""
        return False

    def step_ended(self, step: Step) -> None:
        """Take note of a step with its outcome. Called on the worker's thread, while the backward pass still
        waits.
        """

    def release(self) -> None:
        """Release the training thread after a step, as by setting futures. Called on the worker's thread
        after `step_ended`; the next step may have begun.
        """

    def complete(self) -> None:
        """Write the results of a step to the model, on the thread of the backward pass, once the pass is
        over.

        May be called again without a step in between.
        """

    # -- between steps

    def note_changes(self) -> None:
        """Take note of changes to the model since the last step: a call is about to read it."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Context in which backward passes add to `p.grad` on this rank, and exchange nothing."""
        return nullcontext()

    def adding(self, spec: ParameterSpec, flat: Tensor) -> Callable[[], object]:
        """Prepare to add `flat` (numel,) to the gradient that the optimizer sees; returns the function that
        adds.

        Memory is allocated here, so that the returned function cannot fail. It overwrites `flat`.
        """
        parameter, unsent = self.parameters[spec.name], spec.shaped(flat)
        if (grad := parameter.grad) is None:
            return partial(setattr, parameter, "grad", unsent.to(parameter.dtype))
        return partial(grad.copy_, unsent.add_(grad).to(grad.dtype))

    def may_differ(self) -> None:
        """Note that the model was loaded or restored, so that its buffers may differ between ranks."""

    def retire(self) -> None:
        """Let gradients travel as without gradwire from the next step on, as far as the source can."""


def _replicated(
    parameters: Mapping[str, nn.Parameter], optimizers: Callable[[], Optimizers], name: str
) -> Replicated | None:
    """Look up the parameter `name`, its group and its state at the moment of the call, because users add and
    change groups while training. Returns `None` if no optimizer has it.
    """
    parameter = parameters[name]
    for optimizer in optimizers():
        for group in optimizer.param_groups:
            if any(parameter is each for each in group["params"]):
                state = optimizer.state.get(parameter, {})
                return Replicated(parameter.detach(), group, state, type(optimizer))
    return None
