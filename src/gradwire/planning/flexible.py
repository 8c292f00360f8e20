"""Chooses a ratio and a collective, again whenever the link or the gradient changes.

Tyagi and Swany 2023, "Flexible communication for optimal distributed learning over unpredictable networks",
sections 3-D and 3-E. Differences from the paper: the link is what the steps' own collectives find, and
has changed when their times leave it by more than they vary (`gradwire.planning.change_detection`); the gain
of all candidates comes from one histogram of the live gradient and not from ten iterations of each; where one
rank chooses for all, the gain is a smaller one, by the share that its exchange was found to send. Ways are
compared by what is really sent and how: the library's all-gather goes round a ring, which takes N−1 latencies
and not log N, and places are coded. No model knows the time that a way takes beyond that: messages wait for
their announcement, hops in Python run on cores that compute. So every way is tried for a few steps, at first
and when steps take another time than they did over the same link, and what it took there is added. By default
the ratio with the most gain per second of the step is taken: a knee point scales every objective over the
front, so where time rises linearly with the ratio, a link half as fast would change nothing. And by default a
change of the gain plans anew, too. In the paper it makes gains be measured again, and a search begins only
when the link has changed: that is the trigger "link" here.

Where latencies hide how long the bytes take, the bandwidth is not resolved. Then ways are tried instead of
compared by a model; no smaller ratio is taken, since bytes are not what takes the time; and a larger one only
if it pays even on the slowest link on which the bytes of now would be hidden.
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
"""Steps from which it is told what one takes."""
LOOKS = 5
"""Looks from which it is told what is sent of the gradient, or that this has changed."""
RESOLVED = 0.1
"""The bandwidth is known where bytes take this share of what the collectives of a step take."""
LEAD = 0.05
"""By how much another collective, or another ratio's progress, must be better: two that come to the same
would alternate."""


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
    """The link as the collectives of a choice find it; `resolved` tells whether its bandwidth is known.

    Where it is not, `link.beta_s` is the slowest at which that could be.
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
    """Sees looks (energy, then what of it each of `ratios` would send), what steps take, and their link.

    `rounds` names what would be sent under each choice, by the algorithms that run. All is planned anew when
    the link has changed, or when what is sent of the gradient has, by the share `gain_change`; ways are tried
    again when the time of a step has changed and the link has not. With the `trigger` "link" only the first
    of these counts. The paper publishes no threshold for the link, and measures the candidates' gains again
    at 10 % of the gain; here every look has them.
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
        """Of the last choice, with it, in a few words."""
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
        """Take a step; what is to run from now on, if that or the reason for it is new."""
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
        """Take what a look has found; whether what is sent is another share than it was."""
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
        """Whether ways are being tried."""
        return self._is_due and len(self._took) < len(WAYS)

    def _try(self) -> Choice:
        """The next way; after the last one the fastest, until the link under it is known."""
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
        """Forget times and bytes of steps: they are those of the other choice."""
        self._steps_s.clear()
        self._sent = self._level_of_gain()
        self.now, self.why = choice, why
        return choice

    def _compared(self, network: Network) -> dict[str, float]:
        """Seconds that each way was found to take beyond its model; all else in a step is the same."""
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
        """The share of that gain in a way: a leader's choice is not the best one for the other ranks."""
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
        """The most gain per second; what sends a part of the gain takes as much longer for all of it."""
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
