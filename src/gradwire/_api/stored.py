"""`outer(members=gradwire.members.store(…))`: rounds over an object store; `StoreWire`."""

from __future__ import annotations

import os
import weakref
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradwire._api.configuration import Configuration
from gradwire._api.moving import MovingWire, for_fixed, site_of
from gradwire._api.parts import lacking
from gradwire._api.prepare import PreparedBeside
from gradwire._api.report import Report
from gradwire.agreement.agree import on_all_ranks, require_agreement
from gradwire.checkpoint import file_set
from gradwire.comm.apart import alone
from gradwire.members import Stored
from gradwire.members.bucket.member import StoredMembership
from gradwire.members.bucket.objects import check_size
from gradwire.members.bucket.steps import StoredSteps
from gradwire.placement import device_at
from gradwire.recipes import Recipe
from gradwire.sources.local_optimizers import LocalOptimizers, OuterFactory
from gradwire.sources.observe import hold
from gradwire.step.layout import Policy, build
from gradwire.unit.context import number_from
from gradwire.version import __version__

_HELD: weakref.WeakSet[Stored] = weakref.WeakSet()
"""Members that had a wire."""


def stored(
    model: nn.Module,
    members: Stored,
    optimizer: object,
    make: OuterFactory,
    asked: Configuration,
    *,
    policy: Policy | None,
    every: int,
    delay: int,
    resume: str | os.PathLike[str] | None,
    every_s: float | None,
) -> StoreWire:
    """Make a wire whose rounds go over the store of `members`. Returns when this replica has its place there.

    The other arguments are those of `moving`. Raises `ValueError` for what cannot go over a store, and what
    entering the run raises.
    """
    if members in _HELD:
        raise ValueError("these members had a wire: make new ones for another, also after detach()")
    if asked.checksums or asked.guard_every:
        raise ValueError(
            "checksums= and guard_every= are for process groups: leave them out. Offers and snapshots have "
            "digests, which are compared in each round"
        )
    optimizers = LocalOptimizers(optimizer, make)
    source = StoredSteps(
        model,
        alone(),
        optimizers,
        every=every,
        delay=delay,
        on_host=asked.placement != "device",
        name=members.name,
    )
    site = site_of(source)
    begun: list[StoredMembership] = []

    def prepared() -> tuple[StoredMembership, str, dict[str, str]]:
        given = replace(asked, policy=source.weighed(policy))
        source.check_policy()
        given = given.answered(source)
        chosen = given.validated(source)
        membership = StoredMembership(
            members.objects, source, site, members.rules, alone_s=members.alone_s, every_s=every_s
        )
        begun.append(membership)
        layout = build(
            source.coded, chosen.build(), given.policy, source.device, 2, given.memory_dtype, source.tuning
        )
        source.suits(layout, (optimizers.outer,))
        beside = PreparedBeside(site.rank, world=2)
        number = number_from(members.name) >> 33
        source.code_by(layout, site, beside.wait, seed=given.seed, number=number)
        check_size(members.url, source.payload_bytes(0))
        beside.begin(layout, device_at(source.device))
        return membership, str(chosen), _terms(source, given, chosen, members)

    try:
        membership, recipe, terms = on_all_ranks(prepared, "begin rounds over a store", site.comm)
        weakref.finalize(model, membership.close)
        waits = {"name": members.name, "URL": members.url, "rules": str(members.rules)}
        waits |= {"alone": str(members.alone_s), "every_seconds": str(every_s)}
        require_agreement(waits | terms, site.comm)
        if resume is not None:
            found = file_set.kept(site.comm, Path(resume))
            if found is not None:
                on_all_ranks(partial(membership.load, found), "go on from its save", site.comm)
        hold(model, members)
        membership.join(terms)
    except BaseException:  # plain training goes on, or another call of `outer`
        source.retire()
        for each in begun:
            each.close()
        raise
    _HELD.add(members)
    steps = lacking(
        {
            "attached": "rounds over a store have no process group, and so no exchange to look at",
            "overlap": for_fixed("overlap = False", "leave out delay="),
            "trace": for_fixed("trace()", "look at wire.events"),
        },
        overlap=True,
        settled=True,  # recipes that choose are refused
        no_sync=nullcontext,
        note_loss=membership.note_loss,
    )
    metrics = partial(_metrics, membership)
    return StoreWire(
        recipe, membership, source, model=model, optimizers=optimizers, steps=steps, metrics=metrics
    )


