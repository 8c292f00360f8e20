"""Boundaries of units in a flat buffer, and of groups of tensors.

The first functions return the inner boundaries of a flat buffer, as element offsets; most take the sizes of
its parameters, in order. The others group tensors in ready order: boundary k lies between tensors k and k +
1, counted from one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from gradwire.planning.collectives import Sends, messages_of, total_time
from gradwire.planning.costs import NOMINAL, NOMINAL_ELEMENT_S, Link, Network

LARGEST = 25 << 18
"""Elements in 25 MB of float32."""


def even_boundaries(sizes: Sequence[int], unit_elements: int) -> tuple[int, ...]:
    """Equal units of at most `unit_elements` elements, which need not end where parameters end.

    >>> even_boundaries((2, 8), 4)
    (3, 6)
    """
    return _even(sum(sizes), unit_elements)


def largest_unit(*, stays_on_device: bool) -> int:
    """Elements of a unit at most, unless its recipe sets its size. On all ranks, and by sizes alone.

    - On the host: 25 MB of float32, as DDP's buckets. More units would add messages, fewer would hide less of
      the work of codecs.
    - Of what stays on a device: 64 MiB of float32. A unit of `int8` kept the host for 1.2 ms beside an H200
      (28 November 2026), whatever its size, and the device for less. At a byte for an element, a link of
      100 Gbit/s takes 1.3 ms for 2^24 elements. So up to that rate the link sets the pace of large units, and
      not the host. Larger ones would gain little, and codes of a unit, and often its mean, take memory.

    The ramp of `ramped_boundaries` and `fitted_boundaries` stays, so the first unit still leaves early, and
    little is left to hide the last one.

    >>> [largest_unit(stays_on_device=stays) for stays in (False, True)]
    [6553600, 16777216]
    >>> [len(ramped_boundaries((124_000_000,), largest=each)) + 1 for each in (25 << 18, 1 << 24)]
    [22, 9]
    """
    return 1 << 24 if stays_on_device else LARGEST


def layer_boundaries(sizes: Sequence[int]) -> tuple[int, ...]:
    """Boundaries, in elements, that make a unit of every parameter.

    >>> layer_boundaries((2, 5, 3))
    (2, 7)
    """
    return tuple(accumulate(sizes[:-1]))


def one_unit(_sizes: Sequence[int]) -> tuple[int, ...]:
    """One unit, without boundaries: a single selection over the whole gradient, without overlap.

    >>> one_unit((600, 400))
    ()
    """
    return ()


def whole_layer_boundaries(sizes: Sequence[int]) -> tuple[int, ...]:
    """`ramped_boundaries`, each moved to the nearest end of a parameter, so that none is divided.

    >>> ramped_boundaries((60_000, 20_000, 20_000)), whole_layer_boundaries((60_000, 20_000, 20_000))
    ((37500, 75000, 93750), (60000, 80000))
    """
    ends = list(accumulate(sizes, initial=0))
    return tuple(
        sorted(
            {min(ends, key=lambda end: abs(end - boundary)) for boundary in ramped_boundaries(sizes)}
            - {0, ends[-1]}
        )
    )


def fixed_boundaries(sizes: Sequence[int], boundaries: Sequence[int], numel: int) -> tuple[int, ...]:
    """The planned `boundaries` for a flat buffer of `numel` elements; another flat buffer, of another dtype
    say, is one unit.

    >>> fixed_boundaries((2, 8), (6,), numel=10), fixed_boundaries((4,), (6,), numel=10)
    ((6,), ())
    """
    return tuple(boundaries) if sum(sizes) == numel else ()


def _even(numel: int, unit_elements: int) -> tuple[int, ...]:
    parts = max(1, -(-numel // unit_elements))
    return tuple(numel * part // parts for part in range(1, parts))


PHASED_RAMP = (2 / 16, 6 / 16, 10 / 16, 13 / 16, 15 / 16)
_RAMPS = ((2, 8, 13, 15), (4, 10, 14), (6, 12), (8,), ())
"""Inner edges in sixteenths of a flat buffer. The wire idles until the first unit is ready, and nothing is
left to hide the last one, so both are small. Each ramp ends in a unit of half the size of the next one's."""
_SHORT_RAMP = (6, 12, 15)

_BYTES = Network(Link(0.0, NOMINAL.beta_s))

Announced = Callable[[int], Sequence[Sends]]
"""The collectives of the elements from here to the end of a flat buffer, sent as one unit."""


