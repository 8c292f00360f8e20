"""The type of recipes, and the decorator that makes one of a function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor

from gradwire.comm.base import Round
from gradwire.exchange.base import WHOLE, Exchange, first_busy_step
from gradwire.memory import NoMemory
from gradwire.planning.change_detection import THRESHOLD
from gradwire.planning.cuts import even_cuts, fitted_cuts, ramped_cuts
from gradwire.planning.facts import Facts, StepObservation, Watched
from gradwire.recipes.catalogue import MODULES
from gradwire.step.arena import ParameterSpec, slots_of, units_of
from gradwire.step.context import ExchangeContext

if TYPE_CHECKING:  # loaded by what chooses
    from gradwire.planning.choice import ChoiceRow

Cutter = Callable[[Sequence[int]], Sequence[int]]
"""A function from the sizes of a lane's parameters, in order, to its inner cut points, ascending."""

Judge = Callable[[StepObservation], "Composition | None"]
"""A function of each step's observations. It returns the composition to run next, or `None` to go on."""


@dataclass(frozen=True)
class Watch:
    """The observations that a composition wants of its steps, and the judge of them.

    Every `every`-th committed step `look` makes `looks` numbers of each unit's error-fed gradient.
    `judge(watched)` makes a judge, which sees only what all ranks have agreed on and must be a function of
    that alone. It hears if the time of link or steps changes by the share `link_change`. A watch that `ends`
    tries things out: the recipe is not decided before it is done.
    """

    judge: Callable[[Watched], Judge]
    every: int = 10
    look: Callable[[Tensor], Sequence[float]] | None = None
    looks: int = 0
    ends: bool = False
    link_change: float = THRESHOLD


@dataclass(frozen=True)
class Composition:
    """The exchange of a lane and its cuts. `why` is one sentence for the report.

    Without a `cutter`, units of whole matrices are cut while a cut is worth its messages (`fitted_cuts`). In
    other recipes, a unit is also the range of a choice of elements or of a scale, so other cuts would change
    the result. There the cuts are fixed (`ramped_cuts`). In rounds of local steps all gradients come at once.
    More units would hide nothing there and cost latencies, so there are as few as `unit_elements` allows. A
    lane of fewer than `whole_below` elements is one unit.

    `tiny` is the recipe of vectors and tiny tensors beside it, unless a policy says otherwise. With a `watch`
    it may be followed by another, at a verdict, which takes over everything unsent. `text` parses back to the
    composition, because checkpoints carry it; what `register` decorates need not give it. One that also runs
    on a rank `alone` hands the optimizer something else than gradients, such as signs. One with a `next`
    decision is dense: its steps are measured until the decision has what it needs. `table` are the recipes
    among which it was chosen, for the report. Rank 0 logs a `warning` when it begins to run.
    """

    exchange: Exchange
    cutter: Cutter | None = None
    why: str = "as configured"
    tiny: str = "dense"
    text: str = ""
    watch: Watch | None = None
    alone: bool = False
    next: Decision | None = None
    table: tuple[ChoiceRow, ...] = ()
    warning: str = ""
    whole_below: int = 0

    def cuts(
        self, specs: Sequence[ParameterSpec], world: int, unit_elements: int | None = None
    ) -> Sequence[int]:
        """Inner cut points, ascending, of a lane of `specs` among `world` ranks.

        They follow from these arguments alone.

        >>> import torch
        >>> from gradwire.recipes import recipe
        >>> specs = [ParameterSpec(f"{n}", (256, 1024), torch.float32, 1 << 18) for n in range(4)]
        >>> [len(recipe(text).build().cuts(specs, world=4)) + 1 for text in ("powersgd", "int8", "star_topk")]
        [1, 4, 1]
        >>> len(recipe("int8").build().cuts(specs, world=4, unit_elements=1 << 20)) + 1
        1
        """
        sizes = [spec.numel for spec in specs]
        if self.cutter is None and unit_elements is not None:
            return even_cuts(sizes, unit_elements)
        if self.cutter is None and sum(sizes) < self.whole_below:
            return ()
        if self.cutter is not None or self.exchange.laws.grain != WHOLE:
            return (self.cutter or ramped_cuts)(sizes)
        numel = sum(sizes)
        return fitted_cuts(numel, partial(_announced, self.exchange, specs, world), world)


