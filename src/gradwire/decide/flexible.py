"""Which ratio and which collective, again whenever the link or the gradient changes.

Tyagi and Swany 2024, "Flexible communication for optimal distributed learning over unpredictable networks",
sections III-C and III-D. Differences from the paper: the link is what the steps' own collectives find, by
medians over many steps, and has changed when these have moved by more than they vary; the gain of all
candidates comes from one histogram of the live gradient and not from ten iterations of each; a choice must
come out twice in a row before it is followed, because one gradient is not like the next. Ways are compared by
what is really sent and how: the library's all-gather goes round a ring, which takes N−1 latencies and not
log N, and places are coded. What a way takes beyond that, such as messages that wait for their announcement,
or hops in Python on cores that compute, no model knows: whenever steps take another time than they did, every
way is tried for a few steps, and what it took there is added. And by default the ratio with the most gain per
second of the step is taken: a knee point scales every objective over the front, so where time rises linearly
with the ratio, a link half as fast would change nothing.

Where latencies hide how long the bytes take, the bandwidth is not resolved. Then ways are tried instead of
compared by a model; no smaller ratio is taken, since bytes are not what takes the time; and a larger one only
if it pays even on the slowest link on which the bytes of now would be hidden.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from gradwire.planning.collectives import Sends, fastest, total_time
from gradwire.planning.costs import Link, Network
from gradwire.planning.facts import Observed, Watched
from gradwire.planning.ratio import ALL_GATHER, RING, TREE, Candidate, knee, pareto_front
from gradwire.planning.spread import WINDOW, has_moved

Rule = Literal["progress", "knee"]
"""The most gain per second of the step; or the knee of compression time, communication time and 1/gain."""

WAYS = (ALL_GATHER, RING, TREE)
FEW = 3
"""Steps from which it is told what one takes."""
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
class Seen:
    """The link as the collectives of a choice find it; `resolved` tells whether its bandwidth is known.

    Where it is not, `link.beta_s` is the slowest at which that could be.
    """

    link: Link
    resolved: bool

    def __str__(self) -> str:
        rate = f"{8e-6 / self.link.beta_s:.0f} Mbit/s"
        told = rate if self.resolved else f"bandwidth not resolved, {rate} or more"
        return f"{self.link.alpha_s * 1e3:.2f} ms and {told}"


def seen_by(rounds: Sequence[Sends], world: int, link: Link) -> Seen:
    """What a step's collectives tell of the link.

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
    return Seen(Link(link.alpha_s, max(link.beta_s, hidden_s)), link.beta_s > hidden_s)


@dataclass(frozen=True)
class _Basis:
    """What a plan was made from."""

    link: Link
    gain: float

    def link_has_changed(self, now: _Basis, by: float) -> bool:
        latency = _moved(now.link.alpha_s, self.link.alpha_s, by)
        return latency or _moved(now.link.beta_s, self.link.beta_s, by)

    def gain_has_changed(self, now: _Basis, by: float) -> bool:
        return _moved(now.gain, self.gain, by)


def _moved(now: float, then: float, by: float) -> bool:
    return abs(now - then) > by * max(then, 1e-12)


