"""Choice of a ratio and a collective, repeated when the link or the gradient changes.

Tyagi and Swany 2023, "Flexible communication for optimal distributed learning over unpredictable networks",
sections 3-D and 3-E.

Differences from the paper:

- The steps' own collectives measure the link. It has changed when their times deviate by more than their
  noise (`gradwire.planning.change_detection`).
- One histogram of the live gradient gives the gain of all candidates, instead of ten iterations for each. If
  one rank selects for all, the gain is multiplied by the share that its exchange was measured to send.
- Collectives are compared by the bytes and algorithms that really run. The library's all-gather is a ring of
  N − 1 latencies, not log N, and indices are coded. No model covers the rest: messages wait to be announced,
  and hops in Python run on busy cores. So every collective is tried for a few steps, at first and when step
  times change over the same link. The difference to the model is added.
- The default rule is the ratio with the most gain per second of the step. A knee point scales every objective
  over the front. If time is linear in the ratio, a link half as fast would then change nothing.
- By default, a change of the gain starts a new plan. In the paper, it starts new measurements of gains only;
  a search begins when the link changes (`trigger="link"` here).

If latencies hide the time of the bytes, the bandwidth is not resolved. Then collectives are tried, not
compared by a model. No smaller ratio is chosen, since bytes do not bound the step. A larger one is chosen
only if it pays on the slowest link that would still hide the present bytes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from gradwire.planning.change_detection import WINDOW, ChangeDetector
from gradwire.planning.collectives import Sends, fastest, total_time
from gradwire.planning.costs import Link, Network
from gradwire.planning.facts import StepObservation, Watched
from gradwire.planning.ratio import ALL_GATHER, RING, TREE, RatioCandidate, knee, pareto_front

Rule = Literal["progress", "knee"]
"""The most gain per second of the step; or the knee of compression time, communication time and 1/gain."""

Trigger = Literal["any", "link"]
"""Causes of a new plan: a change of the link, the gain or the time of a step; or of the link alone, as in the
paper."""

WAYS = (ALL_GATHER, RING, TREE)
FEW = 3
"""Number of steps from which the time of a step is estimated."""
LOOKS = 5
"""Number of measurements from which the sent share of the gradient, or a change of it, is estimated."""
RESOLVED = 0.1
"""Share of the collectives' time that bytes must take for the bandwidth to count as known."""
LEAD = 0.05
"""Share by which another collective, or another ratio's progress, must be better: two equal ones would
alternate."""


@dataclass(frozen=True)
class Choice:
    """A share of the elements, and the collective that carries it.

    >>> str(Choice(0.01, "ring"))
    '1.00% by ring'
    """

    ratio: float
    way: str

    def __str__(self) -> str:
        return f"{self.ratio:.2%} by {self.way}"


Rounds = Callable[[Choice], Sequence[Sends]]
"""All collectives of a step under a choice."""


@dataclass(frozen=True)
class LinkEstimate:
    """The link as measured by the collectives of a choice. `resolved` tells whether its bandwidth is known.

    If it is not, `link.beta_s` is that of the slowest possible link.
    """

    link: Link
    resolved: bool

    def __str__(self) -> str:
        rate = f"{8e-6 / self.link.beta_s:.0f} Mbit/s"
        told = rate if self.resolved else f"bandwidth not resolved, {rate} or more"
        return f"{self.link.alpha_s * 1e3:.2f} ms and {told}"


def seen_by(rounds: Sequence[Sends], world: int, link: Link) -> LinkEstimate:
    """The link as seen by a step's collectives.

    >>> from gradwire.planning.collectives import Transfer
    >>> rounds = [Transfer("all_reduce", 1e6, "ring")]  # 6 ms of latencies, 1.5 MB on the busiest link
    >>> print(seen_by(rounds, 4, Link(1e-3, 8e-8)))
    1.00 ms and 100 Mbit/s
    >>> print(seen_by(rounds, 4, Link(1e-3, 8e-11)))
    1.00 ms and bandwidth not resolved, 18000 Mbit/s or more
    """
    waits_s = total_time(rounds, world, Network(Link(link.alpha_s, 0.0)))
    volume = total_time(rounds, world, Network(Link(0.0, 1.0)))
    hidden_s = RESOLVED / (1.0 - RESOLVED) * waits_s / volume
    return LinkEstimate(Link(link.alpha_s, max(link.beta_s, hidden_s)), link.beta_s > hidden_s)


