"""Ranks of a chaos run: each trains by the plan, notes what befalls it, and goes on from the newest save."""

from __future__ import annotations

import gc
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comm import Round
from gradwire.comm.base import issue_alone
from gradwire.comm.checksums import SealedLayout
from gradwire.comm.process_group import SHORT_BYTES
from gradwire.errors import DAMAGED, GradwireError
from gradwire.exchange.base import Decode
from gradwire.memory import UNSENT, Residual
from gradwire.step.plan import Collectives, ExchangePlan
from gradwire.step.reducer import Reducer
from tests.process import attached_models
from tests.process.attached_models import Made
from tests.soak.plans import Plan
from tests.support.models import batch
from tests.support.ranks import FOLDER

GUARD_EVERY = 20


class Accident(Exception):
    """What an exchange or a memory may raise."""


class WrapperFailed(RuntimeError):
    """A collective of DDP's or FSDP's own failed in a forward pass.

    DDP agrees on its buckets there, before the second one: a rank that is lost then is torch's to tell.
    """


MADE: dict[str, Callable[..., Made]] = {
    "ddp": partial(attached_models.ddp, guard_every=GUARD_EVERY),
    "plain": partial(attached_models.plain, guard_every=GUARD_EVERY),
    "nodes": partial(attached_models.ddp, nodes=attached_models.NODES),
    "hsdp": attached_models.hsdp,
}


