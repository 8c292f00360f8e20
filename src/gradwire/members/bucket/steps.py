"""Local steps of a replica whose rounds go over an object store."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gradwire.agreement.agree import checksum
from gradwire.errors import GradwireError, WireError
from gradwire.members.bucket.coder import Coder
from gradwire.members.bucket.records import Offer
from gradwire.members.healing import as_bytes, describe, room_for
from gradwire.members.steps import MovingSteps
from gradwire.sources.local_model import WEIGHT
from gradwire.sources.values import join
from gradwire.step.layout import Layout
from gradwire.unit.parameters import ParameterSpec

_LOG = logging.getLogger("gradwire")


class StoredSteps(MovingSteps):
    """The `Replica` of `gradwire.members.bucket.rounds`: Δ of a model's parameters.

    Baselines are tensors of their own, because what was learned stays where a round lands without it.
    """

    kind = "local steps over a store"
    lands_without = True
    coder: Coder
    dropped: Callable[[str], None]
    """Called, with the reason, where Δ is lost by an offer or a landing."""
    _sent: Mapping[str, Tensor] = MappingProxyType({})
    """This replica's parameters when it last made an offer."""

    def code_by(self, layout: Layout, *, seed: int, number: int) -> None:
        """Code Δ by `layout`, before the first round. The other arguments are those of `Coder`."""
        self.coder = Coder(layout, self.rounds.delta.buckets, seed=seed, number=number)

    @property
    def coded(self) -> tuple[ParameterSpec, ...]:
        """The specs of what is coded: weights travel beside it."""
        return tuple(spec for spec in self.specs if spec.name != WEIGHT)

    def note_changes(self) -> None:
        """Raise `GradwireError` if parameters were loaded since the last step."""
        if self.loads.is_pending:
            self.attempts.written()
        if self.loads.taken(self.local.buffers()):
            raise GradwireError(
                "load_state_dict was called on a model whose rounds go over a store, and others do not know "
                "of it: load before gradwire.outer, which begins a run with the values of the first member"
            )

    def payload_bytes(self, round_: int) -> int:
        """Bytes of an offer."""
        base = self.rounds.buffer_means.base.values()
        wide = 8 if any(each.dtype == torch.float64 for each in base) else 4
        of_buffers = wide * (sum(each.numel() for each in base) + len(base)) if self.local.floating else 0
        return self.coder.size(round_) + of_buffers

    def land_at(self, attempts: int | None) -> None:
        """Land the round that was sent at this attempted step, or when it is asked for."""
        self.rounds.round = self.rounds.round.lands(attempts)

    # -- as `Replica`

    def digest(self) -> str:
        """See `Replica.digest`."""
        base = [checksum(each) for _, each in sorted(self.rounds.buffer_means.base.items())]
        return f"{self.checksum():08x}-{hash_of(base)}"

    def offer(self, round_: int) -> tuple[bytes, float] | None:
        """See `Replica.offer`."""
        rounds = self.rounds
        rounds.local.require_known()
        if not rounds.steps:
            return None
        if bad := rounds.delta.pack():
            failure = rounds.begin_anew(bad)
            rounds.round = rounds.round.dropped(self.attempts.count)
            self.dropped(f"{bad} is not finite: the shared parameters are taken back")
            if failure is not None:
                raise failure
            return None
        rounds.round = rounds.round.checked(sound=True)
        weight, usual = rounds.share
        rounds.delta.weigh(weight / usual)
        payload = [self.coder.encode(round_)]
        if self.local.floating:
            payload.append(as_bytes(rounds.buffer_means.changes(counts=True)))
        self._sent = {name: own.to(base, copy=True) for name, own, _shared, base in rounds.values.each()}
        rounds.round = rounds.round.offered(self.attempts.count)
        return torch.cat(payload).numpy().tobytes(), weight / usual

    @torch.no_grad()
    def land(self, round_: int, offers: Sequence[Offer], *, mine: bool) -> None:
        """See `Replica.land`."""
        rounds = self.rounds
        try:
            self._take_mean(round_, offers)
        except WireError as error:  # by all members, who read the same bytes
            _LOG.warning("%s: round %d brings nothing: %s", rounds.called, round_, error)
            if mine:
                self.dropped(f"round {round_} brings nothing: {error}")
        else:
            rounds.optimizers.outer.step()
            rounds.buffer_means.land()
        for name, own, shared, baseline in rounds.values.each():
            if mine:
                baseline.copy_(self._sent[name])
            join(own, shared, baseline)
        rounds.values.forget_gradients()
        rounds.written()
        if mine:
            self.coder.keep()
            rounds.round, self._sent = rounds.round.landed(), {}

    def _take_mean(self, round_: int, offers: Sequence[Offer]) -> None:
        """The mean of the offers becomes the gradient of θ₀, and that of buffers what is to land."""
        rows = [torch.frombuffer(bytearray(each.payload), dtype=torch.uint8) for each in offers]
        size = self.coder.size(round_)
        self.coder.decode([row[:size] if self.local.floating else row for row in rows], round_)
        if self.local.floating:
            sums = self.rounds.buffer_means.changes(counts=False)
            for row in rows:
                if row.numel() != size + sums.nbytes:
                    raise WireError(f"an offer has {row.numel() - size} bytes of buffers, not {sums.nbytes}")
                sums += row[size:].clone().view(sums.dtype).to(sums.device)
            self.rounds.buffer_means.summed(sums)
        counted = sum(each.weight for each in offers)
        views = self.rounds.delta.by_name()
        if not all(bool(each.isfinite().all()) for each in views.values()):
            raise WireError("its mean is not finite")
        for name, view in views.items():
            if counted != len(offers):
                view.mul_(len(offers) / counted)
            self.parameters[name].grad = view

    @torch.no_grad()
    def discard(self) -> bool:
        """See `Replica.discard`."""
        had = self.rounds.steps > 0
        self.rounds.sync_from_shared()
        self.coder.forget()
        self.rounds.round, self._sent = self.rounds.round.dropped(self.attempts.count), {}
        return had

    def give(self) -> bytes:
        """See `Replica.give`."""
        text, tensors = describe(self.shared_state())
        head = text.encode()
        parts = [
            len(head).to_bytes(8, "little"),
            head,
            *(as_bytes(each).numpy().tobytes() for each in tensors),
        ]
        return b"".join(parts)

    def take(self, data: bytes) -> None:
        """See `Replica.take`. Raises `GradwireError` for what does not fit this model."""
        size = int.from_bytes(data[:8], "little")
        found, room = room_for(data[8 : 8 + size].decode(errors="replace"))
        at = 8 + size
        if sum(each.nbytes for each in room) != len(data) - at:
            raise GradwireError("a snapshot of the run is damaged: it has another length than it says")
        for each in room:
            if each.nbytes:
                piece = bytearray(data[at : at + each.nbytes])
                each.view(-1).view(torch.uint8).copy_(torch.frombuffer(piece, dtype=torch.uint8))
                at += each.nbytes
        try:
            self.take_shared(found)
        except (KeyError, TypeError, ValueError) as error:
            raise GradwireError(f"the shared parameters of the run do not fit here: {error}") from error
        self.coder.forget()
        self._sent = {}

    # -- saves

    def save(self) -> dict[str, Any]:
        """As `LocalState.save`, with the memory. An offer that has not landed is not part of it: Δ is as
        before it, and its seal tells whether that counts.
        """
        return self.state.save() | {"memory": self.coder.save(), "flight": None}

    def prepared_save(self, saved: Mapping[str, Any]) -> Any:
        """A function that takes up what `save` returned. Raises `ValueError` if it does not fit."""
        _text, apply = self.state.prepared(saved, own=True)
        take_up = self.coder.prepared(saved["memory"])

        def both() -> None:
            apply()
            take_up()

        return both


def hash_of(numbers: Sequence[object]) -> str:
    """A short text of numbers."""
    return f"{zlib.crc32(str(numbers).encode()):08x}"
