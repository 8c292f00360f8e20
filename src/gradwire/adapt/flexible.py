"""Which ratio and which collective, again whenever the link or the gradient changes.

Tyagi and Swany 2024, "Flexible communication for optimal distributed learning over unpredictable networks",
sections III-C and III-D. Differences from the paper: the link is measured in band, by two small all-reduces
every few steps, seldom while steps take as long as they did; the gain of all candidates comes from one
histogram of the live gradient and not from ten iterations of each; a choice must come out twice in a row
before it is followed, unless it was tried just before, because a single probe may have been disturbed. Ways
are compared by what is really sent and how: the library's all-gather goes round a ring, which takes N−1
latencies and not log N, and places are coded. What a way takes beyond that, such as messages that wait for
their announcement, or hops in Python on cores that compute, no model knows: whenever steps take another
time than they did, every way is tried for a few steps, and what it took there is added. And by default the
ratio with the most gain per second of the step is taken: a knee point scales every objective over the
front, so where time rises linearly with the ratio, a link half as fast would change nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from gradwire.plan import Observed, Watched
from gradwire.plan.ar_topk import ALL_GATHER, RING, TREE
from gradwire.plan.collectives import Sends, algorithm_of, fastest, total_time
from gradwire.plan.costs import Link, Network
from gradwire.plan.ratio import Candidate, knee, pareto_front

Rule = Literal["progress", "knee"]
"""The most gain per second of the step; or the knee of compression time, communication time and 1/gain."""

WAYS = (ALL_GATHER, RING, TREE)
PROBES = (1, 16384)
"""Elements of the two all-reduces: one that is all latency, and one whose bytes show."""
FEW = 3
"""Steps from which it is told what one takes."""
CALM = 4
"""One in so many looks is followed by probes while nothing changes: on far links they take as long as a
step."""
VALUE_BYTES = 4
LEAD = 0.05
"""By how much another collective, or another ratio's progress, must be better: two that come to the same
would alternate, since a probe is never twice the same."""


@dataclass(frozen=True)
class Choice:
    """A share of the elements, and the collective that carries it."""

    ratio: float
    way: str


Rounds = Callable[[Choice], Sequence[Sends]]
"""All collectives of a step under a choice."""


@dataclass(frozen=True)
class _Basis:
    """What a plan was made from."""

    link: Link
    gain: float

    def has_changed(self, now: _Basis, link_change: float, gain_change: float) -> bool:
        return (
            _moved(now.link.alpha_s, self.link.alpha_s, link_change)
            or _moved(now.link.beta_s, self.link.beta_s, link_change)
            or _moved(now.gain, self.gain, gain_change)
        )


def _moved(now: float, then: float, by: float) -> bool:
    return abs(now - then) > by * max(then, 1e-12)


class Flexible:
    """Sees looks (energy, then what of it each of `ratios` would send) and the durations of `PROBES`.

    `rounds` names what would be sent under each choice, by the algorithms that run. Thresholds are the shares
    by which latency or bandwidth (`link_change`) or the gain at the ratio in use (`gain_change`) must move
    before anything is planned anew, and the time of a step (`link_change`) before ways are tried again; the
    paper searches again at 10 % of the gain, and publishes none for the link.
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
        self._links: deque[Link] = deque(maxlen=3)
        self._gains: dict[float, float] = {}
        self._compress_s: dict[float, float] = {}
        self._steps_s: deque[float] = deque(maxlen=5)
        self._basis: _Basis | None = None
        self._pending: Choice | None = None
        self._untried: list[str] = []
        self._took: dict[str, tuple[Choice, float]] = {}
        self._more_s: dict[str, float] = {}
        self._usual_s, self._have_moved = 0.0, False
        self._begin()

    def observe(self, shown: Observed) -> Choice | None:
        """Take a step; the new choice, if there is one. It counts from then on."""
        if shown.compressed_s > 0.0:
            self._compress_s[self.now.ratio] = shown.compressed_s
            self._steps_s.append(shown.previous_s)
        if shown.looked is not None and shown.looked[0] > 0.0:
            energy, *sent = shown.looked
            self._gains = {ratio: part / energy for ratio, part in zip(self._ratios, sent, strict=True)}
        if shown.probed_s is None or self._world == 1:
            return None
        self._links.append(self._link(*shown.probed_s))
        return self._decide() if self._gains else None

    def _link(self, short_s: float, long_s: float) -> Link:
        """α and β from two all-reduces in a ring."""
        ring = algorithm_of("all_reduce")
        more_bytes = (PROBES[1] - PROBES[0]) * VALUE_BYTES * ring.volume(self._world)
        return Link(short_s / ring.messages(self._world), max(long_s - short_s, 1e-9) / more_bytes)

    def _decide(self) -> Choice | None:
        if len(self._steps_s) < FEW:
            return None
        if self._steps_have_changed():
            self._begin()
        if self.tries:
            self._took[self.now.way] = self.now, median(self._steps_s)
            if self._untried:
                return self._take(Choice(self.now.ratio, self._untried.pop(0)))
            self._compare(Network(self.link))
        basis = _Basis(self.link, self._gain(self.now.ratio))
        if self._basis and not self._basis.has_changed(basis, self._link_change, self._gain_change):
            self._pending = None
            return None
        choice = self._plan(Network(basis.link))
        if self._basis and choice != self.now and choice != self._pending:
            self._pending = choice
            return None
        self._basis, self._pending = _Basis(basis.link, self._gain(choice.ratio)), None
        return None if choice == self.now else self._take(choice)

    def _begin(self) -> None:
        """What ways took says nothing any more: all are tried, from what was measured last."""
        self._took, self._more_s, self._basis, self._pending = {}, {}, None, None
        self._untried = [way for way in WAYS if way != self.now.way]
        self._links = deque(list(self._links)[-1:], maxlen=self._links.maxlen)

    def _take(self, choice: Choice) -> Choice:
        self._steps_s.clear()  # those were of the other choice
        self._usual_s, self._have_moved = 0.0, False
        self.now = choice
        return choice

    def _steps_have_changed(self) -> bool:
        """Whether, twice in a row, steps under this choice take another time than at first: another link."""
        now_s, before = median(self._steps_s), self._have_moved
        self._usual_s = self._usual_s or now_s
        self._have_moved = _moved(now_s, self._usual_s, self._link_change)
        return before and self._have_moved

    @property
    def tries(self) -> bool:
        """Whether ways are being tried, and nothing is planned yet."""
        return self._basis is None

    def _compare(self, network: Network) -> None:
        """Seconds that each way was found to take beyond its model; all else in a step is the same."""
        rest_s = {
            way: took_s - self._sending(choice, network) for way, (choice, took_s) in self._took.items()
        }
        self._more_s = {way: seconds - min(rest_s.values()) for way, seconds in rest_s.items()}

    def _sending(self, choice: Choice, network: Network) -> float:
        return total_time(self._rounds(choice), self._world, network)

    @property
    def link(self) -> Link:
        """The middle of the last three measurements."""
        return Link(median(each.alpha_s for each in self._links), median(each.beta_s for each in self._links))

    def _gain(self, ratio: float) -> float:
        """At the nearest candidate."""
        return self._gains[min(self._gains, key=lambda known: abs(known - ratio))]

    def _plan(self, network: Network) -> Choice:
        way_of, candidates = {}, []
        for ratio in self._ratios:
            way_of[ratio], seconds = self._fastest(ratio, network)
            candidates.append(Candidate(ratio, self._compressing(ratio), seconds, self._gains[ratio]))
        best = knee(pareto_front(candidates)) if self._rule == "knee" else self._progress(candidates, network)
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
        return self._compress_s[min(self._compress_s, key=lambda used: abs(used - ratio))]