class Run:
    """A model with its wire, and books of what was brought, delivered and remembered."""

    def __init__(self, plan: Plan, place: Path) -> None:
        self.plan, self.place, self.rank = plan, place, dist.get_rank()
        self.model, self.optimizer, self.wire = MADE[plan.source](plan.recipe, checksums=plan.checksums)
        self.parameters = list(self.model.parameters())
        self.whole = plan.source != "hsdp"  # else FSDP adds gradients up before a rank has its own
        self.brought = [torch.zeros_like(each, dtype=torch.float64) for each in self._local()]
        self.delivered = [each.clone() for each in self.brought]
        self.largest = 0.0  # norm of what a rank brought to a step together with what it remembered
        self._fresh = [torch.zeros(()) for _ in self.parameters]
        if self.whole:
            for number, parameter in enumerate(self.parameters):
                parameter.register_hook(partial(self._fresh.__setitem__, number))

    def _local(self) -> list[Tensor]:
        return [_local(each) for each in self.parameters]

    @property
    def reducer(self) -> Reducer:
        return self.wire.attached.backward.reducer

    def memory(self) -> list[Tensor]:
        """Copies of what is committed."""
        flat_buffers = [
            flat_buffer for flat_buffer in self.reducer.layout.flat_buffers if UNSENT in flat_buffer.committed
        ]
        return [flat_buffer.committed[UNSENT].clone() for flat_buffer in flat_buffers]

    def note(self, before: list[Tensor]) -> None:
        """A step has counted; `before` is what was remembered when it began."""
        if self.whole:
            norm = torch.cat([each.flatten() for each in self._fresh]).double().norm()
            self.largest = max(self.largest, float(norm) + sum(float(each.norm()) for each in before))
            for parameter, fresh, brought, delivered in zip(
                self.parameters, self._fresh, self.brought, self.delivered, strict=True
            ):
                assert parameter.grad is not None
                brought += fresh.double()
                delivered += parameter.grad.double()

    def save(self) -> None:
        """This rank's parameters and books under the step's name, and then the wire."""
        path = self.place / f"rank-{self.rank}-{self.reducer.step}.pt"
        part = path.with_suffix(".part")
        books = {"brought": self.brought, "delivered": self.delivered, "largest": self.largest}
        torch.save({"parameters": self._local(), **books}, part)
        part.rename(path)
        self.wire.save(self.place / "saved")
        for older in set(self.place.glob(f"rank-{self.rank}-*.pt")) - {path}:
            older.unlink()

    def load(self) -> None:
        """Go on from the newest save, if there is one."""
        step = self.wire.load(self.place / "saved")
        if step is None:
            return
        saved = torch.load(self.place / f"rank-{self.rank}-{step}.pt")
        for mine, theirs in zip(self._local(), saved["parameters"], strict=True):
            mine.copy_(theirs)
        self.brought, self.delivered = saved["brought"], saved["delivered"]
        self.largest = saved["largest"]

    def lost(self) -> dict[str, float] | None:
        """How far what was brought is from what was delivered or is unsent, and the law's tolerance for it.

        `None` where a memory does not keep everything, on purpose. A collective.
        """
        memories = [flat_buffer.memory for flat_buffer in self.reducer.layout.flat_buffers]
        if not self.whole or any(each != Residual(whole=each.whole) for each in memories):
            return None
        unsent = gradwire_mean(self.wire)
        gap = [(b, d, unsent.get(n)) for n, b, d in self._named()]
        apart = torch.zeros((), dtype=torch.float64)
        for brought, delivered, left in gap:
            total = brought.clone()
            dist.all_reduce(total)
            total = total / dist.get_world_size() - delivered
            apart += ((total if left is None else total - left.double()) ** 2).sum()
        largest = torch.tensor(self.largest, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return {"apart": float(apart.sqrt()), "largest": float(largest)}

    def _named(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        module = self.model.module if isinstance(self.model, DistributedDataParallel) else self.model
        names = [name for name, _ in module.named_parameters()]
        yield from zip(names, self.brought, self.delivered, strict=True)

    def digest(self) -> str:
        """A fingerprint of every bit of this rank's parameters."""
        hashed = hashlib.sha256()
        for each in self._local():
            hashed.update(each.contiguous().view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()[:16]


def gradwire_mean(wire: gradwire.Wire) -> dict[str, Tensor]:
    """The mean of all ranks' unsent gradient, by name. A collective."""
    found: dict[str, Tensor] = wire.mean_state_dict()["mean"]["memory"]
    return found


@contextmanager
def flipped(step: int) -> Iterator[None]:
    """Within it, a bit is flipped in what this rank receives: in odd steps in each message, else in one."""
    honest, left = SealedLayout.open, [step % 8]

    def struck(how: SealedLayout, message: Tensor, *arguments: Any) -> tuple[bool, bool]:
        message[0] ^= step % 2 == 1 or left[0] == 0
        left[0] -= 1
        return honest(how, message, *arguments)

    with mock.patch.object(SealedLayout, "open", struck):
        yield


@contextmanager
def accident(reducer: Reducer, where: str) -> Iterator[None]:
    """Within it, the first flat buffer's exchange or memory raises at that place, on this rank.

    A total decoder does not fail: its exchange raises at its start.
    """
    flat_buffer = reducer.layout.flat_buffers[0]
    at_once = where != "decode" or flat_buffer.exchange.laws.total

    def compensate(*_: Any) -> None:
        raise Accident(where)

    def start(honest: Callable[..., Decode], *args: Any) -> Decode:
        if at_once:
            raise Accident(where)
        decode = honest(*args)

        def badly() -> None:
            decode()
            raise Accident(where)

        return badly

    collectives = ExchangePlan.collectives

    def planned(self: ExchangePlan, *args: Any, **named: Any) -> Collectives:
        agreed = collectives(self, *args, **named)
        if self.exchange is not flat_buffer.exchange:
            return agreed
        return replace(agreed, start=partial(start, agreed.start))

    patch: Any
    if where == "compensate":
        patch = mock.patch.object(type(flat_buffer.memory), "compensate", compensate)
    else:
        patch = mock.patch.object(ExchangePlan, "collectives", planned)
    with patch:
        yield


def misfortune(reducer: Reducer, fault: str | None) -> AbstractContextManager[None]:
    """What befalls this rank in a backward pass."""
    if fault == "flip":
        return flipped(reducer.step)
    return accident(reducer, fault) if fault in ("compensate", "encode", "decode") else nullcontext()


def train() -> dict[str, Any]:
    """To the end of the plan, or until the transport breaks: then how, when, and what is remembered."""
    place = Path(os.environ[FOLDER]).parent
    plan = Plan.read(place / "plan.json")
    seen: list[tuple[int, str, str]] = []
    run, before, tried = None, [], -1
    intact = True
    try:
        run = Run(plan, place)
        run.load()
        print(run.reducer.step, flush=True)
        while run.reducer.step < plan.steps:
            before, step = run.memory(), run.reducer.step
            befalls = [
                each.kind for each in plan.inner if each.step == step > tried and each.rank == run.rank
            ]
            tried = max(tried, step)
            outcome = _step(run, befalls[0] if befalls else None)
            if outcome is not None:
                seen.append((step, *outcome))
                intact &= _same(before, run.memory()) and run.reducer.step == step
                continue
            run.note(before)
            run.optimizer.step()
            print(run.reducer.step, flush=True)
            if run.reducer.step % plan.save_every == 0:
                before = []  # of a save that fails, nothing is said
                run.save()
        books = run.lost()
        return {"ended": "well", "seen": seen, "intact": intact, "digest": run.digest(), "lost": books}
    except RuntimeError as error:
        raised_s = time.monotonic()
        if before and run is not None:
            intact &= _same(before, run.memory())
        seen.append((tried, type(error).__name__, str(error)))
        return {"ended": "lost", "seen": seen, "intact": intact, "raised_s": raised_s}


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _step(run: Run, fault: str | None) -> tuple[str, str] | None:
    """One forward and backward pass; why it does not count, if it does not."""
    inputs, targets = batch(run.reducer.step)
    factor = {"nan": torch.nan, "inf": torch.inf}.get(fault or "", 1.0)
    step = run.reducer.step
    run.optimizer.zero_grad()
    try:
        outputs = run.model(inputs)
    except GradwireError:
        raise
    except RuntimeError as error:
        raise WrapperFailed(str(error)) from error
    loss = nn.functional.mse_loss(outputs, targets) * factor
    try:
        with misfortune(run.reducer, fault):
            loss.backward()
    except (Accident, *DAMAGED) as error:
        return type(error).__name__, str(error)
    if run.reducer.step == step:
        grads = [_local(each.grad) for each in run.parameters if each.grad is not None]
        finite = any(bool(each.isfinite().any()) for each in grads)
        return "skipped", "a gradient is finite" if finite else "no gradient is finite"
    return None


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def endure() -> dict[str, Any]:
    """Train for long, save and report now and then, and look at what this process holds."""
    place = Path(os.environ[FOLDER]).parent
    plan = Plan.read(place / "plan.json")
    run = Run(plan, place)
    run.wire.log_to(lambda metrics, step: None, every=10)
    run.wire.attached.worker.call(lambda: _begin_helper(run.reducer))
    samples = []
    for step in range(plan.steps + 1):
        if step % (plan.steps // 40) == 0:
            # Else what is counted would include the objects of a step that the worker has not put away yet.
            run.wire.attached.worker.call(lambda: None)
            samples.append(_held(run.reducer.step))
            print(step, flush=True)
        if step % plan.save_every == 0:
            run.wire.save(place / "saved")
            str(run.wire.report())
        _step(run, None)
        run.optimizer.step()
    return {"samples": samples, "digest": run.digest()}


def _begin_helper(reducer: Reducer) -> None:
    """Send a long message, for which a helper thread waits: gloo calls back for short ones only.

    What is short depends on the link. If that were found slower in mid-run, the helper would begin there.
    """
    for comm in (reducer.comm, reducer.env.control):
        payload = torch.zeros(2 * SHORT_BYTES * comm.world, dtype=torch.uint8)
        issue_alone(comm, Round("all_to_all", payload.numel(), payload.dtype), payload).wait()


def _held(step: int) -> dict[str, float]:
    """Resident memory, threads, open descriptors, and objects that the garbage collector knows."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "step": step,
        "at_s": time.monotonic(),
        "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "objects": len(gc.get_objects()),
    }
