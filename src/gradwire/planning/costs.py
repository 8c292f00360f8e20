"""Types of measured costs: straight lines, links, processor cores, and times at which gradients become ready.

`gradwire.measure` produces them and `gradwire.planning` consumes them. Neither imports the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Line:
    """B + γ·x seconds for x elements (MergeComp, Wang et al. 2021, section 4.3, assumption 5).

    >>> Line(base_s=1.0, slope_s=0.5)(4)
    3.0
    """

    base_s: float
    slope_s: float

    def __call__(self, x: float) -> float:
        """Seconds for x elements: base_s + slope_s · x."""
        return self.base_s + self.slope_s * x


@dataclass(frozen=True)
class CodecCost:
    """The costs of a unit of x elements on one core: encoding it, and decoding the payload of one rank."""

    encode: Line
    decode: Line

    def slowed(self, times: float) -> CodecCost:
        """Costs where everything takes `times` as long."""
        lines = (self.encode, self.decode)
        return CodecCost(*(Line(times * each.base_s, times * each.slope_s) for each in lines))


NOTHING = Line(0.0, 0.0)
FREE = CodecCost(NOTHING, NOTHING)
"""A codec that takes no time."""


@dataclass(frozen=True)
class Cores:
    """Processor cores of one rank: its share of the machine's cores, and how many of them its computation
    keeps `busy`.

    If the share is unknown, cores are taken to be unlimited. The processor time assumed for collectives is
    multiplied by `overhead_factor`.
    """

    share: float | None = None
    busy: float = 0.0
    overhead_factor: float = 1.0

    @property
    def pace(self) -> float:
        """The share of a core that a thread of each rank gets when all ranks have work for one."""
        return 1.0 if self.share is None else min(1.0, self.share)

    def least_s(self, computing_s: float, work_s: float) -> float:
        """Seconds that these cores take at least for a computation of `computing_s` and other work.

        `work_s` is processor time.

        >>> Cores(share=1.0, busy=1.0).least_s(2.0, 0.5), Cores(share=4.0, busy=1.0).least_s(2.0, 0.5)
        (2.5, 0.625)
        >>> Cores().least_s(2.0, 0.5)
        0.0
        """
        return 0.0 if self.share is None else (self.busy * computing_s + work_s) / self.share


ENOUGH = Cores()
"""Cores that nothing has to wait for."""


LONG_S = 0.005
"""Round-trip time from which a link counts as long. On a long link, receives are posted ahead, so that a
message takes one latency and all messages of a rank leave at once; more connections are tried, too. Below
it, the 4 MB window of one connection allows more than 6.4 Gbit/s."""


@dataclass(frozen=True)
class Link:
    """Latency of one hop in seconds, and seconds per byte: 1/β of the papers is the bandwidth."""

    alpha_s: float
    beta_s: float
    at_once: bool = field(default=False, repr=False)
    """True if all messages of a collective leave at once, so that it takes one latency."""

    @property
    def is_long(self) -> bool:
        """True if a round trip takes `LONG_S` or more."""
        return 2.0 * self.alpha_s >= LONG_S


NOMINAL = Link(alpha_s=3e-4, beta_s=4e-8)
"""Stands for a link, and for the processor time of its messages, where nothing measured may be asked.

A message of a collective costs a rank a third of a millisecond of processor time on cores that compute (two
and four ranks on two cores, gloo). 200 Mbit/s lie in the middle, by ratios, of the 50 Mbit/s to 1 Gbit/s for
which compression is meant."""

NOMINAL_ELEMENT_S = 1e-9
"""The time to compensate, encode and decode an element on one core: 0.4 to 2 ns, by recipe."""

NOMINAL_CODEC = CodecCost(Line(0.0, NOMINAL_ELEMENT_S), Line(0.0, 0.0))
"""The assumed cost of a codec that has not been measured, for comparing boundaries."""


@dataclass(frozen=True)
class Network:
    """The links of a cluster: one for everything, or calibrated ones for some verbs."""

    link: Link
    calibrated: Mapping[str, Link] = field(default_factory=dict)

    def of(self, verb: str) -> Link:
        """Link for the collective `verb`: its own, if calibrated, else the common one."""
        return self.calibrated.get(verb, self.link)


@dataclass(frozen=True)
class BackwardTiming:
    """A backward pass: tensors in the order in which they become ready.

    `before_s` is what precedes it in a step (data, forward; T_before of COVAP); `ready_s` (tensors,) counts
    from the start of the backward pass, which ends at `total_s`; `numel` (tensors,) in elements.
    """

    before_s: float
    ready_s: tuple[float, ...]
    numel: tuple[int, ...]
    total_s: float
