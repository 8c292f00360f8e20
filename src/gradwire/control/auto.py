"""Dense steps before a choice among recipes: all candidates are made ready, and predicted in the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from gradwire.control.forecast import best_cut, coarser, forecast_by, main_lane
from gradwire.control.warmup import WarmupController, cost_of
from gradwire.kernels import compiler
from gradwire.measure.clock import BackwardWatch
from gradwire.measure.codec import codec_cost
from gradwire.measure.probe import slowest
from gradwire.placement import Placement
from gradwire.planning.costs import FREE, NOMINAL_CODEC
from gradwire.planning.facts import Facts
from gradwire.planning.step_time import Forecast
from gradwire.recipes import Composition, Decision
from gradwire.recipes.parse import short, steady
from gradwire.step.arena import ParameterSpec
from gradwire.step.environment import EngineEnvironment
from gradwire.step.layout import Layout

_LOG = logging.getLogger("gradwire")
_BUDGET_S = 0.1
"""Seconds that the codec of a candidate is timed for, once per machine."""
_UNKNOWN = 4 * (math.inf,)


class AutoController(WarmupController):
    """Decides among `decision.candidates`, whose kernels are compiled and whose codecs are timed beforehand.

    `layout_of` says how parameters would travel under a composition.
    """

    def __init__(
        self,
        decision: Decision,
        specs: Sequence[ParameterSpec],
        env: EngineEnvironment,
        placement: Placement,
        watch: BackwardWatch,
        layout_of: Callable[[Composition, torch.device], Layout],
    ) -> None:
        super().__init__(decision, specs, env, placement, watch)
        # All is built now, and not in a step that is timed, or for which others wait.
        built = _built(decision.candidates)
        self.may_follow = tuple(built.values())
        self._ways = {text: self._ways_of(text, own, layout_of) for text, own in built.items()}
        self._codecs = {text: self._made_ready(*ways[0]) for text, ways in self._ways.items()}
        with compiler.foreseeing():
            for text, own in _built(decision.foreseen).items():
                self._ways[text] = self._ways_of(text, own, layout_of)

    def _ways_of(
        self, text: str, own: Composition, layout_of: Callable[[Composition, torch.device], Layout]
    ) -> tuple[_Way, ...]:
        """The composition that `text` builds, and it in fewer units, each with its layout."""
        meta = torch.device("meta")
        first = _Way(own, layout_of(own, meta))
        others = coarser(text, main_lane(first.layout, self.specs, ()))
        return (first, *(_Way(each, layout_of(each, meta)) for each in others))

    def _made_ready(self, composition: Composition, layout: Layout) -> tuple[float, ...]:
        """Compile the kernels of a candidate; the four numbers of its codec's cost, infinite if unknown."""
        self.env.compile_for(layout)
        memory = self.env.placed(layout).memory
        try:
            cost = codec_cost(composition.exchange, composition.text, memory, budget_s=_BUDGET_S)
        except Exception as error:
            # It is left out. Not a warning, which a user may have made an error.
            _LOG.warning(
                "%s is left out, as its codec could not be timed: %r", short(composition.text), error
            )
            return _UNKNOWN
        return cost.encode.base_s, cost.encode.slope_s, cost.decode.base_s, cost.decode.slope_s

    def decide(self, facts: Facts) -> Composition | None:
        """Forecast all candidates, by the slowest rank's codecs, and decide. A collective."""
        texts = list(self._codecs)
        numbers = slowest(self.env.control, [each for text in texts for each in self._codecs[text]])
        costs = {text: cost_of(numbers[4 * place : 4 * place + 4]) for place, text in enumerate(texts)}
        recut: dict[str, str] = {}
        forecasts: dict[str, Forecast] = {}
        if facts.backward is not None and facts.network is not None:
            with compiler.foreseeing():
                for text, ways in self._ways.items():
                    # The codec of what is only foreseen has not been timed.
                    if (cost := costs.get(text, FREE)) is not None:
                        way, found = self._forecast(facts, ways)
                        recut[text], forecasts[text] = way.composition.text, found.coded(cost)
        return super().decide(replace(facts, forecasts=forecasts, recut=recut))

    def _forecast(self, facts: Facts, ways: Sequence[_Way]) -> tuple[_Way, Forecast]:
        """The best way to cut a recipe, and the predicted time of a step of it.

        Ways are compared with a nominal codec, because in fewer units less of its work hides.
        """

        def price(way: _Way) -> Forecast:
            cut = self.env.placed(way.layout).granularity
            found = forecast_by(facts, way.layout, self.specs, cut)
            assert found is not None, "ready times and links are known"
            return found.coded(NOMINAL_CODEC)

        own, *others = ways
        return best_cut(own, price(own), others, price)


class _Way(NamedTuple):
    """A composition, and how parameters would travel under it."""

    composition: Composition
    layout: Layout


def _built(texts: Sequence[str]) -> dict[str, Composition]:
    """The candidates that can be built: a user's recipe may have taken the name of one of ours."""
    found = {}
    for text in texts:
        try:
            found[text] = steady(text, "candidate")
        except ValueError as error:
            _LOG.warning("not considered: %s", error)
    return found
