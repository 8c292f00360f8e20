"""Dense steps before a choice among recipes: some are measured and recorded, then recipes are examined."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from gradwire.arena import ParameterSpec
from gradwire.engine.arrival import Arrival
from gradwire.engine.decider import Measuring, Rows
from gradwire.engine.examining import STEPS, Examination, Found, Recording
from gradwire.engine.forecast import best_cut, forecast_by
from gradwire.engine.layout import Layout
from gradwire.engine.predicted import main_lane
from gradwire.engine.step import Step
from gradwire.engine.surroundings import Surroundings
from gradwire.measure.clock import BackwardWatch
from gradwire.planning.costs import NOMINAL_CODEC
from gradwire.planning.facts import Facts
from gradwire.planning.forecast import Forecast
from gradwire.planning.predict import FREE
from gradwire.recipes import Composition, Decision
from gradwire.recipes.parse import steady

_LOG = logging.getLogger("gradwire")


class Choosing(Measuring):
    """Decides among `decision.candidates` once those worth it are examined (`gradwire.engine.examining`).

    `layout_of` says how parameters would travel under a composition.
    """

    def __init__(
        self,
        decision: Decision,
        specs: Sequence[ParameterSpec],
        around: Surroundings,
        watch: BackwardWatch,
        layout_of: Callable[[Composition, torch.device], Layout],
    ) -> None:
        super().__init__(decision, specs, around, watch)
        self._layout_of = partial(_imagined, layout_of)
        for composition in _built(decision.candidates).values():
            around.compile_for(self._layout_of(composition))  # now, and not in a step that is timed
        self._recording = Recording(specs, around.comm.world)
        self._known: Facts | None = None
        self._examined: tuple[str, ...] = ()
        self._examination: Examination | None = None

    @property
    def apart(self) -> bool:
        """The profiler's answer until it has all facts; then false."""
        return self._examination is None and self.profiler.apart

    def take(self, step: Step, arrival: Arrival) -> None:
        """Record some of the gradients."""
        if self._examination is not None:
            return
        try:
            self._recording.take(arrival, step.scale)
        except BaseException as error:  # of memory, for instance: peers wait for the exchange
            step.fail(error, f"recording of buffer {arrival.index}", self.around.control.rank)

    def row(self, step: Step, link: tuple[float, ...]) -> tuple[float, ...]:
        """The profiler's row; then what has been found so far."""
        return super().row(step, link) if self._examination is None else self._examination.row

    def observe(self, step: Step, rows: Rows, *, committed: bool) -> Composition | None:
        """As `Measuring`, and then wait for what is examined."""
        if self._examination is not None:
            found = self._examination.observe(rows)
            return None if found is None else self._conclude(found)
        self._recording.end(committed=committed)
        return super().observe(step, rows, committed=committed)

    def decide(self, facts: Facts) -> Composition | None:
        """Forecast all candidates and begin to examine those worth it; the decision where none is."""
        built = _built((*self.decision.candidates, *self.decision.foreseen))
        forecasts: dict[str, Forecast] = {}
        if facts.backward is not None and facts.network is not None:
            for text, own in built.items():
                built[text], forecasts[text] = self._forecast(facts, text, own)
        facts = replace(facts, forecasts=forecasts, recut={text: each.text for text, each in built.items()})
        self._examined = tuple(self.decision.examine(facts))
        if not self._examined:
            return super().decide(facts)
        self._known = facts
        recorded = self._recording.gathered(self.around.comm, self.around.control)
        if not recorded:  # nothing but vectors, or no step that counted
            return self._conclude(len(self._examined) * [None])
        self._examination = Examination(
            [built[text] for text in self._examined],
            self._recording,
            recorded,
            self.around.comm,
            self.around.placement.memory,
        )
        return None

    def _forecast(self, facts: Facts, text: str, own: Composition) -> tuple[Composition, Forecast]:
        """The cuts of `text`, and the predicted time of a step of it while codecs cost nothing.

        Cuts are compared with a nominal codec, because in fewer units less of its work hides.
        """

        def price(composition: Composition) -> Forecast:
            found = forecast_by(facts, self._layout_of(composition), self.specs)
            assert found is not None, "ready times and links are known"
            return found.coded(NOMINAL_CODEC)

        main = main_lane(self._layout_of(own), self.specs, facts.bucket_cuts)
        composition, found = best_cut(text, own, main, price)
        return composition, found.coded(FREE)

    def _conclude(self, found: Sequence[Found | None]) -> Composition | None:
        """Decide by what was found. A recipe that could not be examined is missing in `Facts.fidelity`."""
        assert self._known is not None, "what is examined has been forecast"
        forecasts = self._known.forecasts
        known = {text: each for text, each in zip(self._examined, found, strict=True) if each is not None}
        coded = {text: forecasts[text].coded(each.codec) for text, each in known.items()}
        kept = {text: each.fidelity for text, each in known.items()}
        # Where steps are short there are many, and trials get theirs all the same.
        steps = self._known.steps + (0 if self._examination is None else min(self._examination.steps, STEPS))
        return super().decide(
            replace(self._known, forecasts={**forecasts, **coded}, fidelity=kept, steps=steps)
        )


def _built(texts: Sequence[str]) -> dict[str, Composition]:
    """The candidates that can be built: a user's recipe may have taken the name of one of ours."""
    found = {}
    for text in texts:
        try:
            found[text] = steady(text, "candidate")
        except ValueError as error:
            _LOG.warning("not considered: %s", error)
    return found


def _imagined(layout_of: Callable[[Composition, torch.device], Layout], composition: Composition) -> Layout:
    return layout_of(composition, torch.device("meta"))