def _terms(source: StoredSteps, asked: Configuration, chosen: Recipe, members: Stored) -> dict[str, str]:
    """Settings that all members must share, as texts that a person can compare."""
    facts = asked.fingerprint(chosen, source, device_at(source.device).where)
    named = [*source.module.named_parameters(), *source.module.named_buffers()]
    outer = source.rounds.optimizers.outer
    groups = [len(each["params"]) for each in outer.param_groups]  # rates and momentum come from the run
    sharded = {"ranks per site": f"{source.parts}, by FSDP2"} if source.local.shards is not None else {}
    return {
        **facts,
        **sharded,
        "torch": torch.__version__.partition("+")[0],
        "gradwire version": __version__,
        "parameters and buffers": str([(name, tuple(each.shape), str(each.dtype)) for name, each in named]),
        "outer optimizer": f"{type(outer).__module__}.{type(outer).__qualname__}, groups of {groups}",
        "at_least": str(members.rules.at_least),
    }


class StoreWire(MovingWire):
    """The handle on one model whose rounds go over an object store.

    It is a `MovingWire` without a process group among replicas: what is about exchanges among ranks is
    refused. Of a replica with several ranks, the first one sends and reads all bytes, and tells its losses
    to the others: `gradwire members watch` shows the last one of each replica.
    """

    def __init__(self, recipe: str, membership: StoredMembership, source: StoredSteps, **parts: Any) -> None:
        super().__init__(membership=membership, source=source, **parts)
        self._recipe, self._stored, self._coding = recipe, membership, source

    def __repr__(self) -> str:
        return f"StoreWire({self._recipe}, round {self.rounds}, {len(self.members)} members)"

    def report(self) -> Report:
        """As `MovingWire.report`: bytes are those sent to the store and read from it, per round.

        Example::

            print(wire.report().members)
        """
        told, store = self._stored, self._stored.store
        rounds = max(told.committed, 1)
        dense = 4.0 * sum(spec.numel for spec in self._coding.coded)
        return Report(
            recipe=self._recipe,
            why="as configured",
            step=self.rounds,
            world=max(len(told.now), 1),
            skipped_steps=0,
            dropped_steps=0,
            late=None,
            wire_bytes_per_step=store.sent_bytes / rounds,
            metered_bytes_per_step=store.received_bytes / rounds,
            dense_bytes_per_step=dense,
            compress_s=0.0,
            backward_s=0.0,
            exposed_comm_s=told.waited_s / rounds,
            memory_bytes=self._coding.coder.memory_bytes,
            units=self._coding.coder.units,
            facts=None,
            timeline=[],
            wire_bytes=float(store.sent_bytes),
            members=told.now,
            rounds_committed=told.committed,
            rounds_lost=told.lost,
        )

    def detach(self) -> None:
        """Land what is under way, and leave the others.

        The seal of a last round, with `delay` or after local steps went on without it, is waited for as long
        as others are, `patience_s`. Without one this replica leaves nevertheless, which `events` says; the
        others may still count its offer.

        What was learned since the last round stays with this replica. So call it after a round: then the
        parameters are those that all members share.

        Example::

            wire.detach()
            torch.save(model.state_dict(), "model.pt")
        """
        try:
            self._stored.land_last()
        finally:
            self._local.retire()
            self._stored.close()


def _metrics(membership: StoredMembership) -> dict[str, float]:
    store, rounds = membership.store, max(membership.committed, 1)
    return {
        "gradwire/step": float(membership.rounds),
        "gradwire/members": float(len(membership.now)),
        "gradwire/rounds": float(membership.rounds),
        "gradwire/rounds_lost": float(membership.lost),
        "gradwire/wire_bytes_per_step": store.sent_bytes / rounds,
        "gradwire/received_bytes_per_step": store.received_bytes / rounds,
        "gradwire/requests_per_step": sum(store.requests.values()) / rounds,
        **{f"gradwire/{what}s_per_step": number / rounds for what, number in store.requests.items()},
        "gradwire/waited_s": membership.waited_s,
    }
