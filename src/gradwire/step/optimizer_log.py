"""Log of what the optimizers of one attached model do, from torch's hooks.

It appends events (`step/events.py`); `step/fates.py` reads them.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from operator import is_
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from gradwire.errors import GradwireError, GradwireWarning
from gradwire.placement import Device, fetch
from gradwire.step.events import (
    Asked,
    Changed,
    Dropped,
    Event,
    ExchangeBegan,
    Exchanged,
    KnownOptimizer,
    Loaded,
    Look,
    Mark,
    PassAdded,
    PassBegan,
    Retired,
    RolledBack,
    StepBegan,
    StepEnded,
    StepLooked,
    StepRaised,
)
from gradwire.step.fates import (
    ANOTHER,
    PARTLY,
    SEVERAL,
    UNSEEN,
    FateRules,
    State,
    are_final,
    doubts,
    fates_of,
    is_used_up,
    is_waited_for,
    may_step_instead,
    read,
    unused,
)
from gradwire.step.optimizers import are_zero, is_stepping, listen, stop_listening
from gradwire.unit.context import Fates
from gradwire.untraced import untraced

Optimizers: TypeAlias = tuple[torch.optim.Optimizer, ...]

SkippedStep = Literal["drop", "keep"]
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


class WatchedOptimizer(KnownOptimizer):
    """An optimizer whose gradients are looked at.

    It refers to the optimizer weakly: a hook of the user's on the optimizer may refer to the model, and as
    long as the model lives, the thread that refers to the log runs.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], *, is_given: bool) -> None:
        super().__init__(is_given=is_given)
        self.reference = weakref.ref(optimizer)
        """`None` once no other object refers to the optimizer: then it cannot step any more."""
        self.parameters: dict[str, Tensor] = {}
        """Its parameters by name, as far as they belong to the model."""
        self._all: list[Tensor] = []
        if hasattr(optimizer, "param_groups"):  # else torch's constructor has not run
            self.look_up(names)

    def look_up(self, names: Mapping[int, str]) -> None:
        """Look up its parameters in `names`, again if parameter groups have changed.

        An optimizer that is gone keeps its last names: another one may step in its place.
        """
        if (optimizer := self.reference()) is None:
            return
        found: list[Tensor] = []
        for group in optimizer.param_groups:
            found += group["params"]
        if len(found) != len(self._all) or not all(map(is_, found, self._all)):
            self._all = found
            self.parameters = {names[id(each)]: each for each in found if id(each) in names}
            self.names = frozenset(self.parameters)

    def first_gradient(self) -> Mark | None:
        """The first gradient that is there."""
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                return _mark(parameter.grad)
        return None

    def marks(self) -> list[tuple[int, int]]:
        """Identities and versions of the gradients: a new gradient, or an addition to one, changes them."""
        grads = [each.grad for each in self.parameters.values()]
        return [(0, 0) if grad is None else (id(grad), grad._version) for grad in grads]


