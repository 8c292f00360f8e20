"""Which modules have their gradients averaged already, and over which ranks."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from torch import nn


class Carrier(Protocol):
    """The part of a source that claims a model: see `gradwire.sources.source.Source`."""

    @property
    def kind(self) -> str: ...

    @property
    def model(self) -> nn.Module: ...

    @property
    def module(self) -> nn.Module: ...

    @property
    def over(self) -> Sequence[int]: ...


class _Claim(NamedTuple):
    """The model around a module, the class and kind of the source, and the ranks of the mean."""

    model: weakref.ref[nn.Module]
    by: type[Carrier]
    kind: str
    ranks: frozenset[int]


_CLAIMS: weakref.WeakKeyDictionary[nn.Module, list[_Claim]] = weakref.WeakKeyDictionary()


def claim(source: Carrier) -> None:
    """Register `source`: from now on no other one may average this model over these ranks."""
    held = _CLAIMS.setdefault(source.module, [])
    held.append(_Claim(weakref.ref(source.model), type(source), source.kind, frozenset(source.over)))


def give_up(source: Carrier) -> None:
    """Undo `claim`: other sources may average the model again."""
    held = _CLAIMS.get(source.module, [])
    held[:] = [each for each in held if each.model() is not source.model]


def require_unclaimed(source: Carrier) -> None:
    """Raise `ValueError` if this model is averaged already over some of these ranks.

    A wrapper around a module replaces an older one of its kind.
    """
    mine = frozenset(source.over)
    for model, by, kind, ranks in _CLAIMS.get(source.module, []):
        shared = sorted(ranks & mine)
        is_same, is_alike = model() is source.model, by is type(source)
        is_other = is_same or (model() is not None and not is_alike)
        if is_other and (len(shared) > 1 or ranks == mine):
            instead = (
                "for another recipe, call wire.switch(recipe)"
                if is_same and is_alike
                else "attach() and outer() take one model each, or different ranks: attach inside a machine, "
                "outer between machines"
            )
            raise ValueError(f"this model is carried already, by its {kind}, over ranks {shared}: {instead}")
