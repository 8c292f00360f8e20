"""The type of recipes, and the decorator that makes one of a function."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from torch import Tensor

from gradwire.arguments import as_python
from gradwire.comm.base import Round
from gradwire.exchange.base import Exchange, first_busy_step
from gradwire.memory import NoMemory
from gradwire.planning.boundaries import LARGEST, even_boundaries, fitted_boundaries, ramped_boundaries
from gradwire.planning.change_detection import THRESHOLD
from gradwire.planning.facts import Facts, StepObservation, Watched
from gradwire.recipes.catalogue import MODULES
from gradwire.unit.context import ExchangeContext
from gradwire.unit.parameters import WHOLE, ParameterSpec, slots_of, units_of

if TYPE_CHECKING:  # loaded by what chooses
    from gradwire.planning.choice import ChoiceRow

Cutter = Callable[[Sequence[int]], Sequence[int]]
"""A function from the sizes of a flat buffer's parameters, in order, to its inner boundaries, ascending."""

Judge = Callable[[StepObservation], "Composition | None"]
"""A function of each step's observations. It returns the composition to run next, or `None` to go on."""


@dataclass(frozen=True)
class Watch:
    """A composition's measurements of its own steps, and their judge.

    Args:
        judge: a function from the sizes of the flat buffer to a judge. The judge sees only numbers on which
            ranks agree, and must depend on nothing else.
        every: steps between two measurements.
        look: the measurement: `looks` numbers of a unit's error-fed gradient (numel,).
        looks: the number of these.
        ends: True for a trial. The recipe counts as undecided until it has ended.
        link_change: the share by which the time of the link or of steps must change to be reported to the
            judge.
    """

    judge: Callable[[Watched], Judge]
    every: int = 10
    look: Callable[[Tensor], Sequence[float]] | None = None
    looks: int = 0
    ends: bool = False
    link_change: float = THRESHOLD


