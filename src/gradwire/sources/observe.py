"""Observations of every source beside the gradients: start of backward, loss scale, optimizer."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwire.errors import GradwireError
from gradwire.measure.clock import BackwardWatch
from gradwire.measure.uses import FirstForward
from gradwire.placement import Device, fetch
from gradwire.sources.source import Source
from gradwire.step.reducer import Backward
from gradwire.untraced import untraced

_HELD = "_gradwire_held"
"""Attribute of a model with objects of the user's, as `hold` is given them."""


def register_observers(
    source: Source,
    backward: Backward,
    entrance: Entrance,
    uses: dict[str, float] | None,
    *,
    scaled: bool,
) -> list[RemovableHandle]:
    """Register hooks on the model of `source`; returns those on its forward pass.

    Args:
        source: has the model.
        backward: the training thread's side of the reducer.
        entrance: is shown the outputs of forward passes that train.
        uses: multiply-adds by parameter name, filled in the first such pass; `None` if nobody asks.
        scaled: True if gradients carry a loss scale.
    """
    model, module = source.model, source.module
    # First of all, since FSDP's hook puts gathered parameters in place of the shards.
    hooks = [model.register_forward_pre_hook(_before_forward(backward, source), prepend=True)]
    if uses is not None:
        hooks += _count_uses(model, module, uses)
    hooks.append(model.register_forward_hook(_begin_backward(backward, entrance, scaled=scaled)))
    backward.optimizer_log.watch(model)
    return hooks


def hold(model: nn.Module, given: object) -> None:
    """Let `model` hold an object of the user's as long as it lives; a copy of the model does not hold it.

    The object may refer to the model, with which gradwire's thread ends. So the model alone holds it, and
    all that this thread reaches refers to it weakly.
    """
    vars(model).setdefault(_HELD, []).append(given)


def leave_out_of_copies(model: nn.Module, hooks: Iterable[RemovableHandle], **instead: Any) -> None:
    """Keep `hooks` on forward passes or loads of `model` out of its state for `copy` and `pickle`.

    A copy cannot share the objects to which hooks refer: a thread, a process group, the memory of this model.
    So the model gets a `__getstate__` of its own. `instead` are attributes of the copy.
    """
    ours = frozenset(hook.id for hook in hooks)
    instance: Any = model
    original = _state_of(instance)

    def state_without_gradwire() -> dict[str, Any]:
        state = dict(original())
        for name in ("__getstate__", _HELD):
            state.pop(name, None)
        state |= instead
        for name in ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_pre_hooks"):
            state[name] = OrderedDict(item for item in state[name].items() if item[0] not in ours)
        return state

    instance.__getstate__ = state_without_gradwire


def _state_of(instance: Any) -> Callable[[], dict[str, Any]]:
    """The present `instance.__getstate__`, without a reference to `instance`, which would keep the model."""
    if isinstance(instance.__getstate__, FunctionType):
        found: Callable[[], dict[str, Any]] = instance.__getstate__  # ours, for other hooks
        return found
    if not hasattr(instance.__getstate__, "__func__"):
        alive = weakref.ref(instance)  # a method of C, to which there are no weak ones
        return lambda: vars(alive())
    method = weakref.WeakMethod(instance.__getstate__)

    def state() -> dict[str, Any]:
        getstate = method()
        assert getstate is not None, "asked by the model"
        kept: dict[str, Any] = getstate()
        return kept

    return state


