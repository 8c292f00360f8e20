"""Check that a module still has the parameters whose gradients gradwire carries."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

_NAMED = 3


class Known:
    """Parameters of a module when gradwire was attached, to compare with the present ones.

    A trainable parameter that was added or replaced later would be trained on its rank alone. So would one
    that was cast, which wrappers then ignore.

    Parameters are compared by identity: wrapping a layer (`torch.compile`) changes names, and no parameter. A
    tensor that is no parameter replaces one while a call lasts (`torch.func.functional_call`), and hands its
    gradient on.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        carried: Collection[str],
        left_out: Collection[str] = (),
        *,
        in_order: bool = False,
    ) -> None:
        """Remember those of `parameters` that are `carried`, and those `left_out`, for which the user
        answers.

        `in_order` is True if strides of carried parameters must stay, too.
        """
        self._first = tuple(parameters.values())
        self._carried = {name: (parameters[name], _facts(parameters[name])) for name in carried}
        self._strides = {
            name: each.stride() for name, (each, _) in self._carried.items() if in_order and each.dim() > 1
        }
        self._ids = {id(parameter) for parameter, _ in self._carried.values()}
        self._left_out = frozenset(left_out)
        self._out_ids = {id(parameter) for name, parameter in parameters.items() if name in self._left_out}
        self.held: Mapping[str, nn.Parameter] = self._without_left_out(parameters)
        """The parameters of the module when `require` was last asked, frozen ones too."""
        self._modules: list[weakref.ref[nn.Module]] = []
        self._kept: list[Tensor] = []
        self._glance: tuple[object, ...] = ()

    def seen_in(self, module: nn.Module) -> bool:
        """True if nothing in `module` has changed since `see(module)`: a quick check before `require`.

        Modules and parameters are compared by identity, carried parameters also by the facts that `require`
        reads.
        """
        return bool(self._kept) and self._looked_at(module) == self._glance

    def see(self, module: nn.Module) -> None:
        """Remember `module` as it is now, after `require` has accepted it; without tensors that replace
        parameters for a call.
        """
        self._modules = [weakref.ref(each) for each in module.modules()]
        held: list[Tensor] = [
            each for inner in module.modules() for each in inner._parameters.values() if each is not None
        ]
        # Kept, so that no other tensor gets the identity of one that is gone.
        self._kept = held if all(isinstance(each, nn.Parameter) for each in held) else []
        self._glance = self._looked_at(module)

    def _looked_at(self, module: nn.Module) -> tuple[object, ...]:
        """Numbers and facts that stay the same as long as nothing changes."""
        modules = [alive for each in self._modules if (alive := each()) is not None]
        parameters = [each for inner in modules for each in inner._parameters.values() if each is not None]
        return (
            id(module),
            len(modules),
            [id(each) for inner in modules for each in inner._modules.values()],
            list(map(id, parameters)),
            [each.requires_grad for each in parameters],
            [(each.dtype, each.device, each.shape, each.stride()) for each, _ in self._carried.values()],
        )

    def require(self, now: Mapping[str, Tensor]) -> None:
        """Raise `ValueError` unless the trainable parameters in `now` are the carried ones, unchanged.

        The message names parameters and says what to do.
        """
        held = {
            name: tensor if isinstance(tensor, nn.Parameter) else self.held.get(name)
            for name, tensor in now.items()
        }
        self.held = mine = self._without_left_out({name: p for name, p in held.items() if p is not None})
        if changes := self._changes(mine):
            more = f"; and {len(changes) - _NAMED} more" if len(changes) > _NAMED else ""
            raise ValueError(
                f"parameters of this model have changed since attach: {'; '.join(changes[:_NAMED])}{more}. "
                "Their gradients would not reach other ranks, or not in their places. Add, replace, cast, "
                "move, freeze and thaw parameters, and change their memory format, before wrapping the model "
                "and attaching it; to load values later, use load_state_dict without assign=True"
            )

    def _without_left_out(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
        if not self._left_out:
            return parameters
        return {
            name: parameter
            for name, parameter in parameters.items()
            if name not in self._left_out and id(parameter) not in self._out_ids
        }

    def _changes(self, now: Mapping[str, nn.Parameter]) -> list[str]:
        present = {id(parameter) for parameter in now.values()}
        changes = []
        for name, (parameter, facts) in self._carried.items():
            if id(parameter) not in present:
                stranger = name in now and id(now[name]) not in self._ids
                changes.append(f"{name!r} was {'replaced' if stranger else 'removed'}")
            elif (found := _facts(parameter)) != facts:
                changes.append(f"{name!r} is {_text(*found)}, and was {_text(*facts)}")
            elif (stride := self._strides.get(name)) is not None and not has_order(parameter, stride):
                changes.append(f"{name!r} has strides {parameter.stride()}, and had {stride}")
        gone = {name for name, (parameter, _) in self._carried.items() if id(parameter) not in present}
        for name, parameter in now.items():
            if not parameter.requires_grad or id(parameter) in self._ids or name in gone:
                continue
            if any(parameter is each for each in self._first):
                changes.append(f"{name!r} {tuple(parameter.shape)} was frozen when gradwire was attached")
            else:
                changes.append(f"{name!r} was added")
        return changes


def has_order(tensor: Tensor, stride: tuple[int, ...]) -> bool:
    """True if the elements of `tensor` lie as `stride` says. In a dimension of size 1 any stride does.

    >>> has_order(torch.zeros(2, 3, 1), (3, 1, 3)), has_order(torch.zeros(2, 3, 1), (1, 2, 1))
    (True, False)
    """
    mine = tensor.stride()
    return mine == stride or all(
        size == 1 or own == other for size, own, other in zip(tensor.shape, mine, stride, strict=True)
    )


def _facts(parameter: Tensor) -> tuple[torch.dtype, torch.device, torch.Size]:
    return parameter.dtype, parameter.device, parameter.shape


def _text(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)} on {device}"