class Flexible:
    """Sees looks (energy, then what of it each of `ratios` would send), what steps take, and their link.

    `rounds` names what would be sent under each choice, by the algorithms that run. Thresholds are the shares
    by which latency or bandwidth (`link_change`) or the gain at the ratio in use (`gain_change`) must move
    before anything is planned anew, and the time of a step (`link_change`) before ways are tried again; the
    paper searches again at 10 % of the gain, and publishes none for the link.

    What was planned from is compared with what is seen under the same choice only: overheads that no model
    knows make another choice find another link.
    """

    def __init__(
        self,
        now: Choice,
        watched: Watched,
        ratios: Sequence[float],
        rounds: Rounds,
        rule: Rule = "progress",
        link_change: float = 0.2,
        gain_change: float = 0.1,
    ) -> None:
        self.now, self._ratios, self._rounds, self._rule = now, tuple(ratios), rounds, rule
        self._world = watched.world
        self._link_change, self._gain_change = link_change, gain_change
        self.why = ""
        """Of the last choice, with it, in a few words."""
        self._gains: dict[float, float] = {}
        self._compress_s: dict[float, deque[float]] = {}
        self._steps_s: deque[float] = deque(maxlen=WINDOW)
        self._usual_s: tuple[float, ...] = ()
        self._basis: _Basis | None = None
        self._pending: Choice | None = None
        self._untried: list[str] = []
        self._took: dict[str, tuple[Choice, float]] = {}
        self._more_s: dict[str, float] = {}
        self._is_due = True
        self._begin()

    def observe(self, shown: Observed) -> Choice | None:
        """Take a step; what is to run from now on, if that or the reason for it is new."""
        if shown.compressed_s > 0.0:
            self._compress_s.setdefault(self.now.ratio, deque(maxlen=WINDOW)).append(shown.compressed_s)
            self._steps_s.append(shown.previous_s)
            if len(self._steps_s) == WINDOW and not self._usual_s:
                self._usual_s = tuple(self._steps_s)
        if shown.looked is None or not shown.looked[0] > 0.0 or self._world == 1:
            return None
        energy, *sent = shown.looked
        self._gains = {ratio: part / energy for ratio, part in zip(self._ratios, sent, strict=True)}
        if len(self._steps_s) < FEW:
            return None
        if self._usual_s and has_moved(self._usual_s, self._steps_s, self._link_change):
            self._begin()
        if self.tries:
            return self._try()
        # A line through the origin has found no latency, and takes all overhead for bytes.
        if shown.link is None or shown.link.alpha_s == 0.0:
            return None
        return self._decide(shown.link)

    def _begin(self) -> None:
        """What ways took says nothing any more: all are tried."""
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
            return self._take(choice, f"trying {choice}")
        best, _took_s = min(self._took.values(), key=lambda took: took[1])
        return self._take(best, f"{best} took the least of all ways; the link is not known yet")

    def _decide(self, link: Link) -> Choice | None:
        seen = seen_by(self._rounds(self.now), self._world, link)
        basis = _Basis(seen.link, self._gain(self.now.ratio))
        if self._is_due:
            self._compare(Network(seen.link))
            choice = self._plan(seen)
            # A larger ratio may show the bandwidth that a smaller one did not.
            self._is_due = choice.ratio > self.now.ratio and not seen.resolved
            return self._take(choice, f"{seen} call for {choice}")
        if self._basis is None:
            self._basis = basis
        another_link = self._basis.link_has_changed(basis, self._link_change)
        if another_link and not seen.resolved:
            self._begin()
            return self._try()
        if not another_link and not self._basis.gain_has_changed(basis, self._gain_change):
            self._pending = None
            return None
        choice = self._plan(seen)
        if choice == self.now:
            self._basis, self._pending = basis, None
            return None
        if choice != self._pending:
            self._pending = choice
            return None
        return self._take(choice, f"{seen} call for {choice}")

    def _take(self, choice: Choice, why: str) -> Choice:
        """What steps took, and the link as they found it, were those of the other choice."""
        self._steps_s.clear()
        self._usual_s, self._basis, self._pending = (), None, None
        self.now, self.why = choice, why
        return choice

    def _compare(self, network: Network) -> None:
        """Seconds that each way was found to take beyond its model; all else in a step is the same."""
        rest_s = {
            way: took_s - self._sending(choice, network) for way, (choice, took_s) in self._took.items()
        }
        self._more_s = {way: seconds - min(rest_s.values()) for way, seconds in rest_s.items()}

    def _sending(self, choice: Choice, network: Network) -> float:
        return total_time(self._rounds(choice), self._world, network)

    def _gain(self, ratio: float) -> float:
        """At the nearest candidate."""
        return self._gains[min(self._gains, key=lambda known: abs(known - ratio))]

    def _plan(self, seen: Seen) -> Choice:
        network, way_of, candidates = Network(seen.link), {}, []
        for ratio in self._ratios:
            way_of[ratio], seconds = self._fastest(ratio, network)
            candidates.append(Candidate(ratio, self._compressing(ratio), seconds, self._gains[ratio]))
        best = knee(pareto_front(candidates)) if self._rule == "knee" else self._progress(candidates, network)
        if not seen.resolved and best.ratio < self.now.ratio:
            return Choice(self.now.ratio, self._fastest(self.now.ratio, network)[0])
        return Choice(best.ratio, way_of[best.ratio])

    def _progress(self, candidates: Sequence[Candidate], network: Network) -> Candidate:
        """What else a step takes is what it took without its codec and the wire."""
        known_s = self._compressing(self.now.ratio) + self._sending(self.now, network)
        rest_s = max(median(self._steps_s) - known_s - self._more_s.get(self.now.way, 0.0), 0.0)

        def per_second(each: Candidate) -> float:
            return each.gain / max(rest_s + each.compress_s + each.communicate_s, 1e-12)

        best = max(candidates, key=per_second)
        now = min(candidates, key=lambda each: abs(each.ratio - self.now.ratio))
        return now if per_second(now) > (1.0 - LEAD) * per_second(best) else best

    def _fastest(self, ratio: float, network: Network) -> tuple[str, float]:
        possible = {way: self._rounds(Choice(ratio, way)) for way in WAYS}
        return fastest(possible, self._world, network, LEAD, self.now.way, self._more_s)

    def _compressing(self, ratio: float) -> float:
        """As measured at the nearest ratio that has been used: most of it is looking through all elements."""
        if not self._compress_s:
            return 0.0
        return median(self._compress_s[min(self._compress_s, key=lambda used: abs(used - ratio))])