def ramped_boundaries(
    sizes: Sequence[int], largest: int = LARGEST, smallest: int = 1 << 12, small: int = 1 << 20
) -> tuple[int, ...]:
    """Boundaries for an exchange that overlaps with the backward pass: small units at both ends, large ones
    in between.

    Each collective costs a latency and CPU time, so there are few units: 2, 6, 5, 2 and 1 sixteenths of the
    flat buffer. Units above `largest` elements are divided (`largest_unit`). The cost of a collective does
    not shrink with the flat buffer (1 ms of CPU time on a busy core). So a flat buffer of up to `small`
    elements gets four units of 6, 6, 3 and 1 sixteenths, and one of less than 16 times `smallest` gets at
    most two.

    >>> ramped_boundaries((1600,), largest=500, smallest=100, small=1000)
    (200, 500, 800, 1300, 1500)
    >>> ramped_boundaries((1600,), smallest=100)
    (600, 1200, 1500)
    """
    numel = sum(sizes)
    if numel < 16 * smallest:
        return _even(numel, max(numel // 2 + 1, smallest))
    return _ramped(numel, _SHORT_RAMP if numel <= small else _RAMPS[0], largest)


def fitted_boundaries(
    numel: int, announced: Announced, world: int, largest: int = LARGEST
) -> tuple[int, ...]:
    """Boundaries of as many units as pay for their collectives, for an exchange that overlaps with the
    backward pass.

    Communication of the last unit cannot be hidden. One more boundary halves that unit, but adds the messages
    of another unit, whose processor time the computation loses. So the number of units grows, up to five, as
    long as bytes and arithmetic of the last unit take longer than its messages. All three follow from the
    announced collectives and nominal costs, so that boundaries do not depend on a clock. Units above
    `largest` elements are divided (`largest_unit`).

    >>> from gradwire.planning.collectives import Transfer
    >>> [fitted_boundaries(1 << 20, lambda _: [Transfer("all_reduce", kb * 1e3)], world=2) for kb in (5, 50)]
    [(524288,), (131072, 524288, 851968, 983040)]
    >>> [fitted_boundaries(1 << 20, lambda _: [Transfer("all_reduce", kb * 1e3)], world=4) for kb in (5, 50)]
    [(), (131072, 524288, 851968, 983040)]
    """
    world = max(world, 2)  # a rank alone sends nothing, and is cut as the smallest world is
    for ramp in _RAMPS:
        last = numel * ramp[-1] // 16 if ramp else 0
        sends = announced(last)
        work_s = (numel - last) * NOMINAL_ELEMENT_S + total_time(sends, world, _BYTES)
        if work_s > messages_of(sends, world) * NOMINAL.alpha_s:
            break
    return _ramped(numel, ramp, largest)


def coarse_boundaries(numel: int) -> tuple[tuple[int, ...], ...]:
    """Five units, or fewer, down to one, however large they are: for links whose delay outweighs bytes.

    >>> coarse_boundaries(16)
    ((2, 8, 13, 15), (4, 10, 14), (6, 12), (8,), ())
    """
    return tuple(_ramped(numel, ramp, max(numel, 1)) for ramp in _RAMPS)


def _ramped(numel: int, ramp: Sequence[int], largest: int) -> tuple[int, ...]:
    boundaries: list[int] = []
    for start, stop in pairwise([0, *(numel * edge // 16 for edge in ramp), numel]):
        boundaries += [start + boundary for boundary in _even(stop - start, largest)]
        boundaries.append(stop)
    return tuple(boundaries[:-1])


def phased_boundaries(
    sizes: Sequence[int], interval: int, edges: Sequence[float] = PHASED_RAMP
) -> tuple[int, ...]:
    """Boundaries for an interval I: every phase gets one unit of each segment, spread over the backward pass.

    Unit t belongs to phase (-t) mod I, and each segment is divided into I equal units, so all phases carry
    the same bytes. Segments end at the shares `edges` of all elements. The default segments are 2, 4, 4, 3, 2
    and 1 sixteenths: the last ones are small because less of the backward pass is left to overlap with.

    >>> phased_boundaries((320,), interval=2)
    (20, 40, 80, 120, 160, 200, 230, 260, 280, 300, 310)
    >>> phased_boundaries((320,), interval=2, edges=(0.75,))
    (120, 240, 280)
    """
    numel = sum(sizes)
    ends = [0, *(int(numel * edge) for edge in edges), numel]
    bounds = [
        start + (stop - start) * part // interval
        for start, stop in pairwise(ends)
        for part in range(1, interval + 1)
    ]
    return tuple(bounds[:-1])


Boundaries = tuple[int, ...]


def layer_wise(tensors: int) -> Boundaries:
    """A group for every tensor."""
    return tuple(range(1, tensors))


def even_groups(tensors: int, parts: int) -> Boundaries:
    """Groups of equally many tensors, whatever their sizes: MergeComp's naive split.

    >>> even_groups(7, 3)
    (2, 4)
    """
    parts = max(1, min(parts, tensors))
    return tuple(tensors * part // parts for part in range(1, parts))


def element_boundaries(boundaries: Boundaries, numel: Sequence[int]) -> tuple[int, ...]:
    """`boundaries` between tensors of `numel` elements each, as boundaries between elements, which a flat
    buffer takes."""
    ends = list(accumulate(numel, initial=0))
    return tuple(ends[boundary] for boundary in boundaries)