class Flexible:
    """Decides from measurements of the gradient, step times and their link.

    A measurement has the energy of the gradient, then the energy that each of `ratios` would send. `rounds`
    lists the collectives of a choice, with their algorithms. A new plan is made when the link changes, or
    when the sent share of the gradient changes by the share `gain_change`. Collectives are tried again when
    the step time changes and the link does not. With the `trigger` "link", only the first of these counts.
    The paper publishes no threshold for the link. It measures the candidates' gains again after a change of
    10 %; here every measurement contains them.
    """

    def __init__(
        self,
        now: Choice,
        watched: Watched,
        ratios: Sequence[float],
        rounds: Rounds,
        rule: Rule = "progress",
        gain_change: float = 0.1,
        trigger: Trigger = "any",
    ) -> None:
        self._trigger = trigger
        self.now, self._ratios, self._rounds, self._rule = now, tuple(ratios), rounds, rule
        self._world, self._gain_change = watched.world, gain_change
        self.why = ""
        """Reason for the last choice, in a few words, with the choice."""
        self._gains: dict[float, float] = {}
        self._led: deque[float] = deque(maxlen=WINDOW)
        self._compress_s: deque[float] = deque(maxlen=WINDOW)
        self._steps_s: deque[float] = deque(maxlen=WINDOW)
        self._sent = self._level_of_gain()
        self._untried: list[str] = []
        self._took: dict[str, tuple[Choice, float]] = {}
        self._more_s: dict[str, float] = {}
        self._is_due = True
        self._try_all()

    def observe(self, shown: StepObservation) -> Choice | None:
        """Take the numbers of a step. Returns the next choice if it, or its reason, is new."""
        if shown.compressed_s > 0.0:
            self._compress_s.append(shown.compressed_s)
            self._steps_s.append(shown.previous_s)
        if self._world == 1:
            return None
        has_another_gain = self._look(shown)
        if shown.step_change_s is not None or shown.link_change is not None:
            self._steps_s = deque(list(self._steps_s)[-FEW:], maxlen=WINDOW)  # the others were before that
        if shown.step_change_s is not None and self._trigger == "any":
            self._try_all()
        elif shown.link_change is not None or (has_another_gain and self._trigger == "any"):
            self._is_due = True
        if not (self._is_due and self._gains and len(self._steps_s) >= FEW):
            return None
        if self.tries:
            return None if shown.looked is None else self._try()
        # A line through the origin has found no latency, and takes all overhead for bytes.
        if shown.link is None or shown.link.alpha_s == 0.0:
            return None
        return self._decide(shown.link, is_new=shown.link_change is not None)

    def _look(self, shown: StepObservation) -> bool:
        """Take a measurement. Returns True if the sent share of the gradient has changed."""
        if shown.looked is None or not 0.0 < shown.looked[0] < math.inf:
            return False
        energy, *own = shown.looked
        self._gains = {ratio: part / energy for ratio, part in zip(self._ratios, own, strict=True)}
        sent = self._gains[self._nearest(self.now.ratio)]
        if shown.left is not None and shown.left < energy:
            really = 1.0 - shown.left / energy
            if self.now.way != ALL_GATHER and sent > 0.0:
                self._led.append(min(really / sent, 1.0))
            sent = really
        return sent > 0.0 and self._sent.add(sent)

    def _level_of_gain(self) -> ChangeDetector:
        return ChangeDetector(self._gain_change, window=LOOKS, soonest=LOOKS)

    def _try_all(self) -> None:
        """Forget the times of all ways, and try each again."""
        self._took, self._more_s, self._is_due = {}, {}, True
        self._untried = [way for way in WAYS if way != self.now.way]

    @property
    def tries(self) -> bool:
        """True while collectives are being tried."""
        return self._is_due and len(self._took) < len(WAYS)

    def _try(self) -> Choice:
        """Try the next way. After the last one, adopt the fastest until the link is known."""
        self._took[self.now.way] = self.now, median(self._steps_s)
        if self._untried:
            choice = Choice(self.now.ratio, self._untried.pop(0))
            return self._adopt(choice, f"trying {choice}")
        best, _took_s = min(self._took.values(), key=lambda took: took[1])
        return self._adopt(best, f"{best} took the least of all ways; the link is not known yet")

    def _decide(self, link: Link, *, is_new: bool) -> Choice | None:
        seen = seen_by(self._rounds(self.now), self._world, link)
        if is_new and not seen.resolved:
            self._try_all()
            return self._try()
        was_tried = not self._more_s
        if was_tried:
            self._more_s = self._compared(Network(seen.link))
        choice = self._plan(seen)
        # A larger ratio may show the bandwidth that a smaller one did not.
        self._is_due = choice.ratio > self.now.ratio and not seen.resolved
        if choice == self.now and not was_tried:
            return None
        return self._adopt(choice, f"{seen} call for {choice}")

    def _adopt(self, choice: Choice, why: str) -> Choice:
        """Make `choice` the present one, and forget the step times and gains of the one before."""
        self._steps_s.clear()
        self._sent = self._level_of_gain()
        self.now, self.why = choice, why
        return choice

    def _compared(self, network: Network) -> dict[str, float]:
        """Measured step time of each way minus the model's, in seconds; 0 for the way with the smallest."""
        rest_s = {
            way: took_s - self._sending(choice, network) for way, (choice, took_s) in self._took.items()
        }
        return {way: seconds - min(rest_s.values()) for way, seconds in rest_s.items()}

    def _sending(self, choice: Choice, network: Network) -> float:
        return total_time(self._rounds(choice), self._world, network)

    def _nearest(self, ratio: float) -> float:
        return min(self._gains, key=lambda known: abs(known - ratio))

    def _own_gain(self, ratio: float) -> float:
        """The gain if each rank chooses for itself."""
        return self._gains[self._nearest(ratio)]

    def _share(self, way: str) -> float:
        """Share of `_own_gain` that `way` sends. It is below 1 where a leader chooses for all ranks."""
        return median(self._led) if self._led and way != ALL_GATHER else 1.0

    def _plan(self, seen: LinkEstimate) -> Choice:
        network = Network(seen.link)
        best = self._knee(network) if self._rule == "knee" else self._progress(network)
        if not seen.resolved and best.ratio < self.now.ratio:
            return Choice(self.now.ratio, self._fastest(self.now.ratio, network, self._more_s)[0])
        return best

    def _knee(self, network: Network) -> Choice:
        way_of, candidates = {}, []
        for ratio in self._ratios:
            way_of[ratio], seconds = self._fastest(ratio, network, self._more_s)
            gain = self._own_gain(ratio) * self._share(way_of[ratio])
            candidates.append(RatioCandidate(ratio, self._compressing(), seconds, gain))
        best = knee(pareto_front(candidates)).ratio
        return Choice(best, way_of[best])

    def _progress(self, network: Network) -> Choice:
        """The ratio and collective with the most gain per second of a step.

        A leader's choice sends only a share of the gain that each rank's own choice would send. Its step time
        counts as longer by the inverse of this share. The present choice stays if it is within `LEAD` of the
        best one.
        """
        known_s = self._sending(self.now, network) + self._more_s.get(self.now.way, 0.0)
        others_s = max(median(self._steps_s) - known_s, self._compressing())
        found: dict[Choice, float] = {}
        for ratio in self._ratios:
            more_s = {}
            for way in WAYS:
                beside_s = self._more_s.get(way, 0.0)
                step_s = others_s + self._sending(Choice(ratio, way), network) + beside_s
                more_s[way] = beside_s + (1.0 / self._share(way) - 1.0) * step_s
            way, seconds = self._fastest(ratio, network, more_s)
            found[Choice(ratio, way)] = self._own_gain(ratio) / max(others_s + seconds, 1e-12)
        best = max(found, key=lambda choice: found[choice])
        now = min(found, key=lambda choice: abs(choice.ratio - self.now.ratio))
        return now if found[now] > (1.0 - LEAD) * found[best] else best

    def _fastest(self, ratio: float, network: Network, more_s: Mapping[str, float]) -> tuple[str, float]:
        possible = {way: self._rounds(Choice(ratio, way)) for way in WAYS}
        return fastest(possible, self._world, network, LEAD, self.now.way, more_s)

    def _compressing(self) -> float:
        """Seconds of compressing, at any ratio: most go into reading elements.

        Measured ratio by ratio, times that differ by noise alone would span the whole scale of a knee.
        """
        return median(self._compress_s) if self._compress_s else 0.0
