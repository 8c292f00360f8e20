"""The traffic of one model under FSDP2: gathers and scatters, memory, and the steps that it counts."""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from gradwire.sources.fsdp.coding import GATHERS, Scattering
from gradwire.sources.fsdp.comms import Account, ParameterGather, Scatter, reduce_scatter
from gradwire.sources.fsdp.held import Held, Verdict
from gradwire.sources.fsdp.memory import Unsent
from gradwire.sources.fsdp.modules import ShardedModule, begin_anew
from gradwire.sources.fsdp.routes import Routes, targets_of
from gradwire.sources.nodes.members import NodeTable
from gradwire.sources.observe import Entrance, remove
from gradwire.step.optimizer_log import OptimizerLog
from gradwire.unit.context import Fates
from gradwire.untraced import untraced

_LOG = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Wished:
    """The bits of scatters and gathers: `gather` is `None`, "bf16", "int8" or "exact"."""

    scattering: Scattering
    gather: str | None = None

    @property
    def is_coded(self) -> bool:
        """True if gradients or parameters are sent in fewer bits than torch would send."""
        return self.scattering.coding is not None or self.gather is not None


_UNCODED = Wished(Scattering("dense"))


@dataclass
class _Awaited:
    """Sent once all ranks have the kernels: the codings, and the memory and held parameters of modules."""

    wished: Wished
    memory: Sequence[Unsent | None]
    held: Sequence[Held | None]
    all_have_kernels: Callable[[], bool]
    is_due: bool = False


