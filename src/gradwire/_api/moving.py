"""`outer(members=…)`: replicas that come and go; `MovingWire`."""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gradwire._api.attach import carried
from gradwire._api.configuration import Configuration
from gradwire._api.parts import Attached, Steps, lacking
from gradwire._api.report import Report
from gradwire._api.rounds import OuterWire
from gradwire.checkpoint import file_set
from gradwire.comm import ProcessGroupComm
from gradwire.comm.apart import alone
from gradwire.comm.groups import carries_cpu
from gradwire.members import Event, Members
from gradwire.members.membership import Asks, Leaving, Membership, Running
from gradwire.members.site import Site
from gradwire.members.steps import MovingSteps
from gradwire.placement import device_at, through_a_device
from gradwire.sources.local_optimizers import LocalOptimizers, OuterFactory
from gradwire.sources.local_steps import LocalSteps
from gradwire.sources.observe import hold
from gradwire.sources.unwrap import optimizers_of
from gradwire.step.layout import Policy
from gradwire.version import __version__

if TYPE_CHECKING:
    from gradwire.members.bucket.member import StoredMembership

_HELD: weakref.WeakSet[Any] = weakref.WeakSet()
"""Members that had a wire."""


def moving(
    model: nn.Module,
    members: Members,
    optimizer: object,
    make: OuterFactory,
    asked: Configuration,
    *,
    policy: Policy | None,
    every: int,
    delay: int,
    timeout_s: float,
    resume: str | os.PathLike[str] | None,
    every_s: float | None,
) -> MovingWire:
    """Make a wire whose rounds are among `members`. Returns when this replica has met the others and begun.

    Args:
        model: the replica's model; its shared parameters are those of the others afterwards.
        members: finds the other replicas. They had no wire yet.
        optimizer: steps the replica's own parameters.
        make: makes the outer optimizer.
        asked: options of `attach`.
        policy: the recipe per parameter, or None.
        every: local steps from one round to the next.
        delay: local steps from the sending of a round to its landing.
        timeout_s: longest time of the first exchange, and of healing.
        resume: folder of a save to start from.
        every_s: seconds from one round to the next; None counts steps alone.

    Raises `ValueError` if the members had a wire, and what the first meeting raises.
    """
    if members in _HELD:
        raise ValueError("these members had a wire: make new ones for another, also after detach()")
    optimizers = LocalOptimizers(optimizer, make)
    source = MovingSteps(
        model,
        getattr(members, "group", None) or alone(),
        optimizers,
        every=every,
        delay=delay,
        on_host=asked.placement != "device",
        name=members.name,
    )
    asked = replace(asked, policy=source.weighed(policy))
    source.check_policy()  # before it is asked
    asked = asked.answered(source)
    source.check_alone()

    def carry(machine: Sequence[int] | None) -> Running:
        nodes = None if machine is None else [machine]
        found = carried(replace(asked, nodes=nodes), source, None, None, source.where)
        return Running(found.backward, found.worker, found.stop)

    site = site_of(source)
    terms = _terms(source, asked)
    asks = Asks(members, site)
    membership = Membership(asks, source, site, terms, carry, timeout_s=timeout_s, every_s=every_s)
    hold(model, asks)
    hold(model, Leaving(asks.close))
    weakref.finalize(model, membership.close)
    try:
        if resume is not None:
            saved = file_set.kept(site.comm, Path(resume))
            membership.load(saved) if saved is not None else None
        membership.join()
    except BaseException:  # plain training goes on, or another call of `outer`
        source.retire()
        membership.close()
        raise
    _HELD.add(members)

    def now() -> Attached:
        running = membership.running
        assert running is not None, "this replica has begun"
        return Attached(model, source, running.backward, None, running.worker, running.stop)

    return MovingWire(
        model, membership, source, optimizers, Steps(now), partial(_metrics, membership, source)
    )


def site_of(source: MovingSteps) -> Site:
    """The ranks of this replica."""
    inside = source.local.inside
    if inside is None:
        return Site(ProcessGroupComm(alone()))
    comm = ProcessGroupComm(inside)
    return Site(comm if carries_cpu(inside) else through_a_device(comm, source.where))


def _save(membership: Membership | StoredMembership, folder: str | os.PathLike[str]) -> int:
    """Save this replica, one file per rank: a folder of its own, for `outer(…, resume=folder)`."""
    file_set.keep(membership.site.comm, Path(folder), membership.save)
    return membership.rounds


def _metrics(membership: Membership, source: LocalSteps) -> dict[str, float]:
    from gradwire.telemetry.metrics import metrics_of

    assert membership.running is not None, "a round has landed"
    return metrics_of(membership.running.backward, source, 1.0) | {
        "gradwire/members": float(len(membership.now)),
        "gradwire/rounds": float(membership.rounds),
        "gradwire/rounds_lost": float(membership.lost),
    }


