"""The promises of selectors, codecs and exchanges, all in one table; and the phases of what changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True, kw_only=True)
class Laws:
    """The promises of a selector, a codec or an exchange, which `tests/laws` tests for each of them.

    A promise holds in one direction: a flag that is not set promises nothing. `may_overflow` is the other way
    round: there `False` is the promise. A promise is of the kinds that its line names, and means nothing for
    the others. `docs/engineering/laws.md` has the tolerances.

    - `contractive`: what is left is smaller than what came, but for a floor. Selector and codec: ‖left‖² ≤
      γ‖x‖² + n·floor² for n elements, with γ < 1 (in mean, if random), so error feedback stays bounded. Left
      are the elements that are not chosen, or x − decode(encode(x)). The floor does not depend on x, and is 0
      for most: a fixed threshold has itself, a cast what its type cannot express. Exchange: the unsent part
      is not larger than the input; the page says for each exchange by how much it is smaller, and how much
      stays while ranks disagree.
    - `stays_on_device` (selector, codec, exchange): where x is on a device, no call makes the host wait for
      it. It reads no number, no size depends on one, and copies to the device come from pinned memory. The
      first step may copy constants that every step needs.
    - `fixed_rounds` (selector, codec, exchange): `count`, `payload` or `rounds` return the same in all steps,
      for the same unit on as many ranks. Where they do not, `phase_of` says in which steps they do.
    - `repeats` (selector, codec, exchange): where x is on a device, `select`, `take` and `average_decoded`,
      or `start` and what it returns, launch the same kernels with the same numbers in all steps of a phase,
      for the same tensors of a unit. So a device may record the launches and replay them. Of `ctx` they ask
      nothing that differs between these steps, but `see`. If an exchange has a method `turn(ctx)`, all this
      holds for steps in which that says the same. An exchange may ask what is `kept` as well, and draw what
      is not kept yet. It waits for each collective before it launches anything else, and for the last one in
      what `start` returns.
    - `shared` (selector): all ranks choose the same elements without talking to each other.
    - `fixed_size` (selector): exactly `count` elements are chosen for any values; else that is the most.
    - `linear` (codec): payloads of all ranks may be summed before decoding, so they ride an all-reduce.
    - `lossless` (codec): decode(encode(x)) == x for every finite x.
    - `unbiased` (codec): E decode(encode(x)) == x over the draws of `ctx.private()`.
    - `covers` (codec): every element travels, so that without a memory nothing is forgotten but what is below
      the range of the payload's type.
    - `may_overflow` (codec, exchange): a finite x can have an image or a mean that is not finite (a narrow
      payload type, sums over a matrix).
    - `total` (codec, exchange): any bytes of the payload's size decode, alike on all ranks, and `add_decoded`
      never raises for what is in them. Of an exchange, x was final before the last payload came. So no rank
      can fail alone any more, and the status vote goes with that payload instead of after it, which saves a
      latency.
    - `conserves` (exchange): the mean over ranks of their inputs is the returned mean plus the mean of the
      unsent parts.
    - `in_place` (exchange): `mean` may be x itself, and nothing is left to remember.
    - `asks_optimizer` (exchange): how much may be lost follows from `ExchangeContext.replicas`; without an
      optimizer, nothing is.
    - `grain` (exchange): boundaries may fall on multiples of this many elements or, if it is
      `gradwire.unit.parameters.WHOLE`, between parameters.
    - `cycle` (exchange): in as many steps, from a multiple of them on, every unit travels once, and rests
      otherwise.
    - `travels` (exchange): the share of bytes announced `at_most` that travels, as far as it was seen. No
      promise: it depends on the values, and only predictions go by it.

    >>> Laws(linear=True, contractive=True).may_overflow
    False
    """

    contractive: bool = False
    stays_on_device: bool = False
    fixed_rounds: bool = False
    repeats: bool = False
    shared: bool = False
    fixed_size: bool = False
    linear: bool = False
    lossless: bool = False
    unbiased: bool = False
    covers: bool = False
    may_overflow: bool = False
    total: bool = False
    conserves: bool = True
    in_place: bool = False
    asks_optimizer: bool = False
    grain: int = 1
    cycle: int = 1
    travels: float = 1.0


class Lawful(Protocol):
    """A selector, a codec or an exchange."""

    @property
    def laws(self) -> Laws: ...


def phase_of(part: Lawful, ctx: ExchangeContext) -> Hashable | None:
    """The phase of a selector, codec or exchange. In all steps of a phase, a unit's collectives are the same.

    So `count`, `payload` and `rounds` return what they did in an earlier step of the phase, in which nothing
    else of the context has changed than the step, what is unsent and what is kept. What promises
    `fixed_rounds` has one phase. Others may have a method `phase(ctx)`: a function of step, unit, seed and
    world, and of what is kept alike on all ranks. `None` means that there is none, so that they are to be
    asked in every step.

    >>> from gradwire.exchange.dense import dense
    >>> from gradwire.exchange.low_rank import acp_sgd
    >>> contexts = [ExchangeContext(step, unit=0, rank=0, world=2) for step in range(3)]
    >>> [[phase_of(each, ctx) for ctx in contexts] for each in (dense(), acp_sgd(order="paper"))]
    [[(), (), ()], [True, False, True]]
    """
    if part.laws.fixed_rounds:
        return ()
    phase: Callable[[ExchangeContext], Hashable | None] | None = getattr(part, "phase", None)
    return None if phase is None else phase(ctx)


def joint_phase(*phases: Hashable | None) -> Hashable | None:
    """The phase of something that has several parts with phases; `None` if any of these is `None`."""
    return None if None in phases else phases


def formerly(module: str, name: str) -> Callable[[str], type[Laws]]:
    """The `__getattr__` of a module in which `Laws` had another `name`: a warning, and the class itself."""

    def found(wanted: str) -> type[Laws]:
        if wanted != name:
            raise AttributeError(f"module {module!r} has no attribute {wanted!r}")
        warnings.warn(f"{module}.{name} is now gradwire.laws.Laws", DeprecationWarning, stacklevel=2)
        return Laws

    return found