class OptimizerLog:
    """The steps that optimizers of one attached model make, and the gradients that they use.

    Hooks append what they see, on the training thread or autograd's. `Backward` tells of each exchange, and
    asks by `fates` what has become of those before.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        optimizers: Optimizers,
        device: Device,
        *,
        skipped: SkippedStep = "drop",
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
            stepped: `stepped` from now on, which a checkpoint saves and replaces; by default a new set.
        """
        rules = FateRules(frozenset(parameters), skipped == "drop", alone, device.is_host, may_differ)
        self.state = State(rules, set() if stepped is None else stepped)
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._device, self._raises = device, raises
        self._warned: set[str] = set()
        self._removals: list[weakref.finalize[[], nn.Module]] = []
        """Removals of the hooks on given optimizers; each is called once."""
        self.append: Callable[[Event], None] = partial(read, self.state)
        """Tell of an event, which is folded into `state` at once: no list grows."""
        self._follow(optimizers)

    def _follow(self, optimizers: Optimizers) -> None:
        self._given = tuple(WatchedOptimizer(each, self._names, is_given=True) for each in optimizers)
        self.append(Changed(self._given))

    @property
    def stepped(self) -> set[str]:
        """Names of the parameters of all optimizers that have ever stepped."""
        return self.state.stepped

    @property
    def dropped(self) -> int:
        """The number of whole steps that were left out."""
        return self.state.dropped

    @property
    def in_a_row(self) -> int:
        """The number of steps that were left out since an optimizer has stepped."""
        return self.state.in_a_row

    @property
    def is_in_step(self) -> bool:
        """True while an optimizer steps: what becomes of the last exchange is not known yet."""
        self._look_for_raised()
        return any(its.is_inside for its in self.state.followed.values())

    @property
    def optimizers(self) -> Optimizers:
        """The followed optimizers that still exist."""
        return tuple(found for each in self._given if (found := each.reference()) is not None)

    def watch(self, model: nn.Module) -> None:
        """Follow optimizers as long as `model` lives.

        The log hears of a step before the user's own hooks run. These may clear gradients, so each given
        optimizer also has a hook that runs after the present ones.
        """
        if self._given:
            listen(self, model)
        else:
            stop_listening(self)
        for remove in self._removals:
            remove()
        self._removals = []
        log = weakref.ref(self)
        for each in self._given:
            optimizer = each.reference()
            # Else torch's constructor has not run.
            if optimizer is not None and hasattr(optimizer, "_optimizer_step_pre_hooks"):
                handle = optimizer.register_step_pre_hook(untraced(partial(_about_to_step, log, each)))
                removal = weakref.finalize(model, handle.remove)
                removal.atexit = False
                self._removals.append(removal)

    def change(self, optimizers: Optimizers, model: nn.Module) -> None:
        """Follow `optimizers` instead of the present ones. Call it between two steps."""
        self._follow(optimizers)
        self.watch(model)

    # -- what happens, in the order of a step

    def backward_begins(self, *, exchanges: bool, written: Written = NONE_WRITTEN) -> None:
        """Note that a backward pass enters, and look at gradients before it writes new ones.

        `exchanges` is True if this pass will exchange its gradients. `written` are gradients that the pass
        has already written.
        """
        self._look_for_raised()
        self.append(PassBegan({} if are_final(self.state) else self._looks(written), exchanges))
        if is_waited_for(self.state):
            self._look_for_additions()

    def _look_for_additions(self) -> None:
        """Note at the end of this pass whether it has changed gradients that were exchanged before, and has
        exchanged nothing.
        """
        exchange = self.state.exchange
        before = {each: each.marks() for each in self._given if each not in exchange.ended}

        def passed() -> None:
            changed = [each for each, marks in before.items() if marks != each.marks()]
            if changed and exchange is self.state.exchange:
                self.append(PassAdded({each: each.first_gradient() for each in changed}))

        with suppress(RuntimeError):  # outside of a backward pass, as under join()
            Variable._execution_engine.queue_callback(passed)

    def note_cleared(self) -> None:
        """Look which gradients have been cleared before their optimizer has stepped; at any time."""
        self._look_for_raised()
        self.append(Asked(self._looks()))

    def fates(self) -> Fates | None:
        """Fates of the exchanges since the last one began; `None` if all are final, as usual.

        Asked when the next exchange begins, or a call that needs the memory.
        """
        if are_final(self.state):
            return None
        if not self.state.exchange.has_looked:
            self.note_cleared()
        return fates_of(self.state)

    def rolled_back(self, fates: Fates, *, is_dropped: bool) -> None:
        """Note that memory was rolled back by `fates`; `is_dropped` if a whole step was left out."""
        self.append(RolledBack(fates, is_dropped))

    def exchange_begins(self, fates: Fates | None, *, compresses: bool) -> None:
        """Note that an exchange begins, after memory was rolled back by the `fates` of earlier ones.
        `compresses` is False if gradients are sent as they are.
        """
        goes_on = fates is not None and not fates.made and bool(fates.open)
        self.append(ExchangeBegan(compresses, goes_on))

    def exchange_ended(self) -> None:
        """Note which optimizers got nothing but zeros: the means are in `p.grad`."""
        zeros = set[KnownOptimizer]()
        for each in self.state.followed if self._device.is_host else ():
            assert isinstance(each, WatchedOptimizer)
            if are_zero(each.parameters.values()):
                zeros.add(each)
        self.append(Exchanged(zeros))

    def drop(self) -> None:
        """Leave the step out, as the user asks: gradients that no optimizer has used will not be used.

        Raises `ValueError` if all of them have been used.
        """
        if is_used_up(self.state):
            raise ValueError(
                "there is no step to leave out: call drop_step() after a backward pass, instead of the "
                "optimizer's step"
            )
        self.append(Dropped())

    def forget(self) -> None:
        """Forget earlier exchanges: another state was loaded."""
        self.append(Loaded())

    def retire(self) -> None:
        """Take all exchanges for final, and miss none, until a recipe compresses again."""
        self.append(Retired())

    # -- what hooks on optimizers see

    def optimizer_begins(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step that begins. An optimizer that was not given may be inside another, or around it."""
        self._look_for_raised()
        found = self._watched(optimizer)
        if found is not None:
            self.append(StepBegan(found))
        elif may_step_instead(self.state):
            found = WatchedOptimizer(optimizer, self._names, is_given=False)
            if found.names:
                self.append(StepBegan(found))
                self.append(StepLooked(found, self._look(found)))

    def _look_for_raised(self) -> None:
        """Note which steps have raised. In a usual step none has begun when anything else is seen."""
        for each in [each for each, its in self.state.followed.items() if its.is_inside]:
            assert isinstance(each, WatchedOptimizer)
            if not is_stepping(each.reference()):
                self.append(StepRaised(each))

    def optimizer_ended(self, optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> None:
        """Note a step that has ended. An optimizer not given stands for those with its parameters."""
        if (found := self._watched(optimizer)) is None:
            return
        first = found.first_gradient()
        is_zero = bool(doubts(self.state, found, first)) and are_zero(found.parameters.values())
        skipped = None if found_inf is None else fetch(self._device, found_inf)
        self.append(StepEnded(found, Look(first=first, are_zero=is_zero), skipped))
        if self.state.said:
            self._tell(optimizer)

    def _tell(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once of each, or raise, where gradients were used that were not exchanged."""
        groups = {id(group) for each in self.optimizers for group in each.param_groups}
        is_part = {id(group) for group in optimizer.param_groups} <= groups  # as of sharpness-aware ones
        is_inside = torch._C._current_graph_task_id() != -1
        texts = {
            SEVERAL: f"{self.state.passes} backward passes were exchanged before one optimizer step: each "
            "micro-batch was compressed and sent. Wrap all but the last in wire.no_sync().",
            UNSEEN: _INSIDE if is_inside else _UNSEEN,
            PARTLY: _PARTLY,
            ANOTHER: f"{type(optimizer).__name__}, which attach was not given, has stepped parameters of "
            "this model. Its steps count, but recipes that go by an optimizer go by the one given: call "
            "wire.switch_optimizer(optimizer) when another one takes over",
        }
        for each in self.state.said:
            if each == ANOTHER and is_part:
                continue
            if self._raises and each in (UNSEEN, PARTLY):
                raise GradwireError(texts[each])
            kind = texts[each] if each == UNSEEN else each
            if kind not in self._warned:
                self._warned.add(kind)
                warnings.warn(texts[each], GradwireWarning, stacklevel=6)

    # -- what gradients are there

    def _watched(self, optimizer: torch.optim.Optimizer) -> WatchedOptimizer | None:
        """The optimizer, if it is followed."""
        for each in self.state.followed:
            if isinstance(each, WatchedOptimizer) and each.reference() is optimizer:
                return each
        return None

    def _looks(self, written: Written = NONE_WRITTEN) -> dict[KnownOptimizer, Look]:
        """Looks at optimizers that have not used the last exchange, and might have."""
        if self.state.exchange.is_final:
            return {}
        for each in self._given:
            each.look_up(self._names)
        waiting = unused(self.state)
        return {each: self._look(each, written) for each in self._given if each in waiting}

    def _look(self, optimizer: WatchedOptimizer, written: Written = NONE_WRITTEN) -> Look:
        optimizer.look_up(self._names)
        mine, gone, first, is_zero = optimizer.parameters, list[str](), None, False
        if written:
            mine = {name: each for name, each in mine.items() if name not in written}
            gone = [name for name in optimizer.names & written.keys() if written[name]]
        for name, parameter in mine.items():
            if (gradient := parameter.grad) is None:
                gone.append(name)
            elif first is None:
                first = _mark(gradient)
        if first is not None and (self._device.is_host or doubts(self.state, optimizer, first)):
            is_zero = are_zero(mine.values())
        return Look(frozenset(gone), first, is_zero)


def _mark(gradient: Tensor) -> Mark:
    # torch does not cast a sharded gradient to which there are weak references.
    local = getattr(gradient, "_local_tensor", gradient)
    return weakref.ref(local), local._version


def _about_to_step(log: weakref.ref[OptimizerLog], optimizer: WatchedOptimizer, *_: Any) -> None:
    following = log()
    if following is not None and optimizer in following.state.followed:
        following.append(StepLooked(optimizer, following._look(optimizer)))
