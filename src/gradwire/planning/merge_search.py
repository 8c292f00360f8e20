"""MergeComp's own search for cuts, by trying: Algorithm 2 (Wang et al. 2021, section 4.3, appendix C).

It sees only the seconds that a grouping takes, so it works on a cost model and on iterations that are
timed as they run; fewer than 50 of them are tried for two groups. `merge.optimal_cuts` finds better ones
from the costs.

Differences from the paper: two groups are bisected on the sign of F(k+1) − F(k), which is exact, because
F is the larger of a rising and a falling function of k. (The authors' code compares F(k) with F(k +
step), and misses the minimum in some 8 % of small cases.) α has no published value.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations

from gradwire.planning.groups import Cuts

Seconds = Callable[[Cuts], float]

_LEVEL = 1 - 1e-12
"""Above rounding (1e-16), below what a single element among 10^9 changes."""


def search_cuts(seconds: Seconds, tensors: int, most: int = 2, alpha: float = 0.0) -> Cuts:
    """Algorithm 2: the best grouping found into 1, 2, … `most` groups, Y of the paper.

    When one group more makes it worse, the one before is returned; when it gains less than the share
    `alpha`, the new one. O(N^(Y−2) log N) calls of `seconds`, none of them twice.

    >>> calls = []
    >>> search_cuts(lambda cuts: calls.append(cuts) or abs(sum(cuts) - 700), tensors=1000)
    (700,)
    >>> len(calls) < 50
    True
    """
    if most < 1 or alpha < 0.0:
        raise ValueError(f"most={most} must be at least 1, and alpha={alpha} at least 0")
    known = cache(seconds)
    best: Cuts = ()
    for groups in range(2, min(most, tensors) + 1):
        found = _best_of(known, tensors, groups)
        if known(found) > known(best):
            return best
        gain = known(best) - known(found)
        if gain < alpha * known(best):
            return found
        best = found
    return best


def _best_of(seconds: Seconds, tensors: int, groups: int) -> Cuts:
    """All choices of the first cuts, each with its bisected last one."""
    heads = combinations(range(1, tensors - 1), groups - 2)
    return min((bisected(seconds, tensors, head) for head in heads), key=seconds)


def bisected(seconds: Seconds, tensors: int, head: Cuts = ()) -> Cuts:
    """`head` and one more cut behind it, where `seconds` stops falling; O(log N) calls."""
    low, high = (head[-1] if head else 0) + 1, tensors - 1
    while low < high:
        middle = (low + high) // 2
        # Where F rises, tensors that are ready together leave it level, and rounding must not send us right.
        if seconds((*head, middle + 1)) < seconds((*head, middle)) * _LEVEL:
            low = middle + 1
        else:
            high = middle
    return (*head, low)
