"""Fates of exchanged gradients: optimizers have used them, or they were thrown away.

An exchange is not a step. A step is all exchanges up to the first optimizer step after them, and all
optimizer steps until the next exchange begins (`docs/engineering/design.md`, "A step is what the optimizer
makes"). `read` folds one event into the state, and is the only function that writes it. All others answer
questions from it. `Backward.roll_back_unused` applies the answers to memory and counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

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
from gradwire.unit.context import Fates

UNSEEN, PARTLY, SEVERAL, ANOTHER = "unseen", "partly", "passes", "another"
"""Complaints about a step that has ended: its gradients were never exchanged, or only a part of them; several
passes came before it; another optimizer has stepped. `optimizer_log` has their sentences."""


@dataclass(frozen=True)
class FateRules:
    """Rules that hold as long as a model is followed."""

    names: frozenset[str] = frozenset()
    """All parameters."""
    takes_back: bool = True
    """False if a step without an optimizer step is taken for one that was made elsewhere."""
    is_alone: bool = False
    """True if there is one rank, for which an optimizer step without an exchange is usual."""
    reads_zeros: bool = True
    """False on a device: whether its gradients are zeros cannot be told without waiting for it."""
    may_differ: Callable[[], bool] = lambda: False
    """Whether ranks may take different numbers of steps, as under `join()`."""


@dataclass(slots=True)
class SinceExchange:
    """Events since an exchange began, as far as they matter."""

    has_begun: bool = False
    """False before the first one."""
    is_final: bool = True
    """True if nobody asks for its fate any more."""
    compresses: bool = False
    has_looked: bool = False
    """True once it was looked at which gradients are gone."""
    is_dropping: bool = False
    is_local: bool = False
    """True if a pass that exchanges nothing has entered."""
    cleared: set[str] = field(default_factory=set)
    """Parameters whose gradient was cleared before their optimizer had stepped."""
    ended: dict[KnownOptimizer, StepEnded] = field(default_factory=dict)
    """The last step of each optimizer that has stepped, also if a scaler has left it out on the device."""
    added: dict[KnownOptimizer, Mark | None] = field(default_factory=dict)
    """The first gradient of each optimizer, where a pass that exchanged nothing has added to it."""

    def has_made(self, optimizer: KnownOptimizer) -> bool:
        """True if the optimizer has used the gradients."""
        ended = self.ended.get(optimizer)
        return ended is not None and (ended.skipped is None or not ended.skipped())


@dataclass(slots=True)
class Followed:
    """State of one optimizer."""

    got_zeros: bool = False
    """True if the last exchange has brought it nothing but zeros."""
    is_inside: bool = False
    """True while its step runs: a closure may call `backward()`."""
    doubts: tuple[str, ...] = ()
    """Doubts about the gradients with which its step has begun: hooks may clear them in the step."""
    used: Mark | None = None
    """The first gradient of its last step."""


@dataclass(slots=True)
class State:
    """State that is carried from one exchange to the next, and the present `exchange`."""

    rules: FateRules = FateRules()
    stepped: set[str] = field(default_factory=set)
    """Parameters of all optimizers that have ever stepped, as a checkpoint saves them. An optimizer that has
    not, and shares no parameter with these, may not be the one that steps."""
    exchange: SinceExchange = field(default_factory=SinceExchange)
    followed: dict[KnownOptimizer, Followed] = field(default_factory=dict)
    """The given optimizers, and others that have stepped since the last exchange began."""
    open: frozenset[str] = frozenset()
    """Parameters with gradients of earlier exchanges that still stand."""
    passes: int = 1
    """Exchanges that compressed since an optimizer has stepped."""
    dropped: int = 0
    """Whole steps that were left out."""
    in_a_row: int = 0
    """Steps that were left out since an optimizer has stepped."""
    is_retired: bool = False
    said: tuple[str, ...] = ()
    """Complaints about the last step that has ended."""


def read(state: State, event: Event) -> None:
    """Fold `event` into `state`."""
    exchange, followed = state.exchange, state.followed
    match event:
        case StepBegan(optimizer):
            if optimizer.is_given:
                followed[optimizer].is_inside = True
            elif may_step_instead(state):
                if optimizer not in followed:
                    state.stepped |= optimizer.names
                    # An exchange may bring zeros, as where a unit rests: then nobody has cleared them.
                    full = (each.names for each, its in followed.items() if not its.got_zeros)
                    followed[optimizer] = Followed(all(map(optimizer.names.isdisjoint, full)))
                followed[optimizer].is_inside = True
        case StepLooked(optimizer, look):
            its = followed[optimizer]
            its.doubts = () if look.are_zero else doubts(state, optimizer, look.first)
            # Cleared gradients leave no trace in the parameters.
            if not exchange.is_final and optimizer not in exchange.ended and is_known(state, optimizer):
                _clear(state, optimizer, look)
        case StepEnded(optimizer, look):
            # One that was not given has stepped around others that were.
            if not optimizer.is_given and optimizer.names <= {
                name for each in exchange.ended if each.is_given for name in each.names
            }:
                del followed[optimizer]
                state.said = ()
                return
            its, state.said = followed[optimizer], complaints(state, optimizer, look)
            its.used = its.used if UNSEEN in state.said else look.first
            its.is_inside, its.doubts = False, ()
            exchange.ended[optimizer] = event
            state.stepped |= optimizer.names
            state.in_a_row = 0
        case StepRaised(optimizer):
            if optimizer.is_given or optimizer in exchange.ended:
                followed[optimizer].is_inside, followed[optimizer].doubts = False, ()
            else:
                del followed[optimizer]
        case PassBegan(looks) | Asked(looks):
            if isinstance(event, PassBegan) and not event.exchanges:
                exchange.is_local = True
            if not exchange.is_final:
                exchange.has_looked = True
                for each, look in looks.items():
                    _clear(state, each, look)
        case PassAdded(first):
            exchange.added |= first
        case RolledBack(fates, is_dropped):
            exchange.cleared |= fates.dropped
            state.open = fates.open
            if is_dropped:
                state.dropped, state.in_a_row = state.dropped + 1, state.in_a_row + 1
        case ExchangeBegan(compresses, goes_on):
            if not goes_on:
                state.passes = 1
            elif compresses:
                state.passes += 1
            state.is_retired = state.is_retired and not compresses
            state.exchange = SinceExchange(has_begun=True, is_final=False, compresses=compresses)
            for each, its in [*followed.items()]:
                its.doubts = ()
                if not (each.is_given or its.is_inside):
                    del followed[each]
        case Exchanged(zeros):
            for each, its in followed.items():
                its.got_zeros = each in zeros
        case Dropped():
            exchange.is_dropping = True
        case Loaded():
            exchange.is_final, state.open = True, frozenset()
        case Retired():
            exchange.is_final, state.open, state.is_retired = True, frozenset(), True
        case Changed(optimizers):
            state.stepped.clear()
            state.open = frozenset()
            state.exchange = SinceExchange(is_local=exchange.is_local)
            state.followed = {each: Followed() for each in optimizers}


def fates_of(state: State) -> Fates | None:
    """Fates of the exchanges since the last one began; `None` if all are final, as usual."""
    exchange = state.exchange
    if are_final(state):
        return None
    final, dropped, stands = set[str](), set(exchange.cleared), set[str]()
    for each, its in state.followed.items():
        names = each.names - exchange.cleared
        if exchange.has_made(each) or (its.is_inside and not (each.is_given and exchange.is_dropping)):
            final |= names
        elif not exchange.is_dropping and is_known(state, each):
            stands |= names
    if exchange.is_dropping:
        dropped |= state.rules.names
    dropped, stands = dropped - final, stands - final
    if not (dropped or stands or state.open):
        return None
    return Fates(frozenset(dropped), frozenset(stands), made=bool(final))


def are_final(state: State) -> bool:
    """True if every given optimizer has used the last exchange, and nothing is open, as usual."""
    exchange = state.exchange
    if exchange.is_final or state.is_retired:
        return True
    if exchange.is_dropping or exchange.cleared or state.open:
        return False
    # In every step: a loop costs fewer calls than `all`.
    for each in state.followed:  # noqa: SIM110
        if each.is_given and not exchange.has_made(each):
            return False
    return True


def unused(state: State) -> list[KnownOptimizer]:
    """The given optimizers whose gradients, if they are gone now, were thrown away."""
    return [
        each
        for each, its in state.followed.items()
        if each.is_given and not its.is_inside and not state.exchange.has_made(each) and is_known(state, each)
    ]


def is_used_up(state: State) -> bool:
    """True if no gradient of the last exchange is left that could be dropped."""
    given = [each for each in state.followed if each.is_given]
    used = {name for each in state.followed if state.exchange.has_made(each) for name in each.names}
    return state.exchange.is_final or (bool(given) and all(each.names <= used for each in given))


def is_waited_for(state: State) -> bool:
    """True if an optimizer has not stepped since the last exchange began, and does not now."""
    exchange = state.exchange
    for each, its in state.followed.items():
        if each.is_given and not (each in exchange.ended or its.is_inside):
            return exchange.has_begun
    return False


def may_step_instead(state: State) -> bool:
    """True if an optimizer that was not given would step for those that were: none of these runs."""
    is_inside = any(its.is_inside for its in state.followed.values())
    return state.rules.takes_back and not state.exchange.is_final and not is_inside


def is_known(state: State, optimizer: KnownOptimizer) -> bool:
    """True if a missing step of this optimizer means that its gradients were thrown away.

    Until it, or one that shares its parameters, has stepped, it may not be the one that steps.
    """
    rules = state.rules
    return rules.takes_back and not state.stepped.isdisjoint(optimizer.names) and not rules.may_differ()


def doubts(state: State, optimizer: KnownOptimizer, first: Mark | None) -> tuple[str, ...]:
    """Doubts about gradients that an optimizer steps with, the first of which is `first`: they were not
    exchanged, or only a part of them. Zeros are not in doubt: they are there where code lets an optimizer
    make its state.
    """
    exchange, rules = state.exchange, state.rules
    if first is None or rules.is_alone or state.is_retired:
        return ()
    its, added = state.followed[optimizer], exchange.added.get(optimizer)
    is_new = exchange.has_begun and optimizer not in exchange.ended
    is_used = its.used is not None and its.used[1] == first[1] and its.used[0]() is first[0]()
    is_unseen = not (is_new or is_used or exchange.is_local)
    has_part = added is not None and first[0]() is added[0]()
    found = ((UNSEEN,) if is_unseen else ()) + ((PARTLY,) if has_part else ())
    return () if found and rules.may_differ() else found


def complaints(state: State, optimizer: KnownOptimizer, look: Look) -> tuple[str, ...]:
    """Complaints about a step that ends with these gradients."""
    begun = state.followed[optimizer].doubts
    ended = () if look.are_zero else doubts(state, optimizer, look.first)
    said: tuple[str, ...] = (SEVERAL,) if state.passes > 1 else ()
    said += (UNSEEN,) if UNSEEN in begun or UNSEEN in ended else ()
    said += (PARTLY,) if PARTLY in begun else ()
    return said + ((ANOTHER,) if state.exchange.compresses and not optimizer.is_given else ())


def _clear(state: State, optimizer: KnownOptimizer, look: Look) -> None:
    """Read which gradients were cleared, unless another optimizer has used them, or is about to.

    A gradient of `None` was cleared. Zeros prove nothing: a unit that rests, or a choice of elements, brings
    zeros, too. Only if all gradients of the optimizer have become zero, `zero_grad(set_to_none=False)` is
    assumed.
    """
    exchange, its = state.exchange, state.followed[optimizer]
    are_zero = look.are_zero and state.rules.reads_zeros and not its.got_zeros
    cleared = set(optimizer.names if are_zero else look.gone)
    for other, others in state.followed.items():
        if cleared and other is not optimizer and (others.is_inside or exchange.has_made(other)):
            cleared -= other.names
    exchange.cleared |= cleared
