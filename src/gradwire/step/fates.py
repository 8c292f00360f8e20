"""Fates of exchanged gradients: optimizers have used them, or they were thrown away.

An exchange is not a step. A step is all exchanges up to the first optimizer step after them, and all
optimizer steps until the next exchange begins (`docs/engineering/design.md`, "A step is what the optimizer
makes").
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from gradwire.errors import GradwireError, GradwireWarning
from gradwire.placement import Device, fetch
from gradwire.step.optimizers import are_zero, listen, stop_listening
from gradwire.unit.context import Fates
from gradwire.untraced import untraced

Optimizers: TypeAlias = tuple[torch.optim.Optimizer, ...]

Skipped = Literal["drop", "keep"]
"""Effect of a step without an optimizer step: "drop" leaves no trace in the memory, "keep" keeps its unsent
part."""

Written: TypeAlias = Mapping[str, bool]
"""Parameters whose gradient this pass has written already, by name; True if it was `None` before."""

NONE_WRITTEN: Written = {}

_UNSEEN = (
    "an optimizer has stepped with gradients that were never exchanged, so the replicas differ from now on. "
    "Usual causes: the forward pass went round the wrapper (`model.module(…)`), the model was cast or moved "
    "after it was wrapped, or the parameters had no gradient in the first step"
)


_INSIDE = (
    "an optimizer has stepped inside backward(), before the mean over ranks is there, so the replicas differ "
    "from now on: call optimizer.step() after backward()"
)


_PARTLY = (
    "an optimizer has stepped with gradients of which only a part was exchanged: a backward pass without an "
    "exchange has added to the means, so the replicas differ from now on. Usual cause: "
    "require_backward_grad_sync is set between forward and backward; DDP goes by its value in the forward "
    "pass. Set it before the forward pass, or use no_sync() around both"
)


@dataclass
class _Record:
    """Steps of one optimizer since the last exchange began.

    It refers to the optimizer weakly: a hook of the user's on the optimizer may refer to the model, and as
    long as the model lives, the thread that refers to this record runs.
    """

    reference: weakref.ref[torch.optim.Optimizer]
    has_stepped: bool = False
    is_inside: bool = False
    """True while `step` runs: a closure may call `backward()`."""
    skipped: Callable[[], Tensor] | None = None
    """Reads, on the device, whether a scaler has told a fused optimizer to skip its step."""
    is_new: bool = False
    """True if an exchange has begun since its last step."""
    got_zeros: bool = False
    """True if all its gradients were zero after the last exchange."""
    has_unseen: bool = False
    """True if it began its step with gradients that no exchange has seen: after the step, hooks of the user's
    may have cleared them."""
    has_part: bool = False
    """True if it began its step with gradients of which only a part was exchanged."""
    added_to: weakref.ref[Tensor] | None = None
    """The first gradient, if a pass that exchanged nothing has added to gradients since the last exchange."""
    used: tuple[weakref.ref[Tensor], int] | None = None
    """The first gradient of its last step, and that gradient's version."""
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    """Its parameters by name, as far as they belong to the model."""
    names: frozenset[str] = frozenset()
    """Names of `parameters`."""
    _named: list[tuple[Tensor, ...]] = field(default_factory=list)
    """Parameters of each of its groups when `parameters` were looked up."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; `None` once no other object refers to it: then it cannot step any more."""
        return self.reference()

    @property
    def groups(self) -> list[dict[str, Any]]:
        optimizer = self.reference()
        return [] if optimizer is None else optimizer.param_groups

    @property
    def has_made(self) -> bool:
        return self.has_stepped and (self.skipped is None or not bool(self.skipped()))

    def look_up(self, names: Mapping[int, str]) -> None:
        """Look up its parameters in `names`, again if parameter groups have changed.

        An optimizer that is gone keeps its last names: another one may step in its place.
        """
        if self.optimizer is None:
            return
        groups = [group["params"] for group in self.groups]
        if len(groups) != len(self._named) or not all(map(_are_same, groups, self._named)):
            self._named = [tuple(group) for group in groups]
            mine = (each for group in groups for each in group if id(each) in names)
            self.parameters = {names[id(each)]: each for each in mine}
            self.names = frozenset(self.parameters)