def _announced(
    exchange: Exchange, specs: Sequence[ParameterSpec], world: int, start: int
) -> tuple[Round, ...]:
    """The rounds of the elements from `start` to the end as one unit, in a step of the steady state."""
    memory = exchange.memory or NoMemory()
    last = units_of(slots_of(specs), (start,), exchange.laws.grain)[-1]
    step = first_busy_step(exchange, last.numel, world)
    ctx = ExchangeContext(step, 0, 0, world, parts=last.parts, narrow=specs[0].narrow_for(memory))
    return exchange.rounds(last.numel, specs[0].type_for(memory), ctx)


@dataclass(frozen=True)
class Decision:
    """A decision after dense steps have been measured: `decide` makes the next composition from their facts.

    It may need more than the times of such steps. Facts then have the cost of the codec of `about`
    (`Facts.codec`), how often each weight is used (`uses`, `Facts.uses`), or how long `whole_steps` take, in
    which communication overlaps with the backward pass (`Facts.dense_s`).

    One that chooses among other recipes names these `candidates`, whose kernels are compiled before any step.
    It gets their forecasts (`Facts.forecasts`), and those of recipes that it has only `foreseen` and may not
    take.

    With `whole_steps`, it may also be made before any step is taken apart: `hidden` gets the shares of whole
    steps in which the slowest rank waited for communication, and makes what runs if they are small enough;
    `None` to go on measuring. There are no facts then.

    A run that goes on from a checkpoint begins with what was decided before: `resume` makes of it what runs.
    """

    decide: Callable[[Facts], Composition]
    about: Composition | None = None
    uses: bool = False
    whole_steps: bool = False
    candidates: tuple[str, ...] = ()
    foreseen: tuple[str, ...] = ()
    hidden: Callable[[Sequence[float]], Composition | None] = lambda _exposed: None
    resume: Callable[[Composition], Composition] = lambda composition: composition


Builder = Callable[..., Composition]


@dataclass(frozen=True)
class RecipeEntry:
    """A registered recipe: its builder's signature is its list of options."""

    name: str
    build: Builder

    @property
    def options(self) -> dict[str, Any]:
        """Option names with their defaults."""
        parameters = inspect.signature(self.build).parameters.values()
        return {parameter.name: parameter.default for parameter in parameters}

    @property
    def summary(self) -> str:
        """First line of the builder's docstring."""
        return (inspect.getdoc(self.build) or "").split("\n")[0]

    def says(self, heading: str) -> str:
        """The builder's docstring under "Travels", "Paper" or "Use when"; empty if there is none.

        >>> from gradwire.recipes import entries
        >>> next(entry for entry in entries() if entry.name == "dense").says("Travels")
        'every value.'
        """
        text = inspect.getdoc(self.build) or ""
        found = re.search(rf"^{heading}: (.*(?:\n +.*)*)", text, re.MULTILINE)
        return " ".join(found[1].split()) if found else ""


REGISTRY: dict[str, RecipeEntry] = {}
"""Recipes whose module has been imported, and those of users."""


B = TypeVar("B", bound=Builder)


def register(build: B) -> B:
    """Make `build` a recipe under its own name; every option needs a default.

    Its docstring says in a line each what "Travels", from which "Paper", and "Use when".

    >>> from gradwire.codec.select.topk import top_k
    >>> from gradwire.codec.sparse import sparse
    >>> from gradwire.exchange.compose import remember, warm
    >>> from gradwire.exchange.payloads import gather
    >>> @register
    ... def gentle_topk(ratio: float = 0.05, steps: int = 100) -> Composition:
    ...     '''Top-k after some dense steps.'''
    ...     exchange = remember(warm(steps, gather(sparse(top_k(ratio)))))
    ...     return Composition(exchange)
    >>> REGISTRY.pop("gentle_topk").options
    {'ratio': 0.05, 'steps': 100}
    >>> gentle_topk(0.1).text
    'gentle_topk(ratio=0.1, steps=100)'
    """
    name, signature = build.__name__, inspect.signature(build)

    @wraps(build)
    def named(*args: Any, **options: Any) -> Composition:
        built = build(*args, **options)
        if built.text:
            return built
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        inside = ", ".join(f"{key}={value!r}" for key, value in bound.arguments.items())
        return replace(built, text=f"{name}({inside})" if inside else name)

    # A user's recipe replaces one of ours, even if ours is imported after it.
    if name not in REGISTRY or build.__module__ != MODULES.get(name):
        REGISTRY[name] = RecipeEntry(name, named)
    return cast(B, named)