def _terms(source: MovingSteps, asked: Configuration) -> dict[str, str]:
    """Settings that all members must share, as texts that a person can compare."""
    chosen = asked.validated(source)
    facts = asked.fingerprint(chosen, source, device_at(source.device).where)
    outer, module = source.rounds.optimizers.outer, source.module
    groups = [len(group["params"]) for group in outer.param_groups]
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {
        "torch": torch.__version__.partition("+")[0],
        "gradwire": __version__,
        "recipe": str(chosen),
        "model": digest([facts[key] for key in ("parameter names", "parameter shapes", "parameter dtypes")]),
        "types": " ".join(sorted({str(each.dtype).removeprefix("torch.") for _name, each in tensors})),
        "parameters and buffers": digest(
            sorted((name, tuple(each.shape), str(each.dtype), each.requires_grad) for name, each in tensors)
        ),
        "outer optimizer": f"{type(outer).__module__}.{type(outer).__qualname__}, groups of {groups}",
        "settings": digest(sorted(facts.items())),
    }


def digest(facts: object) -> str:
    return hashlib.blake2b(repr(facts).encode(), digest_size=6).hexdigest()


def for_fixed(call: str, instead: str) -> str:
    return f"{call} is for a fixed set of replicas, and members= has others: {instead}"


_OF_MEMBERS: Mapping[str, str] = {
    "switch": for_fixed("switch()", "start all members with the recipe"),
    "state_dict": for_fixed("state_dict()", "call save(folder)"),
    "mean_state_dict": for_fixed("mean_state_dict()", "call save(folder)"),
    "load_state_dict": for_fixed("load_state_dict()", "pass outer(…, resume=folder)"),
    "load": for_fixed("load()", "pass outer(…, resume=folder), so that members hear of it before they meet"),
    "exact": for_fixed("exact()", "no parameters are rounded"),
    "diagnose": for_fixed("diagnose()", "diagnose a run of one replica"),
    "watching": for_fixed("watching", "diagnose a run of one replica"),
    "join": for_fixed("join()", "members need not make as many steps"),
}
"""The calls that need all replicas at once: members come and go."""


class MovingWire(OuterWire):
    """The handle on one model whose replicas come and go.

    It is an `OuterWire`, whose calls for all ranks are for the ranks of this replica only: other members need
    not make them. Each replica saves in a folder of its own, and `gradwire.outer(…, resume=folder)` goes on
    from it, with any number of other members. Means and times of `report()` are about rounds since the
    members last connected; its sums, such as `wire_bytes`, are over all rounds.
    """

    def __init__(
        self,
        model: nn.Module,
        membership: Membership | StoredMembership,
        source: MovingSteps,
        optimizers: LocalOptimizers,
        steps: Steps,
        metrics: Callable[[], dict[str, float]],
    ) -> None:
        watch = lacking(_OF_MEMBERS, watching=False, diagnosis=None)
        ranks = lacking(_OF_MEMBERS, save=partial(_save, membership))
        super().__init__(source, optimizers, steps, watch, ranks)
        self._model, self._membership, self._metrics = model, membership, metrics

    @property
    def events(self) -> Sequence[Event]:
        """Members that joined, left, were healed, and rounds that failed or were given up, oldest first."""
        return tuple(self._membership.events)

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the members of the last round."""
        return self._membership.now

    @property
    def rounds(self) -> int:
        """The rounds that have landed in the shared parameters, of this member and before it came."""
        return self._membership.rounds

    def report(self) -> Report:
        """As `Wire.report`, with the members, and how many rounds were committed and lost.

        Example::

            print(wire.report().members)
        """
        told = self._membership
        return replace(
            super().report(), members=told.now, rounds_committed=told.committed, rounds_lost=told.lost
        )

    def metrics(self) -> dict[str, float]:
        """As `Wire.metrics`, with `gradwire/members`, `gradwire/rounds` and `gradwire/rounds_lost`.

        Example::

            wandb.log(wire.metrics())
        """
        return self._metrics()

    def log_to(self, target: Any, *, every: int = 1) -> None:
        """As `Wire.log_to`, when each `every`-th round has landed.

        Example::

            wire.log_to(SummaryWriter())
        """
        from gradwire.telemetry.targets import Listener, write_to

        write = write_to(target, self._membership.site.rank)
        listener = Listener(self._metrics, write, every)
        hold(self._model, listener)
        self._membership.listeners.append(weakref.ref(listener))

    def detach(self) -> None:
        """Land what is under way, and leave the others. For all ranks of this replica.

        What was learned since the last round stays with this replica, and what was not sent is dropped. So
        call it after a round: then the parameters are those that all members share.

        Example::

            wire.detach()
            torch.save(model.state_dict(), "model.pt")
        """
        self._local.land_now()
        self._local.retire()
        self._membership.close()

    def switch_optimizer(self, optimizer: Any) -> None:
        """Let another optimizer make the local steps from now on. For all ranks of this replica.

        Raises `ValueError` for optimizers that `outer` would refuse.

        Example::

            wire.switch_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        """
        optimizers = optimizers_of(optimizer)
        self._local.applying(optimizers)
        self._local.attempts.change(optimizers)
