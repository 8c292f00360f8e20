"""What gradwire watches beside the gradients: when backward starts, the loss scale, the optimizer."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from gradwire.measure.uses import FirstForward
from gradwire.moment import Replicas, Replicated
from gradwire.sources.ddp.buffers import joins
from gradwire.sources.ddp.finer import Caps, caps_of, refine_buckets, restore_buckets
from gradwire.sources.ddp.session import Session


def observe(
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer | None,
    session: Session,
    first: FirstForward | None,
    *,
    scaled: bool,
) -> list[RemovableHandle]:
    """Register the observers on the model and the optimizer; returns the hooks on the model's forward pass.

    `first` counts how often weights are used; `scaled` says whether gradients carry a loss scale.
    """
    hooks = [
        ddp.register_forward_pre_hook(_refuse_thawed(ddp)),
        ddp.register_forward_pre_hook(_spare_buffers(session)),
        ddp.register_forward_pre_hook(_watch_steps_apart(session)),
        ddp.register_forward_pre_hook(_fit_buckets(session)),
    ]
    if first is not None:
        hooks += _count_uses(ddp, first)
    hooks.append(ddp.register_forward_hook(_forward_hook(session, scaled=scaled)))
    if optimizer is not None:
        handle = optimizer.register_step_post_hook(_AccumulationCheck(session))
        # An optimizer that outlives the model must not keep the arena alive.
        weakref.finalize(ddp, handle.remove).atexit = False
    return hooks


def replicas_of(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer | None) -> Replicas:
    """What all ranks hold alike of a parameter, by name: nothing is known without an optimizer."""
    if optimizer is None:
        return lambda _name: None
    return partial(_replicated, dict(ddp.module.named_parameters()), optimizer)


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """`hook`, of which a compiled model sees nothing: bookkeeping does not belong into its graph.

    This asks torch's compiler, which DDP's constructor has imported.
    """
    hidden: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return hidden


def _replicated(
    parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, name: str
) -> Replicated | None:
    """Looked up when asked for: users add and change parameter groups while training."""
    parameter = parameters[name]
    for group in optimizer.param_groups:
        if any(parameter is each for each in group["params"]):
            return Replicated(parameter.detach(), group, optimizer.state.get(parameter, {}), type(optimizer))
    return None


def _forward_hook(session: Session, scaled: bool) -> Callable[..., None]:
    @_untraced
    def hook(module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if not getattr(module, "_divide_by_initial_world_size", True):
            raise ValueError("join(divide_by_initial_world_size=False) has no effect under a hook; drop it")
        layout = session.engine.layout
        remembers = session.engine.measuring or not layout.is_plain
        if remembers and not scaled and _float16_autocast():
            raise ValueError(
                "float16 autocast without scaler=: the residual would carry the loss scale. Pass "
                "gradwire.attach(…, scaler=GradScaler), or autocast to bfloat16."
            )
        # The loss is behind when the gradient of the model's output arrives; where no output leads to it, the
        # end of the forward pass stands for that.
        session.engine.watch.begin()
        for tensor in _tensors(outputs):
            if tensor.requires_grad:
                tensor.register_hook(session.engine.watch.begin)  # type: ignore[no-untyped-call]
                return

    return hook


def _refuse_thawed(ddp: DistributedDataParallel) -> Callable[..., None]:
    """A parameter that thaws later is in nobody's buckets: its gradient would stay local, unnoticed."""
    frozen = [p for p in ddp.module.parameters() if not p.requires_grad]

    @_untraced
    def hook(_module: nn.Module, _inputs: Any) -> None:
        thawed = [tuple(p.shape) for p in frozen if p.requires_grad]
        if thawed:
            raise ValueError(
                f"parameters of shape {thawed} were frozen when gradwire was attached; freeze and thaw "
                "before building DistributedDataParallel"
            )

    return hook


def _fit_buckets(session: Session) -> Callable[..., None]:
    """Once an adaptive recipe has decided on something to hide, buckets are refined before the next forward
    pass, on all ranks the same. Where dense travels, before or after, DDP has its own. Not under `join()`: a
    finished rank runs no forward pass, and would keep buckets that differ from its peers'."""
    is_adaptive = session.engine.measuring
    own: Caps | None = None

    @_untraced
    def hook(module: DistributedDataParallel, _inputs: Any) -> None:
        nonlocal own
        engine = session.engine
        fine = not (engine.measuring or engine.layout.is_plain)
        if not is_adaptive or fine == (own is not None) or joins(module):
            return
        if own is None:
            own = caps_of(module)
            refine_buckets(module, sum(spec.numel * spec.dtype.itemsize for spec in engine.specs))
        else:
            restore_buckets(module, own)
            own = None

    return hook


def _watch_steps_apart(session: Session) -> Callable[..., None]:
    """Ready times are wanted of steps taken apart; a hook on every parameter would cost in all others."""

    @_untraced
    def hook(module: DistributedDataParallel, _inputs: Any) -> None:
        watch = session.engine.watch
        watch.watch(module.module.named_parameters()) if session.engine.apart else watch.release()

    return hook


def _spare_buffers(session: Session) -> Callable[..., None]:
    """DDP need not broadcast what the last backward pass has brought."""

    @_untraced
    def hook(module: DistributedDataParallel, _inputs: Any) -> None:
        session.before_forward(module)

    return hook


def _count_uses(ddp: DistributedDataParallel, first: FirstForward) -> list[RemovableHandle]:
    """In the first forward pass of a training step."""

    @_untraced
    def before(_module: nn.Module, _inputs: Any) -> None:
        first.begin() if torch.is_grad_enabled() else first.give_up()

    @_untraced
    def after(_module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        first.end()

    return [ddp.register_forward_pre_hook(before), ddp.register_forward_hook(after)]


def _float16_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") == torch.float16


def _tensors(outputs: Any) -> Iterator[Tensor]:
    """Tensors inside lists, tuples, mappings and dataclasses, depth first."""
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from _tensors(value)
    elif is_dataclass(outputs):
        yield from _tensors(vars(outputs))
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from _tensors(value)


class _AccumulationCheck:
    """Warns once when several compressed backward passes precede one optimizer step."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen = session.compressed
        self._warned = False

    def __call__(self, *_: Any) -> None:
        passes = self._session.compressed - self._seen
        self._seen = self._session.compressed
        if passes > 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"{passes} backward passes were exchanged before one optimizer step: each micro-batch was "
                "compressed and sent. Wrap all but the last in ddp.no_sync().",
                stacklevel=3,
            )
