"""Dense steps before a choice among recipes: all candidates are made ready, and predicted in the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from gradwire.control.forecast import MainBuffer, best_boundaries, forecast_by_units, main_buffer
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
from gradwire.recipes.regroup import with_boundaries
from gradwire.step.environment import ReducerEnvironment
from gradwire.step.layout import Layout
from gradwire.unit.parameters import ParameterSpec

_LOG = logging.getLogger("gradwire")
_BUDGET_S = 0.1
"""Seconds that the codec of a candidate is timed for, once per machine."""
_UNKNOWN = 4 * (math.inf,)


class AutoController(WarmupController):
    """Controller that decides among `decision.candidates`; their kernels are compiled and their codecs timed
    beforehand.

    `layout_of` lays parameters out for another composition.
    """

    def __init__(
        self,
        decision: Decision,
        specs: Sequence[ParameterSpec],
        env: ReducerEnvironment,
        placement: Placement,
        watch: BackwardWatch,
        layout_of: Callable[[Composition, torch.device], Layout],
    ) -> None:
        super().__init__(decision, specs, env, placement, watch)
        # Build everything now, not in a step that is timed or that peers wait for.
        made = built(decision.candidates)
        self.may_follow = tuple(made.values())
        meta = torch.device("meta")
        self._layouts = {text: layout_of(own, meta) for text, own in made.items()}
        self._codecs = {text: self._made_ready(made[text], layout) for text, layout in self._layouts.items()}
        with compiler.foreseeing():
            for text, own in built(decision.foreseen).items():
                self._layouts[text] = layout_of(own, meta)

    def _made_ready(self, composition: Composition, layout: Layout) -> tuple[float, ...]:
        """Compile the kernels of a candidate; the four numbers of its codec's cost, infinite if unknown."""
        self.env.compile_for(layout)
        memory = self.env.placed(layout).memory
        try:
            cost = codec_cost(composition.exchange, composition.text, memory, budget_s=_BUDGET_S)
        except Exception as error:
            # The recipe is left out. Logged, not warned: users may turn warnings into errors.
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
                for text, layout in self._layouts.items():
                    # The codec of what is only foreseen has not been timed.
                    if (cost := costs.get(text, FREE)) is not None:
                        recut[text], found = self._forecast(facts, text, layout)
                        forecasts[text] = found.coded(cost)
        return super().decide(replace(facts, forecasts=forecasts, recut=recut))

    def _forecast(self, facts: Facts, text: str, layout: Layout) -> tuple[str, Forecast]:
        """Text of the recipe `text` with its best boundaries, and its forecast by the measured `facts`.
        `layout` is the one with its usual boundaries.

        Boundaries are compared with a nominal codec, because fewer units hide less of its work.
        """
        granularity = self.env.placed(layout).granularity
        main = main_buffer(layout, self.specs, facts.bucket_boundaries)

        def price(flat_buffer: MainBuffer) -> Forecast:
            found = forecast_by_units(facts, flat_buffer, granularity)
            assert found is not None, "ready times and links are known"
            return found.coded(NOMINAL_CODEC)

        boundaries, found = best_boundaries(main, price(main), price)
        return layout.main.text if boundaries is None else with_boundaries(
            text, boundaries, main.numel
        ).text, found


def built(texts: Sequence[str]) -> dict[str, Composition]:
    """The candidates that can be built: a user's recipe may have taken the name of one of ours."""
    found = {}
    for text in texts:
        try:
            found[text] = steady(text, "candidate")
        except ValueError as error:
            _LOG.warning("not considered: %s", error)
    return found