@dataclass(frozen=True)
class Composition:
    """The exchange of a flat buffer, with its boundaries; `build` of a recipe returns it.

    Without a `cutter`, units of whole matrices are divided while a boundary is worth its messages
    (`fitted_boundaries`). In other recipes, a unit is also the range of a selection or of a scale, so other
    boundaries would change the result; there the boundaries are fixed (`ramped_boundaries`). In rounds of
    local steps, all gradients come at once. More units would hide nothing and cost latencies, so there are as
    few as `unit_elements` allows.

    - `whole_below`: a flat buffer with fewer elements is one unit.
    - `tiny`: the recipe of vectors and tiny tensors, unless a policy says otherwise.
    - `watch`: may name the next composition, at a status vote. That one takes over all unsent gradient.
    - `text`: parses back to the composition; checkpoints contain it. Functions decorated by `register` need
      not set it.
    - `alone`: the composition also runs on a single rank, because it passes something else than gradients to
      the optimizer, such as signs.
    - `next`: a decision; the composition is dense, and its steps are measured until the decision has its
      facts.
    - `stays`: True if a recipe that chooses among others may not choose again, not even in a resumed run.
    - `table`: the recipes considered, for the report. `why`: one sentence for the report. `warning`: logged
      by rank 0 at the start.
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
    stays: bool = False

    def boundaries(
        self,
        specs: Sequence[ParameterSpec],
        world: int,
        unit_elements: int | None = None,
        largest: int = LARGEST,
    ) -> Sequence[int]:
        """Inner boundaries, in elements, ascending, of a flat buffer of `specs` among `world` ranks. They
        follow from the arguments alone.

        Without a cutter, `unit_elements` asks for units of about that size; `None` chooses them for overlap,
        of at most `largest` elements.

        >>> import torch
        >>> from gradwire.recipes import recipe
        >>> specs = [ParameterSpec(f"{n}", (256, 1024), torch.float32, 1 << 18) for n in range(4)]
        >>> built = [recipe(text).build() for text in ("powersgd", "int8", "star_topk")]
        >>> [len(each.boundaries(specs, world=4)) + 1 for each in built]
        [1, 4, 1]
        >>> len(recipe("int8").build().boundaries(specs, world=4, unit_elements=1 << 20)) + 1
        1
        """
        sizes = [spec.numel for spec in specs]
        if self.cutter is None and unit_elements is not None:
            return even_boundaries(sizes, unit_elements)
        if self.cutter is None and sum(sizes) < self.whole_below:
            return ()
        if self.cutter is not None:
            return self.cutter(sizes)
        if self.exchange.laws.grain != WHOLE:
            return ramped_boundaries(sizes, largest)
        numel = sum(sizes)
        if not numel:  # there is no unit to ask about
            return ()
        return fitted_boundaries(numel, partial(_announced, self.exchange, specs, world), world, largest)


def _announced(
    exchange: Exchange, specs: Sequence[ParameterSpec], world: int, start: int
) -> tuple[Round, ...]:
    """The rounds of the elements from `start` to the end of a flat buffer of `specs` as one unit, among
    `world` ranks in a step of the steady state.
    """
    memory = exchange.memory or NoMemory()
    last = units_of(slots_of(specs), (start,), exchange.laws.grain)[-1]
    step = first_busy_step(exchange, last.numel, world)
    ctx = ExchangeContext(step, 0, 0, world, parts=last.parts, narrow=specs[0].narrow_for(memory))
    return exchange.rounds(last.numel, specs[0].type_for(memory), ctx)


@dataclass(frozen=True)
class Decision:
    """Decision after measured dense steps: `decide` makes the next composition from their facts.

    A decision may request more facts than the times of steps: the codec cost of the recipe `about`
    (`Facts.codec`), the `uses` of each weight (`Facts.uses`), or the duration of `whole_steps`, in which
    communication overlaps with the backward pass (`Facts.dense_s`).

    A decision among other recipes lists them as `candidates`; their kernels are compiled before the first
    step. It gets their forecasts (`Facts.forecasts`), and those of recipes that are only `foreseen` and
    cannot be chosen.

    With `whole_steps`, `hidden` may decide before any step is timed in parts. It gets the shares of whole
    steps in which the slowest rank waited for communication, without facts. It returns the composition to run
    if they are small enough, else `None`.

    When a run resumes from a checkpoint, `resume` makes the composition from the text of the earlier
    decision.
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
    def meanings(self) -> dict[str, str]:
        """The meaning of each option, from the section "Args:" of the builder's docstring.

        >>> from gradwire.recipes import entries
        >>> next(entry for entry in entries() if entry.name == "oktopk").meanings
        {'ratio': 'share of the elements to send, above 0 and at most 1.'}
        """
        section = re.search(
            r"^Args:\n((?:(?: .*)?(?:\n|\Z))*)", inspect.getdoc(self.build) or "", re.MULTILINE
        )
        found = re.findall(r"^ {4}([\w, ]+): (.*(?:\n {5,}.*)*)", section[1] if section else "", re.MULTILINE)
        said = {name: " ".join(text.split()) for names, text in found for name in names.split(", ")}
        return {name: said.get(name, "") for name in self.options}

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

    Its docstring says in a line each what "Travels", from which "Paper", and "Use when". Its text has all
    options but keyword-only ones at their default. So an option that is added as keyword-only leaves the
    texts in saved states as they are.

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
    later = {key for key, each in signature.parameters.items() if each.kind is each.KEYWORD_ONLY}

    @wraps(build)
    def named(*args: Any, **options: Any) -> Composition:
        args, options = as_python(args), {key: as_python(each) for key, each in options.items()}
        built = build(*args, **options)  # first, as Python's error for a wrong argument names the function
        if built.text:
            return built
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        shown = {
            key: value
            for key, value in bound.arguments.items()
            if not (key in later and value == signature.parameters[key].default)
        }
        inside = ", ".join(f"{key}={value!r}" for key, value in shown.items())
        return replace(built, text=f"{name}({inside})" if inside else name)

    # A user's recipe replaces one of ours, even if ours is imported after it.
    if name not in REGISTRY or build.__module__ != MODULES.get(name):
        REGISTRY[name] = RecipeEntry(name, named)
    return cast(B, named)