def _begin_backward(backward: Backward, entrance: Entrance, scaled: bool) -> Callable[..., None]:
    device, watch = backward.placement.device, backward.reducer.watch
    begin: Callable[..., None] = watch.begin
    if not device.is_host:
        begin = partial(_begin, device, watch, backward.reducer.env.begun)

    @untraced
    def hook(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if not torch.is_grad_enabled():
            return
        if not scaled and _float16_autocast(device.where.type) and backward.reducer.may_remember:
            raise ValueError(
                "float16 autocast without scaler=: the residual would carry the loss scale. Pass "
                "gradwire.attach(…, scaler=GradScaler), or autocast to bfloat16."
            )
        # The loss is done when the gradient of the model's output arrives; where no output leads to it, the
        # end of the forward pass stands for that.
        begin()
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(begin)  # type: ignore[no-untyped-call]  # torch has not typed it
                break
        entrance.show(outputs)

    return hook


class Entrance:
    """Detector of a backward pass that enters the model: `entered` is called before any parameter has its
    gradient.

    Gradients may enter by any output of the forward pass, and hooks on the outputs notice. These hooks miss
    outputs in an object of the user's own class, and a loss kept on the module; and `ddp.forward(…)` runs no
    hook that shows the outputs. Then hooks on `parameters` notice, before the first gradient is written. A
    reentrant checkpoint nests passes: `entered` is called in each of them, later ones when some gradients are
    there.
    """

    def __init__(
        self, model: nn.Module, entered: Callable[[], None], parameters: Iterable[Tensor] = ()
    ) -> None:
        """`parameters` are watched as long as the `model` lives, once they are."""
        self._entered = entered
        self._unwatched = list(parameters)
        self._pass = -1
        """The last backward pass that was seen to enter, by autograd's number."""
        self._is_seen = False
        """True if a pass has entered since the last call of `opened`."""
        self._handles: list[RemovableHandle] = []
        # Parameters that outlive the model must not keep the flat buffers alive.
        weakref.finalize(model, remove, self._handles).atexit = False

    def show(self, outputs: Any) -> None:
        """Hook the `outputs` of a forward pass, by which the backward pass enters the model."""
        seen = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
        for tensor in seen:
            tensor.register_hook(self._enter)  # type: ignore[no-untyped-call]
        if not seen:
            self.watch()

    def watch(self) -> None:
        """Watch the parameters, too, from now on. Making the hooks costs more than leaving them there.

        A frozen parameter takes no hook, and is left for the next call.
        """
        frozen = []
        for each in self._unwatched:
            if each.requires_grad:
                self._handles.append(each.register_hook(self._enter))  # type: ignore[no-untyped-call]
            else:
                frozen.append(each)
        self._unwatched = frozen

    def unwatch(self) -> None:
        """Look at no parameter any more, for good."""
        remove(self._handles)
        self._handles.clear()
        self._unwatched = []

    def opened(self) -> None:
        """Note the first gradients of a pass. If its entrance was missed, parameters are watched from the
        next pass on.
        """
        if not self._is_seen:
            self.watch()
        self._is_seen = False

    def _enter(self, _gradient: Tensor) -> None:
        now = torch._C._current_graph_task_id()
        if now != self._pass:
            self._pass, self._is_seen = now, True
            self._entered()


def remove(hooks: Iterable[RemovableHandle]) -> None:
    """Remove all `hooks`."""
    for hook in hooks:
        hook.remove()


def _begin(
    device: Device, watch: BackwardWatch, begun: Callable[[], None], _gradient: Tensor | None = None
) -> None:
    """Note on a gradient's arrival that a backward pass begins, in `watch` and by `begun`. It is a hook
    without a reference to a model, which a graph would keep alive.
    """
    if not device.is_capturing():  # or the pass will be refused, before which a wait could fail
        watch.begin()
        begun()


class LossScale:
    """Scale of a `scaler`, for gradients on a `device`, read without waiting for the gradients.

    `get_scale` reads a number that the device computes after all its pending work. So the number is copied to
    the host when the backward pass begins, and waited for at its first gradients. That wait lasts until the
    device has done the forward pass, and replaces the wait for the gradients.
    """

    def __init__(self, scaler: torch.amp.GradScaler, device: Device, where: torch.device) -> None:
        """Parameters are at `where`, on the `device`. The model holds the `scaler` (`hold`)."""
        self._held, self._device = weakref.ref(scaler), device
        self._one = None if device.is_host else torch.ones((), dtype=torch.float32, device=where)
        self._fetched: Callable[[], Tensor] | None = None

    def begun(self) -> None:
        """Begin to copy the scale, as it is after all work enqueued so far."""
        scaler = self._held()  # none, if a graph has outlived the model
        if self._one is not None and scaler is not None:
            self._fetched = fetch(self._device, scaler.scale(self._one))

    def __call__(self) -> float:
        """The loss scale of the backward pass that has begun. If none has (under `join()`), the present
        scale, for which the host waits.

        Raises `GradwireError` if the scaler is gone, with the model.
        """
        fetched, self._fetched = self._fetched, None
        if fetched is not None:
            return float(fetched())
        if (scaler := self._held()) is None:
            raise GradwireError("the model has gone before its step began, and the loss scale with it")
        return float(scaler.get_scale())


def _before_forward(backward: Backward, source: Source) -> Callable[..., None]:
    """Make a forward pre-hook: it refuses changed parameters, ends the previous pass, and watches parameters
    if asked.

    Ready times are needed in serial steps only; in others a hook on every parameter would cost time.
    """
    named = tuple(source.parameters.items())
    source.known  # noqa: B018  # as they are now

    @untraced
    def hook(_model: nn.Module, _inputs: Any) -> None:
        if torch.is_grad_enabled():
            refuse_changed(backward, source)
        backward.before_forward()
        watch = backward.reducer.watch
        watch.watch(named) if backward.reducer.is_serial else watch.release()

    return hook


def refuse_changed(backward: Backward, source: Source) -> None:
    """Raise `ValueError` if the model's parameters are no longer those that gradwire carries.

    Ranks that wait in a step are told, since this rank's step will not come.
    """
    module = source.module
    if source.known.seen_in(module):
        return
    try:
        source.known.require(source.current())
        source.known.see(module)
    except ValueError as error:
        backward.calls.give_up_step(f"a forward pass that it refuses ({error})")
        raise


def _count_uses(model: nn.Module, module: nn.Module, uses: dict[str, float]) -> list[RemovableHandle]:
    """Count in the first forward pass of a training step. The reducer has `uses`, which refers to no
    model."""
    first = FirstForward(module)

    @untraced
    def before(_module: nn.Module, _inputs: Any) -> None:
        first.begin() if torch.is_grad_enabled() else first.give_up()

    @untraced
    def after(_module: nn.Module, _inputs: Any, _outputs: Any) -> None:
        first.end()
        uses.update(first.uses)

    return [model.register_forward_pre_hook(before), model.register_forward_hook(after)]


def _float16_autocast(device: str) -> bool:
    return torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) == torch.float16


def tensors_in(outputs: Any) -> Iterator[Tensor]:
    """Tensors inside lists, tuples, mappings and dataclasses, depth first.

    >>> from dataclasses import make_dataclass
    >>> Output = make_dataclass("Output", ["loss"], slots=True)
    >>> [tensor.item() for tensor in tensors_in([Output(torch.ones(())), {"loss": torch.zeros(())}])]
    [1.0, 0.0]
    """
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            yield from tensors_in(value)
    elif is_dataclass(outputs):
        held = {each.name: getattr(outputs, each.name, None) for each in fields(outputs)}
        yield from tensors_in(held | getattr(outputs, "__dict__", {}))  # one with slots has no dictionary
    elif isinstance(outputs, list | tuple):
        for value in outputs:
            yield from tensors_in(value)