class Steps:
    """The steps that optimizers of one attached model make, and the gradients that they use.

    A reader of `gradwire.step.optimizers`, on the training thread or autograd's. `Backward` tells it of each
    exchange, and asks by `fates` what has become of those before.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Optimizers,
        device: Device,
        *,
        skipped: Skipped = "drop",
        alone: bool = False,
        raises: bool = False,
        may_differ: Callable[[], bool] = lambda: False,
        stepped: set[str] | None = None,
    ) -> None:
        """Follow `optimizers`; `watch` registers the hooks.

        Args:
            parameters: by the names of their memory.
            optimizers: those that the user has given.
            device: of the gradients.
            skipped: with "keep", a step without an optimizer step is taken for one that was made elsewhere.
            alone: there is one rank, for which an optimizer step without an exchange is usual.
            raises: an optimizer step without an exchange is an error, and no warning.
            may_differ: whether ranks may take different numbers of steps, as under `join()`.
            stepped: `self.stepped` from now on, which a checkpoint saves and replaces; by default a new set.
        """
        self.stepped: set[str] = set() if stepped is None else stepped
        """Names of the parameters of all optimizers that have ever stepped. One that has not, and shares no
        parameter with these, may not be the one that steps."""
        self.dropped = 0
        """The number of whole steps that were left out."""
        self.in_a_row = 0
        """The number of steps that were left out since an optimizer has stepped."""
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._parameters, self._device = parameters, device
        self._records = self._recorded(optimizers)
        self._others: list[_Record] = []
        """Optimizers that were not given and have stepped since the last exchange began."""
        self._skipped, self._alone, self._raises = skipped, alone, raises
        self._may_differ = may_differ
        self._has_looked = self._is_pending = self._is_dropping = self._is_local = False
        self._compresses = self._is_retired = False
        self._cleared: set[str] = set()
        self._open: frozenset[str] = frozenset()
        self._passes, self._exchange = 1, 0
        self._warned: set[str] = set()

    def _recorded(self, optimizers: Optimizers) -> list[_Record]:
        """Make records of `optimizers`, and look up their parameters now, since an optimizer may be
        gone later.
        """
        records = [_Record(weakref.ref(each)) for each in optimizers]
        for record in records:
            if hasattr(record.optimizer, "param_groups"):  # else torch's constructor has not run
                self._names_of(record)
        return records

    @property
    def optimizers(self) -> Optimizers:
        """The followed optimizers that still exist."""
        return tuple(found for each in self._records if (found := each.optimizer) is not None)

    def watch(self, model: nn.Module) -> None:
        """Follow optimizers as long as `model` lives.

        The follower is told of a step before the user's own hooks run. These may clear gradients, so each
        given optimizer also has a hook that runs after the present ones.
        """
        if self._records:
            listen(self, model)
        else:
            stop_listening(self)
        steps = weakref.ref(self)
        for optimizer in self.optimizers:
            if hasattr(optimizer, "_optimizer_step_pre_hooks"):  # else torch's constructor has not run
                handle = optimizer.register_step_pre_hook(untraced(partial(_about_to_step, steps)))
                weakref.finalize(model, handle.remove).atexit = False

    def change(self, optimizers: Optimizers, model: nn.Module) -> None:
        """Follow `optimizers` instead of the present ones. Call it between two steps."""
        self.forget()
        self._records, self._others = self._recorded(optimizers), []
        self.stepped.clear()
        self.watch(model)

    # -- what happens, in the order of a step

    def backward_begins(self, *, exchanges: bool, written: Written = NONE_WRITTEN) -> None:
        """Note which gradients were cleared, before this pass writes new ones.

        `exchanges` is True if this pass will exchange its gradients. `written` are gradients that the pass
        has already written.
        """
        self._is_local |= not exchanges
        self.note_cleared(written)
        if any(each.is_new and not each.is_inside for each in self._records):
            self._look_for_additions()

    def _look_for_additions(self) -> None:
        """Note at the end of this pass whether it has added to gradients that were exchanged before, and has
        exchanged nothing.
        """
        exchange = self._exchange
        before = {id(each): self._marks(each) for each in self._records if each.is_new}

        def passed() -> None:
            for record in self._records:
                marks = before.get(id(record))
                if exchange == self._exchange and marks is not None and marks != self._marks(record):
                    first = self._first_gradient(record)
                    record.added_to = None if first is None else first[0]

        with suppress(RuntimeError):  # outside of a backward pass, as under join()
            Variable._execution_engine.queue_callback(passed)

    def _marks(self, record: _Record) -> list[tuple[int, int]]:
        """Identities and versions of the gradients: a new gradient, or an addition to one, changes them."""
        grads = [each.grad for each in self._parameters_of(record).values()]
        return [(0, 0) if grad is None else (id(grad), grad._version) for grad in grads]

    def note_cleared(self, written: Written = NONE_WRITTEN) -> None:
        """Note which gradients have been cleared before their optimizer has stepped; at any time."""
        if not self._is_pending:
            return
        self._has_looked = True
        for record in self._records:
            if not record.has_made and self._recognises(record):
                self._clear(record, written)

    def fates(self) -> Fates | None:
        """Fates of the exchanges since the last one began; `None` if all are final, as usual.

        Asked when the next exchange begins, or a call that needs the memory.
        """
        is_usual = not (self._is_dropping or self._cleared or self._open)
        if not self._is_pending or self._is_retired:
            return None
        if is_usual and all(each.has_made for each in self._records):
            return None
        if not self._has_looked:
            self.note_cleared()
        final = set[str]()
        dropped, stands = set(self._cleared), set[str]()
        for record in (*self._records, *self._others):
            names = self._names_of(record) - self._cleared
            if record.has_made or (record.is_inside and record in self._others):
                final |= names
            elif self._is_dropping:
                dropped |= names
            elif self._recognises(record):
                stands |= names
        if self._is_dropping:
            dropped |= set(self._parameters) - stands
        dropped, stands, was_open = dropped - final, stands - final, self._open
        self._open = frozenset(stands)
        if not (dropped or stands or was_open):
            return None
        return Fates(frozenset(dropped), self._open, made=bool(final))

    def rolled_back(self, fates: Fates, *, is_dropped: bool) -> None:
        """Note that memory was rolled back by `fates`; `is_dropped` if a whole step was left out."""
        self._cleared |= fates.dropped
        self.dropped += is_dropped
        self.in_a_row += is_dropped

    def exchange_begins(self, fates: Fates | None, *, compresses: bool) -> None:
        """Note that an exchange begins, after memory was rolled back by the `fates` of earlier ones.
        `compresses` is False if gradients are sent as they are.
        """
        goes_on = fates is not None and not fates.made and bool(fates.open)
        self._passes = self._passes + compresses if goes_on else 1
        self._is_pending, self._has_looked, self._is_dropping, self._is_local = True, False, False, False
        self._cleared, self._compresses = set(), compresses
        self._exchange += 1
        self._is_retired = self._is_retired and not compresses
        self._others = [each for each in self._others if each.is_inside]
        for record in (*self._records, *self._others):
            record.has_stepped, record.skipped, record.is_new = False, None, True
            record.added_to = None

    def exchange_ended(self) -> None:
        """Note which optimizers got nothing but zeros: the means are in `p.grad`."""
        if self._device.is_host:
            for record in (*self._records, *self._others):
                record.got_zeros = are_zero(self._parameters_of(record).values())

    def drop(self) -> None:
        """Leave the step out, as the user asks: gradients that no optimizer has used will not be used.

        Raises `ValueError` if all of them have been used.
        """
        made = (each for each in (*self._records, *self._others) if each.has_made)
        used = {name for each in made for name in self._names_of(each)}
        is_used = self._records and all(self._names_of(each) <= used for each in self._records)
        if not self._is_pending or is_used:
            raise ValueError(
                "there is no step to leave out: call drop_step() after a backward pass, instead of the "
                "optimizer's step"
            )
        self._is_dropping = True

    def forget(self) -> None:
        """Forget earlier exchanges: another state was loaded, or nothing is unsent."""
        self._is_pending, self._open, self._is_dropping = False, frozenset(), False
        self._cleared = set()

    def retire(self) -> None:
        """Take all exchanges for final, and miss none, until a recipe compresses again."""
        self.forget()
        self._is_retired = True

    # -- what the follower of optimizers reports

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step that begins. An optimizer that was not given may be inside another, or around it."""
        if (given := self._record_of(optimizer)) is not None:
            given.is_inside = True
            return
        known = (*self._records, *self._others)
        is_ignored = self._skipped == "keep" or not self._is_pending
        if is_ignored or any(each.is_inside for each in known):
            return
        if (again := next((each for each in self._others if each.optimizer is optimizer), None)) is not None:
            again.is_inside = True
            return
        record = _Record(weakref.ref(optimizer), is_new=True)
        if names := self._names_of(record):
            self._others.append(record)
            # An exchange may bring zeros, as where a unit rests: then nobody has cleared the gradients.
            full = {name for each in self._records if not each.got_zeros for name in self._names_of(each)}
            record.got_zeros = names.isdisjoint(full)
            self.stepped |= names
            self._before(record)

    def given_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer is about to step, after hooks of the user's."""
        if (given := self._record_of(optimizer)) is not None:
            self._before(given)

    def optimizer_ended(self, optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> None:
        """Note a step that has ended. An optimizer not given stands for those with its parameters."""
        if (given := self._record_of(optimizer)) is not None:
            self._after(given, found_inf)
            return
        record = next((each for each in self._others if each.optimizer is optimizer), None)
        if record is None:
            return
        names = self._names_of(record)
        mine = [each for each in self._records if each.has_stepped]
        if names <= {name for each in mine for name in self._names_of(each)}:
            self._others.remove(record)  # around one that was given
            record.is_inside = False
            return
        self._after(record, found_inf)
        groups = {id(group) for each in self._records for group in each.groups}
        is_part = {id(group) for group in optimizer.param_groups} <= groups  # as of sharpness-aware ones
        if is_part or not (self._compresses and self._is_first("another")):
            return
        warnings.warn(
            f"{type(optimizer).__name__}, which attach was not given, has stepped parameters of this model. "
            "Its steps count, but recipes that go by an optimizer go by the one given: call "
            "wire.switch_optimizer(optimizer) when another one takes over",
            GradwireWarning,
            stacklevel=5,
        )

    def _before(self, record: _Record) -> None:
        """Note gradients that are gone before the optimizer steps, as they leave no trace in the parameters,
        and gradients that were never exchanged.
        """
        record.is_inside, record.has_unseen = True, self._has_unseen(record)
        record.has_part = self._has_part(record)
        if self._is_pending and not record.has_stepped and self._recognises(record, inside=True):
            self._clear(record)

    def _after(self, record: _Record, found_inf: Tensor | None) -> None:
        record.is_inside, record.has_stepped = False, True
        self.stepped |= self._names_of(record)
        record.skipped = None if found_inf is None else fetch(self._device, found_inf)
        self.in_a_row = 0
        if self._passes > 1 and self._is_first("passes"):
            warnings.warn(
                f"{self._passes} backward passes were exchanged before one optimizer step: each micro-batch "
                "was compressed and sent. Wrap all but the last in wire.no_sync().",
                GradwireWarning,
                stacklevel=6,
            )
        if (record.has_unseen and not record.is_new) or self._has_unseen(record):
            self._tell_unseen(_UNSEEN if torch._C._current_graph_task_id() == -1 else _INSIDE)
        if record.has_part:
            self._tell_unseen(_PARTLY)
        record.is_new = record.has_part = False
        record.used = self._first_gradient(record)

    def _has_unseen(self, record: _Record) -> bool:
        """True if an optimizer has gradients, and no exchange had begun since its previous step."""
        if record.is_new or self._is_local or self._alone or self._is_retired or self._may_differ():
            return False
        first = self._first_gradient(record)
        if first is None or (record.used is not None and _same(first, record.used)):
            return False  # nothing is used, or gradients that it had used before
        # Zeros are there where code lets an optimizer make its state.
        return not are_zero(self._parameters_of(record).values())

    def _has_part(self, record: _Record) -> bool:
        """True if gradients that a pass has added to, after the exchange, are there still."""
        if record.added_to is None or self._alone or self._is_retired or self._may_differ():
            return False
        first = self._first_gradient(record)
        is_there = first is not None and first[0]() is record.added_to()
        return is_there and not are_zero(self._parameters_of(record).values())

    def _tell_unseen(self, why: str) -> None:
        """Warn once, or raise, as an optimizer has stepped with gradients that were not exchanged."""
        if self._raises:
            raise GradwireError(why)
        if self._is_first(why):
            warnings.warn(why, GradwireWarning, stacklevel=7)

    def _is_first(self, kind: str) -> bool:
        """True if no warning of this kind has been given yet."""
        is_first = kind not in self._warned
        self._warned.add(kind)
        return is_first

    # -- what gradients are there

    def _recognises(self, record: _Record, *, inside: bool = False) -> bool:
        """True if a missing step of this optimizer means that its gradients were thrown away.

        Until it, or one that shares its parameters, has stepped, it may not be the one that steps. Inside
        `step`, a closure clears gradients that the optimizer has used.
        """
        return (
            self._skipped == "drop"
            and not self.stepped.isdisjoint(self._names_of(record))
            and (inside or not record.is_inside)
            and not self._may_differ()
        )

    def _record_of(self, optimizer: torch.optim.Optimizer) -> _Record | None:
        """The record of an optimizer that was given."""
        return next((each for each in self._records if each.optimizer is optimizer), None)

    def _names_of(self, record: _Record) -> frozenset[str]:
        record.look_up(self._names)
        return record.names

    def _parameters_of(self, record: _Record) -> Mapping[str, Tensor]:
        record.look_up(self._names)
        return record.parameters

    def _first_gradient(self, record: _Record) -> tuple[weakref.ref[Tensor], int] | None:
        for group in record.groups:
            for parameter in group["params"]:
                if id(parameter) in self._names and parameter.grad is not None:
                    # torch does not cast a sharded gradient to which there are weak references.
                    grad = getattr(parameter.grad, "_local_tensor", parameter.grad)
                    return weakref.ref(grad), grad._version
        return None

    def _clear(self, record: _Record, written: Written = NONE_WRITTEN) -> None:
        """Note the cleared gradients of an optimizer, unless another one has used them, or is about to."""
        if cleared := self._cleared_of(record, written):
            others = (each for each in (*self._records, *self._others) if each is not record)
            used = (each for each in others if each.has_made or each.is_inside)
            self._cleared |= cleared - {name for each in used for name in self._names_of(each)}

    def _cleared_of(self, record: _Record, written: Written) -> frozenset[str]:
        """Parameters of an optimizer whose gradient was cleared since the exchange.

        A gradient of `None` was cleared. Zeros prove nothing: a unit that rests, or a choice of elements,
        brings zeros, too. Only if all gradients of the optimizer have become zero,
        `zero_grad(set_to_none=False)` is assumed. Gradients on a device are not read for that.
        """
        mine = self._parameters_of(record)
        if written:
            mine = {name: each for name, each in mine.items() if name not in written}
        gone = frozenset([name for name, each in mine.items() if each.grad is None])
        is_some = len(gone) < len(mine)
        if is_some and self._device.is_host and not record.got_zeros and are_zero(mine.values()):
            return record.names
        return gone | {name for name, was_cleared in written.items() if was_cleared and name in record.names}


def _about_to_step(steps: weakref.ref[Steps], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if (following := steps()) is not None:
        following.given_begins(optimizer)


def _are_same(parameters: Sequence[Tensor], known: Sequence[Tensor]) -> bool:
    return len(parameters) == len(known) and all(map(is_, parameters, known))


def _same(one: tuple[weakref.ref[Tensor], int], other: tuple[weakref.ref[Tensor], int]) -> bool:
    return one[0]() is other[0]() and one[1] == other[1]
