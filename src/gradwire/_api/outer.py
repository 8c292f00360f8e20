"""`outer`: replicas take local steps, and exchange what they have learned by any recipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from gradwire._api.attach import carried
from gradwire._api.configuration import Configuration
from gradwire._api.parts import Steps, Watch
from gradwire._api.rounds import OuterWire, RoundsOfRanks, method_of
from gradwire.arguments import as_python, is_time
from gradwire.recipes import Composition, Recipe
from gradwire.sources.local_optimizers import LocalOptimizers, OuterFactory
from gradwire.sources.local_steps import LocalSteps
from gradwire.sources.unwrap import listed
from gradwire.step.layout import Policy

if TYPE_CHECKING:  # few runs need it
    from typing_extensions import TypeIs

    from gradwire.members import Members, Stored

Where = Literal["host", "device"]


def outer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
    recipe: str | Recipe | Composition = "diloco",
    *,
    replicas: dist.ProcessGroup | DeviceMesh | None = None,
    members: Members | Stored | None = None,
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
      `MovingWire` once this replica has begun with the others (`docs/elastic.md`). With
      `gradwire.members.store(…)` they meet in an object store (`docs/store.md`).
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
    every, delay, guard_every = as_python(every), as_python(delay), as_python(guard_every)
    every_seconds, timeout_s = as_python(every_seconds), as_python(timeout_s)
    refusal: ValueError | None = None
    try:
        _check(every, every_seconds, delay, timeout_s, placement, outer, members, resume)
    except ValueError as error:
        if replicas is None:
            raise
        # Other ranks may have other arguments, and would wait for this one: they hear of it.
        refusal, every, delay, outer = error, 1, 0, None
    travels, default = method_of(recipe)
    make = default if outer is None else outer
    on_host = placement == "host"
    asked = Configuration(
        travels,
        seed=as_python(seed),
        memory_dtype=memory_dtype,
        placement="auto" if on_host else "device",
        nodes=None,
        guard_every=guard_every,
        checksums=as_python(checksums),
    )
    if members is not None:
        if process_group is not None:
            raise ValueError(
                "process_group= is for replicas=: members make groups of their own, anew each time"
            )
        given_: dict[str, Any] = {
            "policy": policy,
            "every": every,
            "delay": delay,
            "resume": resume,
            "every_s": every_seconds,
        }
        if _is_store(members):
            from gradwire._api.stored import stored

            return stored(model, members, optimizer, make, asked, **given_)
        from gradwire._api.moving import moving  # few runs need it

        return moving(model, members, optimizer, make, asked, timeout_s=timeout_s, **given_)
    given = listed(optimizer)
    optimizers = LocalOptimizers(given, make)
    source = LocalSteps(model, replicas, optimizers, every=every, delay=delay, on_host=on_host)
    machine = None if source.grid.machine is None else [source.grid.machine]
    asked = replace(asked, policy=source.weighed(policy), nodes=machine)
    found = carried(asked, source, given, process_group, source.where, refusal=refusal)
    ranks = RoundsOfRanks(found, source)
    return OuterWire(source, optimizers, Steps(lambda: found), Watch(found), ranks)


def _check(
    every: object,
    every_seconds: object,
    delay: object,
    timeout_s: object,
    placement: object,
    outer: object,
    members: object,
    resume: object,
) -> None:
    """Raise `ValueError` for what an argument of `outer` cannot be."""
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r} is not a number of steps, of at least 1")
    if isinstance(delay, bool) or not isinstance(delay, int) or not 0 <= delay < every:
        raise ValueError(
            f"delay={delay!r} is not a number of steps below every={every}: a round lands before the next is "
            "sent"
        )
    if every_seconds is not None and not is_time(every_seconds, sys.float_info.max):
        raise ValueError(f"every_seconds={every_seconds!r} is not a finite time above 0")
    if not is_time(timeout_s):
        raise ValueError(f"timeout_s={timeout_s!r} is not a time above 0, of 10^6 seconds at most")
    if every_seconds is not None and delay:
        raise ValueError(f"every_seconds={every_seconds!r} needs rounds without a delay, not delay={delay!r}")
    if placement not in get_args(Where):
        raise ValueError(f"placement={placement!r} is neither 'host' nor 'device'")
    if outer is not None and not callable(outer):
        raise ValueError(f"outer={outer!r} is not a function that makes an optimizer of parameters")
    if members is not None and not _is_store(members) and not callable(getattr(members, "ask", None)):
        raise ValueError(
            f"members={members!r} finds no replicas: pass gradwire.members.torchft(…), or "
            "gradwire.members.store(…)"
        )
    if resume is not None and not isinstance(resume, str | os.PathLike):
        raise ValueError(f"resume={resume!r} is not the folder of a save")
    if members is None and (resume is not None or every_seconds is not None):
        raise ValueError(
            "resume= and every_seconds= are for members=; with replicas=, call wire.load(folder)"
        )


def _is_store(members: object) -> TypeIs[Stored]:
    """True for what `gradwire.members.store` returns. Few runs import it."""
    loaded = sys.modules.get("gradwire.members")
    return loaded is not None and isinstance(members, loaded.Stored)
