"""Checkpoints of a replica that takes local steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradwire.sources.buffer_means import number_of, put
from gradwire.sources.outer import Rounds
from gradwire.sources.round import Round


class LocalState:
    """The `SourceState` of a replica's rounds."""

    def __init__(self, rounds: Rounds, every: int, land_now: Callable[[], None]) -> None:
        """`land_now` lands a round under way before it is due, which comes after `every` steps."""
        self._rounds, self._every, self._land_now = rounds, every, land_now

    def save(self) -> dict[str, Any]:
        """Of this replica: its parameters, buffers and optimizers, θ₀, and the round that is under way."""
        rounds = self._rounds
        flight: dict[str, Any] | None = None
        if rounds.round.lands_at is not None:
            counted, _finished, world = rounds.heard() if rounds.brings else (0.0, 0, 1)
            flight = {"lands_at": rounds.round.lands_at, "means": None, "buffers": {}}
            if counted:
                means = {name: view * (world / counted) for name, view in rounds.delta.by_name().items()}
                flight |= {"means": means, "buffers": rounds.buffer_means.come()}
        return {
            **self.shared(),
            "own": self._tensors(),
            "anchors": rounds.values.baselines,  # as in states of earlier versions
            "inner": rounds.optimizers.inner_states(),
            **rounds.round.state(),
            "flight": flight,
            **rounds.state_among_members(),
        }

    def shared(self) -> dict[str, Any]:
        """θ₀, the outer optimizer's state, and the buffers that all have agreed on."""
        rounds = self._rounds
        return {
            "attempts": rounds.attempts.count,
            "shared": rounds.values.of_all(),
            "optimizer": rounds.optimizers.outer.state_dict(),
            "buffers": rounds.buffer_means.base,
        }

    def save_mean(self) -> dict[str, Any]:
        """θ₀ and the outer optimizer's state. Raises `ValueError` in the middle of a round."""
        count = self._rounds.attempts.count
        if count % self._every or self._rounds.round.lands_at is not None:
            raise ValueError(
                f"{count} steps were attempted, which is in the middle of a round of {self._every}: what "
                "each replica has learned since would be lost. Save from one rank after a round has landed, "
                "or call wire.save() on all ranks, at any time"
            )
        return self.shared()

    def prepared(self, saved: Mapping[str, Any], *, own: bool) -> tuple[str, Callable[[], None]]:
        """Validate a saved state. Returns a fingerprint for all ranks to compare, and a function that applies
        the state. Changes nothing itself.

        Args:
            saved: the state, as `state_dict` returned it.
            own: whether it is this rank's own. Otherwise only shared parameters, a mean that has not landed,
                and optimizers are taken from it.

        Raises `ValueError` if the state does not fit this model and its optimizers.
        """
        rounds = self._rounds
        shared = rounds.values.of_all()
        _require_like("shared parameters", saved["shared"], shared)
        # A state from before buffers travelled beside a round fits a model without floating ones.
        base = _require_names("buffers", saved.get("buffers", {}), rounds.buffer_means.base)
        rounds.optimizers.require_fit(saved["optimizer"], saved.get("inner"))
        whole = own and "own" in saved
        if whole:
            here = self._tensors()
            found = _require_names("parameters and buffers", saved["own"], here)
            trained = rounds.local.own
            _require_like(
                "parameters", {name: found[name] for name in trained}, {name: here[name] for name in trained}
            )
            _require_like("baselines", saved["anchors"], rounds.values.baselines)
        flight = saved.get("flight")
        if flight is not None and flight["means"] is not None:
            _require_like("means", flight["means"], shared)
        shapes = number_of([each.shape for each in base.values()])
        text = f"{saved['attempts'] % self._every} steps after a round, {flight is not None} {whole} {shapes}"
        return text, lambda: self._take_up(saved, whole=whole)

    @torch.no_grad()
    def _take_up(self, saved: Mapping[str, Any], *, whole: bool) -> None:
        rounds = self._rounds
        flight, count = saved.get("flight"), int(saved["attempts"])
        for name, each in saved["shared"].items():
            rounds.values.shared[name].copy_(each)
        rounds.optimizers.load(saved["optimizer"], saved.get("inner"))
        rounds.buffer_means.take_up(saved.get("buffers", {}))
        rounds.round = Round.of(saved) if whole else rounds.round.resumed(flight)
        rounds.counted = saved.get("counted", 0)
        if flight is not None:
            views = rounds.delta.by_name() if flight["means"] is not None else {}
            for name, view in views.items():
                view.copy_(flight["means"][name])
            rounds.buffer_means.resume(flight.get("buffers", {}))
        if whole:
            here = self._tensors()
            for name, each in saved["own"].items():
                put(here[name], each)
            for name, each in saved["anchors"].items():
                rounds.values.baselines[name].copy_(each)
            rounds.written()
        else:
            rounds.buffer_means.restore(reshaped=True)
            rounds.sync_from_shared()
            self._land_now()
            rounds.sync_from_shared()
            count -= count % self._every
            rounds.round = rounds.round.anew(count)
        rounds.attempts.forget(count)
        rounds.taken_up()

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of this rank."""
        own = {name: each for name, each, _shared, _baseline in self._rounds.values.each()}
        return own | dict(self._rounds.local.module.named_buffers())


def _require_names(what: str, saved: object, here: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """`saved`. Raises `ValueError` unless it has tensors of the names that are `here`."""
    if not isinstance(saved, Mapping) or saved.keys() != here.keys():
        raise ValueError(f"the state's {what} are not those of this model, by name")
    if strange := [name for name in here if not isinstance(saved[name], Tensor)]:
        raise ValueError(f"the state's {what} have no tensor of {strange[0]!r}")
    return saved


def _require_like(what: str, saved: object, here: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` unless `saved` has tensors of the same names and shapes as are `here`."""
    found = _require_names(what, saved, here)
    for name, each in here.items():
        if found[name].shape != each.shape:
            raise ValueError(f"the state's {what} have another shape of {name!r} than this model")