class Traffic:
    """All gathers and scatters of one model, from `install` until `remove`.

    Only the thread that trains calls its methods, between steps. FSDP2 calls the gathers and scatters.
    """

    def __init__(
        self,
        modules: Sequence[ShardedModule],
        wished: Wished,
        optimizer_log: OptimizerLog,
        *,
        nodes: NodeTable | None = None,
        why_flat: str = "",
        loss_scale: Callable[[], Tensor | None] = lambda: None,
        seed: int = 0,
        memory_dtype: torch.dtype | None = None,
        can_go_back: bool = True,
        held_on_host: bool = False,
        guard_every: int = 0,
    ) -> None:
        """Prepare all gathers and scatters; `install` begins them.

        Args:
            modules: the modules under `fully_shard`.
            wished: the bits of scatters and gathers.
            optimizer_log: follows the steps of the optimizers.
            nodes: those of the mesh's ranks, if several share one: coded traffic then uses two levels, once
                `routes` has groups for that.
            why_flat: the reason if ranks share nodes that do not suit two levels.
            loss_scale: called once per backward pass; it must not wait for a device.
            seed: seed of stochastic rounding.
            memory_dtype: type of the unsent gradient; `None` means float32.
            can_go_back: whether the earlier memory is kept until it is known whether optimizers have used a
                scatter.
            held_on_host: whether gathered parameters that are held lie on the host, if a device computes.
            guard_every: gathers with changes after which the next one compares what is held; 0 means never.
        """
        self.modules, self.wished, self.optimizer_log = tuple(modules), wished, optimizer_log
        self.group: dist.ProcessGroup = modules[0].received()[0]
        self.nodes, self.why_flat = nodes, why_flat
        self.targets = targets_of(nodes, self.group.rank(), self.group.size())
        """Ranks for which this rank encodes gradients."""
        self.step = self.dropped = 0
        """Number of steps begun, less the dropped ones; and the number of dropped ones."""
        self.ended: list[Callable[[], None]] = []
        """Called at the end of each backward pass with scatters."""
        self.routes = Routes()
        self.draws = 0
        """Numbers drawn so far, for stochastic rounding."""
        self.can_go_back = can_go_back
        self._seed, self._memory_dtype = seed, memory_dtype
        self._held_on_host, self._guard_every = held_on_host, guard_every
        self._loss_scale = loss_scale
        self._scale: Tensor | None = None
        self._at_end: Callable[[], object] = _nothing
        """The callback at the end of the running backward pass, which is gone when that has ended."""
        self._has_scattered = False
        """True if the running backward pass has scattered."""
        self._is_new = True
        """True until a backward pass that scatters has ended."""
        self._hooks: list[RemovableHandle] = []
        self._is_open = self._is_counted = False
        self._earlier_bytes = 0.0
        """Bytes sent before the last change of codings."""
        self._original = [(each.collectives, each.forces_sums) for each in modules]
        self._verdict = Verdict([each.label for each in modules], self._break_off)
        self._is_broken_off = False
        """True from an error that all ranks raise in a pass, until the next pass."""
        self._awaited: _Awaited | None = None
        told = set[str]()
        self.gathers = [
            ParameterGather(each, self.routes, GATHERS[wished.gather], wished.gather or "", told)
            for each in modules
        ]
        self.scatters = [
            Scatter(each, self.routes, wished.scattering, self._begins, self._key) for each in modules
        ]

    # -- taking over, changing, and giving back

    def memory_bytes(self, scattering: Scattering) -> int:
        """Bytes that a rank needs for the unsent gradient under `scattering`."""
        if not scattering.feedback:
            return 0
        rows = len(self.targets) * (1 + self.can_go_back)
        elements = sum(each.elements[place] for each in self.modules for place in each.trained())
        return rows * elements * (self._memory_dtype or torch.float32).itemsize

    def held_bytes(self, wished: Wished) -> int:
        """Bytes that a rank needs for gathered parameters that are held under `wished`."""
        if wished.gather != "exact":
            return 0
        return sum(2 * len(self.targets) * sum(each.elements) for each in self.modules)

    def make_held(self, wished: Wished) -> list[Held | None]:
        """Allocate, unless it is there already, what each module holds of gathered parameters under `wished`.
        May run out of memory; changes nothing.
        """
        if wished.gather != "exact":
            return [None] * len(self.modules)
        parts = zip(self.modules, self._kept[1], strict=True)
        return [held or self._held(number, each) for number, (each, held) in enumerate(parts)]

    def _held(self, number: int, of: ShardedModule) -> Held:
        where = of.group.device
        place = torch.device("cpu") if self._held_on_host else where
        size = len(self.targets), sum(of.elements)
        is_pinned = self._held_on_host and where.type != "cpu"
        [dtype] = of.gathered_types
        values = torch.zeros(size, dtype=dtype, device=place, pin_memory=is_pinned)
        return Held(values, number, self._verdict, where, self._guard_every)

    def make_room(self, scattering: Scattering, saved: Container[str] = frozenset()) -> list[Unsent | None]:
        """Allocate a memory for each module that has none, if `scattering` needs it or one was `saved`.

        May run out of memory; changes nothing.
        """
        room: list[Unsent | None] = []
        for each, unsent in zip(self.modules, self._kept[0], strict=True):
            if scattering.feedback or any(name in saved for name in each.names):
                room.append(unsent or self._unsent(each))
            else:
                room.append(None if self.awaits_kernels else unsent)  # nothing is in it yet
        return room

    @property
    def _kept(self) -> tuple[Sequence[Unsent | None], Sequence[Held | None]]:
        """Memory and held parameters of each module, also while kernels are awaited."""
        if (awaited := self._awaited) is not None:
            return awaited.memory, awaited.held
        return [each.unsent for each in self.scatters], [each.held for each in self.gathers]

    def _unsent(self, of: ShardedModule) -> Unsent | None:
        trained = of.trained()
        if not trained:
            return None
        bounds = accumulate((of.elements[place] for place in trained), initial=0)
        columns = {
            of.names[place]: slice(*bound) for place, bound in zip(trained, pairwise(bounds), strict=True)
        }
        dtype, device = self._memory_dtype or torch.float32, of.device
        world, how = self.group.size(), self.can_go_back
        return Unsent(columns, self.targets, world, dtype, device, can_go_back=how)

    def install(
        self,
        model: nn.Module,
        memory: Sequence[Unsent | None],
        held: Sequence[Held | None],
        all_have_kernels: Callable[[], bool] | None = None,
    ) -> None:
        """Carry the traffic of `model` from now on, with `memory` from `make_room` and `held` from
        `make_held`.

        With `all_have_kernels`, a collective over all ranks, everything travels uncoded at first. Each
        backward pass asks it. Once it was true, the next forward pass that trains begins with what was
        wished.
        """
        wished = self.wished
        if all_have_kernels is None:
            self.change(wished, memory, held)
        else:
            none = [None] * len(self.modules)
            self.change(_UNCODED, none, none)
            self._awaited = _Awaited(wished, memory, held, all_have_kernels)
        entrance = Entrance(model, self._entered)

        @untraced
        def shown(_model: nn.Module, _inputs: Any, outputs: Any) -> None:
            entrance.show(outputs)

        @untraced
        def begun(_model: nn.Module, _inputs: Any) -> None:
            if self._is_broken_off:
                self._is_broken_off = False
                begin_anew(model)
            if torch.is_grad_enabled():  # a reference pass scatters nothing, whatever is frozen in it
                # All ranks have passes that train. One computed again within a backward pass waits.
                if self._awaited is not None and self._awaited.is_due and self._at_end() is None:
                    self.begin_awaited()
                for scatter in self.scatters:
                    scatter.refuse_others()

        # Before FSDP2's own hook, which gathers.
        before = model.register_forward_pre_hook(begun, prepend=True)
        self._hooks = [before, model.register_forward_hook(shown)]
        for each, gather, scatter in zip(self.modules, self.gathers, self.scatters, strict=True):
            each.module.set_custom_all_gather(gather)
            each.module.set_custom_reduce_scatter(scatter)

    def change(self, wished: Wished, memory: Sequence[Unsent | None], held: Sequence[Held | None]) -> None:
        """Send something else from now on. All modules gather anew."""
        self.roll_back_unused()
        self._awaited = None
        self.wished, self._earlier_bytes = wished, self.sent_bytes
        for account in self._accounts:
            account.begin_anew()
        parts = zip(self.modules, self.gathers, self.scatters, memory, held, self._original, strict=True)
        for each, gather, scatter, unsent, kept, (_collectives, forced) in parts:
            each.reshard()
            gather.finish()
            gather.held = kept
            gather.coding, gather.name = GATHERS[wished.gather], wished.gather or ""
            scatter.scattering, scatter.unsent = wished.scattering, unsent
            # Any factor by which FSDP2 divides is then a division of the sum, which it makes itself.
            is_coded = wished.scattering.coding is not None
            each.module.set_force_sum_reduction_for_comms(forced or is_coded)

    def begin_awaited(self) -> None:
        """Send from now on what kernels were awaited for, if they were."""
        if (awaited := self._awaited) is not None:
            self.change(awaited.wished, awaited.memory, awaited.held)

    @property
    def asked(self) -> Wished:
        """The bits that are sent, or will be once there are kernels."""
        return self.wished if self._awaited is None else self._awaited.wished

    @property
    def awaits_kernels(self) -> bool:
        """True while everything travels uncoded, until there are kernels."""
        return self._awaited is not None

    def remove(self) -> None:
        """Let FSDP2 carry its traffic itself."""
        self._awaited = None
        remove(self._hooks)
        parts = zip(self.modules, self.gathers, self.scatters, self._original, strict=True)
        for each, gather, scatter, ((own_gather, own_scatter), forced) in parts:
            each.reshard()
            gather.finish()
            gather.held = scatter.unsent = None
            each.module.set_custom_all_gather(own_gather)
            each.module.set_custom_reduce_scatter(own_scatter)
            each.module.set_force_sum_reduction_for_comms(forced)
        self.routes.close()

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Within it, all modules gather parameters unrounded. Where they do so anyway, nothing changes."""
        if self.wished.gather == "exact":
            yield
            return
        self._gather_anew(unrounded=True)
        try:
            yield
        finally:
            self._gather_anew(unrounded=False)

    def _gather_anew(self, *, unrounded: bool) -> None:
        for each, gather in zip(self.modules, self.gathers, strict=True):
            each.reshard()
            gather.is_unrounded = unrounded

    def _break_off(self, is_at_one_place: bool) -> None:
        """Let all ranks gather all modules anew, and drop in the next pass what is left of this one.

        Ranks that are at one place of it have the same gathers in flight, and end them in one order. What
        these would tell of the pass is told already.
        """
        self._is_broken_off = True
        for each, gather in zip(self.modules, self.gathers, strict=True):
            if is_at_one_place:
                with suppress(Exception):
                    gather.finish()
            each.forget_gather()

    # -- in a backward pass

    def _entered(self) -> None:
        """Note that a backward pass enters the model. A reentrant checkpoint nests others in it, which belong
        to it.

        Only autograd keeps the callback, and drops it if the pass breaks off.
        """
        if self._at_end() is None:
            end = partial(self._pass_ended)
            self._at_end, self._has_scattered = weakref.ref(end), False
            queue = Variable._execution_engine.queue_callback
            queue(partial(queue, end))  # after FSDP2's own, which may scatter, too

    def _begins(self) -> Tensor | None:
        """Begin a scatter; returns the loss scale of its backward pass. The first one rolls back unused
        earlier steps.
        """
        self._verdict.settle(self.routes.over(self.group), self.modules[0].device)
        self._entered()  # where no output of the model leads to it
        if not self._has_scattered:
            self._has_scattered = True
            self.optimizer_log.backward_begins(exchanges=True)
            fates = self.roll_back_unused()
            goes_on = fates is not None and not fates.made and bool(fates.open)
            self.step += not goes_on
            self._is_counted = True
            self.optimizer_log.exchange_begins(fates, compresses=self.wished.scattering.coding is not None)
            if self._awaited is not None and not self._awaited.is_due:
                self._awaited.is_due = self._awaited.all_have_kernels()
            self._scale = self._loss_scale()
        return self._scale

    def _pass_ended(self) -> None:
        if not self._has_scattered:
            return
        if self._is_new:
            self._is_new = False
            for scatter in self.scatters:
                scatter.first_pass_ended()
        self.optimizer_log.exchange_ended()
        for each in self.ended:
            each()

    def _key(self) -> int:
        """A number for stochastic rounding that no other scatter has, on any rank."""
        self.draws += 1
        text = f"{self._seed} {self.group.rank()} {self.draws}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1

    # -- between steps

    def go_on(self, step: int, draws: int) -> None:
        """Resume a saved run: optimizers have made `step` steps, and `draws` random keys were drawn."""
        self.step, self.draws = step, draws
        self._is_open = self._is_counted = False

    def roll_back_unused(self) -> Fates | None:
        """Take gradients that no optimizer has used since the last scatters back out of the memory. Returns
        their fates; `None` if all are final.
        """
        fates = self.optimizer_log.fates()
        for scatter in self.scatters:
            if (unsent := scatter.unsent) is not None:
                unsent.roll_back(fates)
                if unsent.is_done and not scatter.scattering.feedback:
                    scatter.unsent = None
        self._is_open = fates is not None and not fates.made and bool(fates.open)
        if fates is None:
            return None
        is_dropped = self._is_counted and not fates.made and not fates.open
        if is_dropped:
            self.step, self.dropped, self._is_counted = self.step - 1, self.dropped + 1, False
        self.optimizer_log.rolled_back(fates, is_dropped=is_dropped)
        return fates

    def up_to_date(self) -> None:
        """Count the optimizer steps made so far, and roll back the unsent gradient of steps whose gradients
        no optimizer has used.
        """
        self.optimizer_log.note_cleared()
        self.roll_back_unused()

    @property
    def made(self) -> int:
        """Steps that an optimizer has made."""
        return self.step - self._is_open

    @property
    def unsent(self) -> Iterator[tuple[ShardedModule, Unsent]]:
        """The modules that remember, with their memory."""
        for each, scatter in zip(self.modules, self.scatters, strict=True):
            if scatter.unsent is not None:
                yield each, scatter.unsent

    @property
    def unsent_bytes(self) -> int:
        """Bytes of memory for the unsent gradient, also while kernels are awaited."""
        return sum(each.nbytes for each in self._kept[0] if each is not None)

    def add_unsent_to_gradients(self, loss_scale: float) -> None:
        """Add the mean unsent gradient to `p.grad`, and set it to zero. A float32 reduce-scatter per
        module.
        """
        self.up_to_date()
        for each, unsent in self.unsent:
            whole = torch.cat([unsent.of_all(name) for name in unsent.columns], 1).float()
            mine = torch.empty(unsent.elements, dtype=torch.float32, device=whole.device)
            reduce_scatter(mine, whole.view(-1), each.received()[-1])
            mine.mul_(loss_scale / each.divide_factor)
            for name, column in unsent.columns.items():
                each.add_to_gradient(each.names.index(name), mine[column])
            unsent.clear()
        self.optimizer_log.exchange_begins(None, compresses=False)
        self.optimizer_log.exchange_ended()

    # -- accounts

    @property
    def sent_bytes(self) -> float:
        """Bytes that this rank has sent since `install`."""
        return self._earlier_bytes + sum(each.sent_bytes for each in self._accounts)

    def per_pass(self) -> tuple[float, float, float, float, float]:
        """Traffic of this rank per backward pass, averaged since the last change of the recipe.

        Returns bytes of gathers, of scatters and of rings, bytes inside nodes, and seconds of coding. The
        number of backward passes is that of the most frequent scatter.
        """
        passes = max(1, *(scatter.account.calls.total() for scatter in self.scatters))
        gathers = sum(gather.account.sent_bytes for gather in self.gathers)
        scatters = sum(scatter.account.sent_bytes for scatter in self.scatters)
        rings = sum(each.ring_bytes for each in self._accounts)
        inside = sum(each.inside_bytes for each in self._accounts)
        coding_s = sum(each.coding_s for each in self._accounts)
        return gathers / passes, scatters / passes, rings / passes, inside / passes, coding_s / passes

    @property
    def _accounts(self) -> list[Account]:
        gathers = [gather.account for gather in self.gathers]
        return gathers + [scatter.account for scatter in self.scatters]

    def calls(self) -> list[tuple[ShardedModule, Counter[str], Counter[str]]]:
        """Each module, with the number of its gathers and of its scatters by coding."""
        accounts = zip(self.modules, self.gathers, self.scatters, strict=True)
        return [(each, gather.account.calls, scatter.account.calls) for each, gather, scatter in accounts]


def _nothing() -> None:
    """Stand-in for the callback while no backward pass runs."""


def close_with(model: nn.Module, routes: Routes) -> None:
    """End the threads of `routes` when `model` goes."""
    weakref.finalize(model, routes.close)
