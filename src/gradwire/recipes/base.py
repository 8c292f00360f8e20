"""What a recipe is, and the one list of all of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradwire.arena import Cutter
from gradwire.exchange import Exchange
from gradwire.plan import Facts, ramped_cuts


@dataclass(frozen=True)
class Composition:
    """What runs in a lane: an exchange, and where to cut. `why` is one sentence for the report.

    `tiny` is the recipe of vectors and tiny tensors beside it, unless a policy says otherwise.
    """

    text: str
    exchange: Exchange
    cutter: Cutter = ramped_cuts
    why: str = "as configured"
    tiny: str = "dense"


Decide = Callable[[Facts], Composition]
"""What an adaptive recipe makes of the facts that dense steps have measured."""

Builder = Callable[..., Composition | Decide]


@dataclass(frozen=True)
class Entry:
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
        """What the builder's docstring says under "Travels", "Paper" or "Use when"; empty if nothing.

        >>> from gradwire.recipes import entries
        >>> next(entry for entry in entries() if entry.name == "dense").says("Travels")
        'every value.'
        """
        text = inspect.getdoc(self.build) or ""
        found = re.search(rf"^{heading}: (.*(?:\n +.*)*)", text, re.MULTILINE)
        return " ".join(found[1].split()) if found else ""


REGISTRY: dict[str, Entry] = {}


def register(build: Builder) -> Builder:
    """Make `build` a recipe under its own name; every option needs a default.

    The composition's text must parse back to it, because checkpoints carry it.

    >>> from gradwire.codec import sparse, top_k
    >>> from gradwire.exchange import gather, remember, warm
    >>> @register
    ... def gentle_topk(ratio: float = 0.05, steps: int = 100) -> Composition:
    ...     '''Top-k after some dense steps.'''
    ...     exchange = remember(warm(steps, gather(sparse(top_k(ratio)))))
    ...     return Composition(f"gentle_topk(ratio={ratio}, steps={steps})", exchange)
    >>> REGISTRY.pop("gentle_topk").options
    {'ratio': 0.05, 'steps': 100}
    """
    REGISTRY[build.__name__] = Entry(build.__name__, build)
    return build
