"""Local steps of a replica whose rounds go over an object store."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gradwire.agreement.agree import checksum, on_all_ranks, require_success
from gradwire.errors import GradwireError, WireError
from gradwire.members.bucket.coder import Coder
from gradwire.members.bucket.records import Offer, digest_of
from gradwire.members.healing import as_bytes, describe, room_for
from gradwire.members.site import Site
from gradwire.members.steps import MovingSteps
from gradwire.sources.local_model import WEIGHT
from gradwire.sources.values import join
from gradwire.step.layout import Layout
from gradwire.unit.parameters import ParameterSpec

_LOG = logging.getLogger("gradwire")


class StoredSteps(MovingSteps):
    """The `Replica` of `gradwire.members.bucket.rounds`: Δ of a model's parameters.

    All ranks of a site call the same methods together. Where they have shards, each codes its own, and an
    offer or a snapshot is made of a part of each rank. Where they hold the parameters alike, all code the
    same, and what the first one has counts.

    Baselines are tensors of their own, because what was learned stays where a round lands without it.
    """

    kind = "local steps over a store"
    lands_without = True
    coder: Coder
    site: Site
    """The ranks of this replica."""
    dropped: Callable[[str], None]
    """Called, with the reason, where Δ is lost by an offer or a landing."""
    await_kernels: Callable[[], None]
    """Returns when the kernels of the coder are there. Local steps do not wait for them."""
    _sent: Mapping[str, Tensor] = MappingProxyType({})
    """This replica's parameters when it last made an offer."""

    def code_by(
        self, layout: Layout, site: Site, await_kernels: Callable[[], None], *, seed: int, number: int
    ) -> None:
        """Code Δ by `layout` on the ranks of `site`, once `await_kernels` returns. The other arguments are
        those of `Coder`.
        """
        self.await_kernels = await_kernels
        self.site, self.coder = site, Coder(layout, self.rounds.delta.buckets, seed=seed, number=number)

    @property
    def parts(self) -> int:
        """Parts of an offer and of a snapshot, each of another rank."""
        return self.site.size if self.local.shards is not None else 1

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
        return self.parts * self.coder.size(round_) + of_buffers

    def land_at(self, attempts: int | None) -> None:
        """Land the round that was sent at this attempted step, or when it is asked for."""
        self.rounds.round = self.rounds.round.lands(attempts)

    # -- as `Replica`

    def digest(self) -> str:
        """See `Replica.digest`. Ranks that hold the same have one digest, whatever their number."""
        base = [checksum(each) for _, each in sorted(self.rounds.buffer_means.base.items())]
        of_all = [self.site.numbers(each) for each in (self.checksum(), hash_of(base))]
        told = [f"{shared:08x}-{buffers:08x}" for shared, buffers in zip(*of_all, strict=True)]
        return told[0] if len(set(told)) == 1 else digest_of(json.dumps(told).encode())

    def offer(self, round_: int) -> tuple[bytes, float] | None:
        """See `Replica.offer`. Only the first rank gets the payload."""
        if not self.rounds.steps:
            return None
        self.await_kernels()
        bad, failure = self.rounds.packed()
        if bad:
            self.rounds.round = self.rounds.round.dropped(self.attempts.count)
            self.dropped(f"{bad} is not finite: the shared parameters are taken back")
        require_success(failure, "bring what it has learned", self.site.comm)
        if bad:
            return None
        weight, usual = self.rounds.share
        payload, changes = on_all_ranks(
            partial(self._encoded, round_, weight / usual), "code what it has learned", self.site.comm
        )
        found = self.site.collected(payload) if self.parts > 1 else [payload]
        if self.local.floating:
            self.site.comm.all_reduce(changes).wait()
            found.append(as_bytes(changes).numpy().tobytes())
        self.rounds.round = self.rounds.round.offered(self.attempts.count)
        return b"".join(found), weight / usual

    def _encoded(self, round_: int, weight: float) -> tuple[bytes, Tensor]:
        """This rank's part of the payload, and its changes of buffers."""
        self.rounds.delta.weigh(weight)
        payload = self.coder.encode(round_).numpy().tobytes()
        self._sent = {name: own.to(base, copy=True) for name, own, _shared, base in self.rounds.values.each()}
        changes = (
            self.rounds.buffer_means.changes(counts=True).cpu()
            if self.local.floating
            else torch.empty(0, dtype=torch.float32, device="cpu")
        )
        return payload, changes

    @torch.no_grad()
    def land(self, round_: int, offers: Sequence[Offer], *, mine: bool) -> None:
        """See `Replica.land`. Only the first rank has the offers."""
        self.await_kernels()
        told = self.site.told(json.dumps([[len(each.payload), each.weight] for each in offers]))
        lengths, weights = zip(*json.loads(told), strict=True)
        right, size = self.payload_bytes(round_), self.coder.size(round_)
        why = next((f"an offer has {each} bytes, not {right}" for each in lengths if each != right), "")
        rows, tails = [], []
        for number in range(0 if why else len(lengths)):
            payload = memoryview(offers[number].payload if offers else b"")
            rows.append(
                self.site.dealt([payload[part * size : (part + 1) * size] for part in range(self.parts)])
            )
            if self.local.floating:
                tails.append(self.site.dealt([payload[self.parts * size :]]))
        if not why:
            take = partial(self._take_mean, round_, rows, tails, weights)
            own = on_all_ranks(take, f"read the offers of round {round_}", self.site.comm)
            if any(self.site.numbers(bool(own))):  # at all sites, which read the same bytes
                why = own or "another rank cannot read its part"
        if why:
            _LOG.warning("%s: round %d brings nothing: %s", self.rounds.called, round_, why)
            if mine:
                self.dropped(f"round {round_} brings nothing: {why}")
        else:
            self.rounds.optimizers.outer.step()
            if self.local.floating:
                self.rounds.buffer_means.land()
        for name, own_, shared, baseline in self.rounds.values.each():
            if mine:
                baseline.copy_(self._sent[name])
            join(own_, shared, baseline)
        self.rounds.values.forget_gradients()
        self.rounds.written()
        if mine:
            self.coder.keep()
            self.rounds.round, self._sent = self.rounds.round.landed(), {}

    def _take_mean(
        self, round_: int, rows: Sequence[Tensor], tails: Sequence[Tensor], weights: Sequence[float]
    ) -> str:
        """The mean of the offers becomes the gradient of θ₀, and that of buffers what is to land. Returns why
        it cannot, or "".
        """
        try:
            self.coder.decode(rows, round_)
        except WireError as error:
            return str(error)
        if self.local.floating:
            sums = self.rounds.buffer_means.changes(counts=False)
            for tail in tails:
                sums += tail.view(sums.dtype).to(sums.device)
            self.rounds.buffer_means.summed(sums)
        counted, views = sum(weights), self.rounds.delta.by_name()
        if not all(bool(each.isfinite().all()) for each in views.values()):
            return "its mean is not finite"
        for name, view in views.items():
            if counted != len(weights):
                view.mul_(len(weights) / counted)
            self.parameters[name].grad = view
        return ""

    @torch.no_grad()
    def discard(self) -> bool:
        """See `Replica.discard`."""
        had = self.rounds.steps > 0
        self.rounds.sync_from_shared()
        self.coder.forget()
        self.rounds.round, self._sent = self.rounds.round.dropped(self.attempts.count), {}
        return had

    def give(self) -> bytes:
        """See `Replica.give`. Only the first rank gets the state: its own, or the parts of all, after the
        length of each.
        """
        own = on_all_ranks(self._state, "read the shared parameters", self.site.comm)
        if self.parts == 1:
            return own
        found = self.site.collected(own)
        return b"".join([*(len(each).to_bytes(8, "little") for each in found), *found])

    def _state(self) -> bytes:
        """This rank's part of the shared state: a description, and plain tensors."""
        if self.local.shards is None and self.site.rank > 0:
            return b""
        text, tensors = describe(self.shared_state())
        head = text.encode()
        parts = [
            len(head).to_bytes(8, "little"),
            head,
            *(as_bytes(each).numpy().tobytes() for each in tensors),
        ]
        return b"".join(parts)

    def take(self, data: bytes) -> None:
        """See `Replica.take`. Only the first rank has the data. Raises `GradwireError` for what does not fit
        this model.
        """
        mine = self.site.dealt(_cut(data, self.parts))
        size = int.from_bytes(mine[:8].numpy().tobytes(), "little")
        found, room = room_for(mine[8 : 8 + size].numpy().tobytes().decode(errors="replace"))
        at = 8 + size
        if sum(each.nbytes for each in room) != mine.numel() - at:
            raise GradwireError("a snapshot of the run is damaged: it has another length than it says")
        for each in room:
            if each.nbytes:
                each.view(-1).view(torch.uint8).copy_(mine[at : at + each.nbytes])
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


def _cut(data: bytes, parts: int) -> list[memoryview]:
    """The parts of a snapshot, of which each rank takes its own, and all a single one."""
    whole = memoryview(data)
    if parts == 1:
        return [whole]
    at, found = 8 * parts, []
    for start in range(0, at, 8):
        size = int.from_bytes(whole[start : start + 8], "little")
        found.append(whole[at : at + size])
        at += size
    return found


def hash_of(numbers: Sequence[object]) -> int:
    """A CRC-32 of numbers."""
    return zlib.crc32(str(numbers).encode())
