"""Which parameters have their gradients averaged already, and over which ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor, nn

_NAMED = 3


class Carrier(NamedTuple):
    """Parameters that a wire carries, by the names that `module` has for them.

    `model` is what the user has given, and may be a wrapper around `module`. `kind` says in words what brings
    the gradients, and `over` are the ranks of the mean, by their global numbers. With `by_forward` they come
    by forward passes of `model` alone.
    """

    kind: str
    model: nn.Module
    module: nn.Module
    over: Sequence[int]
    trained: Mapping[str, Tensor]
    by_forward: bool = False


class _Claim(NamedTuple):
    """A carrier, held weakly: it ends with the model."""

    kind: str
    module: weakref.ref[nn.Module]
    ranks: frozenset[int]
    names: frozenset[str]

    def named(self, trained: Mapping[str, Tensor]) -> dict[str, str]:
        """Names of parameters among `trained` that are claimed, with the names that they have here.

        Parameters are looked up by their names. A weak reference to one would keep torch from swapping it,
        as a sharded module does when it is cast.
        """
        if (module := self.module()) is None:
            return {}
        every = module.named_parameters(remove_duplicate=False)
        here = {id(each): name for name, each in every if name in self.names}
        return {name: here[id(each)] for name, each in trained.items() if id(each) in here}


_CLAIMS: weakref.WeakKeyDictionary[nn.Module, list[_Claim]] = weakref.WeakKeyDictionary()
"""By the model that the user has given."""


def claim(carrier: Carrier) -> None:
    """Register `carrier`: from now on no other wire may average these parameters over these ranks."""
    _CLAIMS.setdefault(carrier.model, []).append(
        _Claim(carrier.kind, weakref.ref(carrier.module), frozenset(carrier.over), frozenset(carrier.trained))
    )


def give_up(carrier: Carrier) -> None:
    """Undo `claim`: other wires may average the parameters again."""
    mine, held = (carrier.kind, frozenset(carrier.over)), _CLAIMS.get(carrier.model, [])
    held[:] = [each for each in held if (each.kind, each.ranks) != mine]


def require_unclaimed(carrier: Carrier) -> None:
    """Raise `ValueError`, with names, if parameters are averaged already over some of these ranks.

    Each wire would take what the other brings for gradients or for something learned on this rank. One rank
    in common is no reason: a wire inside a site and one between sites have that. A new wrapper around a
    module replaces an older one of its kind if gradients come by the forward passes of one of them alone.
    """
    if _refusal(carrier):
        gc.collect()  # a model in a cycle of references goes only now
    if refusal := _refusal(carrier):
        raise ValueError(refusal)


def _refusal(carrier: Carrier) -> str:
    mine = frozenset(carrier.over)
    for model, claims in list(_CLAIMS.items()):
        for each in claims:
            shared = sorted(each.ranks & mine)
            if len(shared) < 2 and each.ranks != mine:
                continue
            is_alike, over = each.kind == carrier.kind, f"over ranks {shared}"
            if each.module() is carrier.module:
                if model is carrier.model or not (is_alike and carrier.by_forward):
                    instead = (
                        "for another recipe, call wire.switch(recipe)"
                        if is_alike
                        else "attach() and outer() take one model each, or different ranks: attach inside a "
                        "machine, outer between machines"
                    )
                    return f"this model is carried already, by its {each.kind}, {over}: {instead}"
            elif both := each.named(carrier.trained):
                names = [f"{name!r} (there {other!r})" for name, other in both.items()]
                more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
                return (
                    f"parameters of this model are carried already, by the {each.kind} of another model, "
                    f"{over}: {', '.join(names[:_NAMED])}{more}. A parameter goes by one wire: make that "
                    "of one module that holds both, such as torch.nn.ModuleList([one, other]), or detach the "
                    "other wire and let go of its model"
                )
    return ""
