"""`outer`: replicas take local steps, and exchange what they have learned by any recipe; `OuterWire`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire._api.attach import carried
from gradwire._api.configuration import Configuration
from gradwire._api.unwrap import Optimizers
from gradwire._api.wire import Attached, Wire
from gradwire.errors import GradwireError
from gradwire.recipes import Composition, Recipe
from gradwire.recipes import recipe as parsed
from gradwire.sources.outer import LocalSteps, OuterFactory
from gradwire.step.layout import Policy

if TYPE_CHECKING:  # few runs need it
    from gradwire.members import Members

Where = Literal["host", "device"]

_diloco: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
"""Douillard et al. 2023: the outer optimizer of DiLoCo."""


_NO_RESULT = "the last round ended without a result, as something was not finite"


@dataclass(frozen=True)
class Method:
    """A published method: its recipe, and its outer optimizer."""

    recipe: str
    outer: OuterFactory


METHODS: dict[str, Method] = {
    "diloco": Method("dense", _diloco),
    "sparseloco": Method("sparseloco", partial(torch.optim.SGD, lr=1.0)),
}
"""By the names that `outer` knows; any other recipe has the outer optimizer of DiLoCo."""


def outer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    recipe: str | Recipe | Composition = "diloco",
    *,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    members: Members | None = None,
    every: int = 30,
    every_seconds: float | None = None,
    outer: OuterFactory | None = None,
    delay: int = 0,
    policy: Policy | None = None,
    seed: int = 0,
    process_group: dist.ProcessGroup | None = None,
    memory_dtype: torch.dtype | None = None,
    placement: Where = "host",
    checksums: bool = False,
    guard_every: int = 0,
    timeout_s: float = 600.0,
    resume: str | os.PathLike[str] | None = None,
) -> OuterWire:
    """Let replicas train by themselves, and average what they have learned every `every` steps. A collective.

    `docs/local-steps.md` has the formulas, and says what is exchanged, when, and between which ranks. All
    ranks begin with the parameters and buffers of the first. A round runs inside `optimizer.step()`.

    - `optimizer`: one or several that step the parameters of `model`. Their steps are counted.
    - `recipe`: "diloco", or any recipe that `attach` takes and that neither measures first nor reads the
      optimizer's state.
    - `replicas`: the ranks that average: a process group, or a mesh dimension. With DDP or FSDP2 inside a
      machine, the ranks that have the same place in each machine.
    - `members`: instead of `replicas`, replicas that come and go, such as `gradwire.members.torchft(…)`. Each
      replica is a job of its own, and its ranks are those of DDP's or FSDP2's process group. Returns a
      `MovingWire` once this replica has begun with the others (`docs/elastic.md`).
    - `every`: attempted steps from round to round.
    - `every_seconds`: with `members`, let about so many seconds pass from round to round. Each replica makes
      as many steps as it can, and counts for as much. `every` is then how many steps the first round has, and
      the number of steps that counts as one.
    - `outer`: a function that makes the outer optimizer of the list of parameters that it is given. By
      default that of DiLoCo: SGD at a rate of 0.7 with Nesterov momentum 0.9.
    - `delay`: the result of a round lands that many steps later, and training goes on meanwhile. It must be
      below `every`.
    - `placement`: where shared parameters, memory and codecs are: on the "host", or on the "device" of the
      parameters.
    - `policy`, `seed`, `process_group`, `memory_dtype`, `checksums`: as for `attach`.
    - `guard_every`: every `guard_every` rounds, compare a checksum of the shared parameters over ranks.
    - `timeout_s`: with `members`, how long the first exchange and healing may take, in seconds. Later ones
      have three times as long as the longest of the last ones took, and at least 10 s.
    - `resume`: with `members`, the folder of a `wire.save` of this replica to go on from, if there is one.

    Raises `ValueError` if an argument is wrong, and `RanksDisagree`, on all ranks, if they differ in it.
    Later, a round raises its errors from `optimizer.step()`.

    Example::

        optimizer = torch.optim.AdamW(module.parameters())
        wire = gradwire.outer(module, optimizer, "diloco", every=30, replicas=dist.group.WORLD)
        for batch in loader:
            optimizer.zero_grad()
            loss(module(batch)).backward()
            optimizer.step()
        wire.detach()
    """
    if (replicas is None) == (members is None):
        raise ValueError(
            "pass either replicas=, the ranks that average, or members=, replicas that come and go"
        )
    if members is None and not dist.is_initialized():
        raise ValueError("no process group: call torch.distributed.init_process_group first")
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r} is not a number of steps, of at least 1")
    if isinstance(delay, bool) or not isinstance(delay, int) or not 0 <= delay < every:
        raise ValueError(
            f"delay={delay!r} is not a number of steps below every={every}: one lands before the next leaves"
        )
    if every_seconds is not None and not (every_seconds > 0 and delay == 0):
        raise ValueError(f"every_seconds={every_seconds!r} is a time above 0, without a delay")
    if placement not in get_args(Where):
        raise ValueError(f"placement={placement!r} is neither 'host' nor 'device'")
    travels, default = _method(recipe)
    make = outer or default
    on_host = placement == "host"
    asked = Configuration(
        travels,
        seed=seed,
        memory_dtype=memory_dtype,
        placement="auto" if on_host else "device",
        nodes=None,
        guard_every=guard_every,
        checksums=checksums,
    )
    if members is not None:
        if process_group is not None:
            raise ValueError(
                "process_group= is for replicas=: members make groups of their own, anew each time"
            )
        from gradwire._api.moving import moving  # few runs need it

        return moving(
            model,
            members,
            optimizer,
            make,
            asked,
            policy=policy,
            every=every,
            delay=delay,
            timeout_s=timeout_s,
            resume=resume,
            every_s=every_seconds,
        )
    if resume is not None or every_seconds is not None:
        raise ValueError(
            "resume= and every_seconds= are for members=; with replicas=, call wire.load(folder)"
        )
    source = LocalSteps(model, replicas, optimizer, make, every=every, delay=delay, on_host=on_host)
    machine = None if source.machine is None else [source.machine]
    asked = replace(asked, policy=source.weighed(policy), nodes=machine)
    return OuterWire(carried(asked, source, optimizer, process_group, source.where))


def _method(recipe: str | Recipe | Composition) -> tuple[str | Recipe | Composition, OuterFactory]:
    """The recipe that travels, and its outer optimizer, for a recipe as `outer` is given it."""
    if isinstance(recipe, str) and recipe.strip() in METHODS:
        method = METHODS[recipe.strip()]
        return method.recipe, method.outer
    try:
        name = parsed(recipe).name
    except ValueError:  # which all ranks will hear of
        name = ""
    return recipe, METHODS[name].outer if name in METHODS else _diloco


class OuterWire(Wire):
    """The handle on one model of which replicas take local steps. Its methods are for the training thread.

    It is a `Wire` whose steps are rounds. Calls for all ranks may be made between any two attempted steps,
    the same on all ranks.
    """

    def __init__(self, attached: Attached) -> None:
        super().__init__(attached)
        assert isinstance(attached.source, LocalSteps), "made for it"
        self._local = attached.source

    def _change(self, optimizers: Optimizers) -> None:
        self._local.change(optimizers)

    @property
    def attempts(self) -> int:
        """Attempted steps so far: those that an optimizer made, and those that were left out."""
        return self._local.attempts.count

    @property
    def outer_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer of the shared parameters; a schedule of its rate must be the same on all ranks."""
        return self._local.outer

    def shared_parameters(self) -> AbstractContextManager[None]:
        """Within it the model has the shared parameters, as they were after the last round, for evaluation.

        Afterwards this replica's own are put back, bit for bit. It sends nothing.

        Example::

            with wire.shared_parameters(), torch.no_grad():
                evaluate(model)
        """
        return self._local.showing_shared()

    @contextmanager
    def join(self) -> Iterator[None]:
        """Within it, replicas may attempt different numbers of steps. A collective at its end.

        A replica that has finished takes part in the others' rounds. When all have finished, all have landed
        the last round, and have the same parameters.

        Example::

            with wire.join():
                for batch in loader:
                    train_one_step(batch)
        """
        yield
        local = self._local
        local.arrive_now()
        all_finished: bool | None = False
        while not all_finished:
            local.leave(finished=True)
            lands, all_finished = local.receive()
            if all_finished is None:
                raise GradwireError(_NO_RESULT)
            if lands:
                local.conclude()
        local.attempts.forget(-(-local.attempts.count // local.every) * local.every)

    def drop_step(self) -> None:
        """Leave this step out: call it after `backward()`, instead of `optimizer.step()`.

        It counts as attempted, and so may run a round. Other replicas need not leave theirs out. Raises
        `ValueError` if no gradient waits for an optimizer.

        Example::

            loss = loss_of(batch)
            loss.backward()
            if loss.isfinite():
                optimizer.step()
            else:
                wire.drop_step()
            optimizer.zero_grad()
        """
        self._local.attempts.drop()

    def state_dict(self, kind: Literal["rank", "mean"] = "rank") -> dict[str, Any]:
        """As `Wire.state_dict`, with this replica's parameters and optimizers. Waits for a round under way.

        Example::

            torch.save(wire.state_dict(), f"wire-{rank}.pt")
        """
        self._backward.rest()
        return super().state_dict(kind)

    def switch(self, recipe: str | Recipe | Composition) -> None:
        """Change the recipe, from the next round on. A collective. What is unsent is kept.

        The outer optimizer stays.

        Raises what `Wire.switch` raises.

        Example::

            wire.switch("int4")
        """
        travels, _outer = _method(recipe)
        super().switch(travels)

    def flush(self) -> None:
        """Not for local steps: raises `ValueError`. `detach` sends what is unsent."""
        raise ValueError(
            "flush() adds to gradients, which replicas keep to themselves here: detach() sends what is unsent"
        )

    def detach(self) -> None:
        """Land what is under way, make a last round that sends all that is unsent, and stop. A collective.

        All replicas end with the shared parameters of that round, and then train by themselves.

        Example::

            wire.detach()
            torch.save(model.state_dict(), "model.pt")
        """
        local = self._local
        local.arrive_now()
        self._backward.together("detach()", local.agree)
        lands = local.has_learned
        if lands:
            local.leave()
            _lands, all_finished = local.receive()
            if all_finished is None:
                raise GradwireError(_NO_RESULT)
        lands |= not self._engine.layout.is_plain
        retired = self._flush("detach()", self._engine.retired)
        self._backward.call(lambda: self._engine.restore(retired))
        if lands:
            local.conclude()
        local.moor()
        local.retire()

    def log_to(self, target: Any, *, every: int = 1) -> None:
        """As `Wire.log_to`, at the end of each `every`-th round.

        Example::

            wire.log_to(SummaryWriter())
        """
        super().log_to(target, every=every)
