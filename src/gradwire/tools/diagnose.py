"""Similarity of ranks: can one rank's selection of elements serve all ranks?

The figures of Chen et al. 2020 ("ScaleCom", section 2, figures 2 and 3, lemma 1, appendix A): cosine distance
between memories, Hamming distance between a rank's selection and the true top-k of the mean, overlap of their
histograms, rank correlation of magnitudes, and the contraction by each selection.

Differences from the paper: cosine distances are averaged over all pairs of ranks, not shown for two. The
other figures are averaged over all ranks as leaders, not given for the present one. The true top-k is that of
each unit, with as many elements as the selector chooses there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradwire.agreement.agree import damage, on_all_ranks, require_agreement, require_undamaged
from gradwire.codec.select.base import Selector
from gradwire.comm import Comm
from gradwire.exchange.base import Exchange, parts
from gradwire.memory import UNSENT
from gradwire.step.environment import ReducerEnvironment
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.step.step import Step
from gradwire.unit.context import ExchangeContext
from gradwire.unit.parameters import Unit

BINS_PER_OCTAVE = 4
SAMPLE = 1 << 20
"""At most this many elements are ranked by magnitude, evenly spaced: sorting more takes seconds."""


@dataclass(frozen=True)
class Diagnosis:
    """The comparison of ranks in one step; the same numbers on all. Those of a choice are `None` without one.

    - `memory_distance`: 1 - cosine of two ranks' memories after the step, 0 (alike) … 2, mean over pairs.
    - `spearman`: rank correlation of |own| and |mean| error-fed gradient, mean over ranks.
    - `hamming`: share of a rank's choice that is not in the true top-k of the mean (d/k of lemma 1).
    - `histogram_overlap`: common area of the histograms of |mean| over both choices.
    - `contraction`: ‖mean - C(mean)‖² / ‖mean‖² where a rank's choice is C; `best_contraction` of the true
      top-k. Lemma 1: in expectation contraction = hamming + (1 - hamming) · best_contraction at most.
    """

    step: int
    memory_distance: float
    spearman: float
    hamming: float | None = None
    histogram_overlap: float | None = None
    contraction: float | None = None
    best_contraction: float | None = None

    def __str__(self) -> str:
        text = f"step {self.step}: memories {self.memory_distance:.2f} apart, Spearman {self.spearman:.2f}"
        if self.hamming is None:
            return text
        return (
            f"{text}, choice {self.hamming:.2f} from the true top-k (histograms overlap by "
            f"{self.histogram_overlap:.0%}) leaves {self.contraction:.3f} instead of "
            f"{self.best_contraction:.3f}"
        )


@dataclass(frozen=True)
class SeenUnit:
    """A unit before its exchange: the exchange, its input x, and its context."""

    exchange: Exchange
    x: Tensor
    ctx: ExchangeContext


class GradientWatch:
    """Keeps a copy of the error-fed gradient of the last step, unit by unit: a `StepObserver`."""

    def __init__(self) -> None:
        self.seen: list[SeenUnit] = []

    def before(self, step: Step, _env: ReducerEnvironment) -> None:
        """Keep the units of this step, and drop those of the last one."""
        self.seen.clear()
        step.unit_observers.append(self.take)

    def take(self, flat_buffer: FlatBuffer, _unit: Unit, x: Tensor, ctx: ExchangeContext) -> None:
        """Copy the input x and the memory of a unit's exchange, for `diagnose`."""
        unsent = None if ctx.unsent is None else ctx.unsent.clone()
        self.seen.append(SeenUnit(flat_buffer.exchange, x.clone(), replace(ctx, unsent=unsent)))


def diagnose(
    seen: Sequence[SeenUnit], flat_buffers: Sequence[FlatBuffer], comm: Comm, control: Comm
) -> Diagnosis:
    """Compare ranks by the units `seen`. Collectives: two all-reduces of a gradient's size over `comm`, and
    small ones over `control`.

    Raises `ValueError` if nothing was watched, and `RanksDisagree` if that was so on some ranks only.
    """
    watched = f"{seen[0].ctx.step}, {sum(each.x.numel() for each in seen)} elements" if seen else "none"
    require_agreement({"the step that was watched": watched}, control)
    if not seen:
        raise ValueError(
            "no step was watched: set wire.watching = True. It takes several ranks and a recipe with a memory"
        )

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        own = torch.cat([each.x.reshape(-1) for each in seen])
        return own, own / comm.world, _direction(flat_buffers)

    own, mean, direction = on_all_ranks(inputs, "diagnose", control)
    damages = [damage(comm.all_reduce(mean))]
    distance = memory_distance(direction, comm, damages)
    require_undamaged(damages, control)

    def compared() -> Tensor:
        row = [distance, rank_correlation(own, mean), *_choices(seen, mean)]
        return torch.tensor(row, dtype=torch.float64, device="cpu")

    figures = on_all_ranks(compared, "diagnose", control)
    control.all_reduce(figures).wait()
    distance, spearman, chosen, found, common, left, least, energy = (figures / control.world).tolist()
    if not chosen:
        return Diagnosis(seen[0].ctx.step, distance, spearman)
    energy = energy or 1.0
    return Diagnosis(
        seen[0].ctx.step,
        distance,
        spearman,
        hamming=1.0 - found / chosen,
        histogram_overlap=common / chosen,
        contraction=left / energy,
        best_contraction=least / energy,
    )


def _direction(flat_buffers: Sequence[FlatBuffer]) -> Tensor:
    """The memory of unit length, float64; empty where nothing is remembered."""
    parts = [
        flat_buffer.committed[UNSENT].double()
        for flat_buffer in flat_buffers
        if UNSENT in flat_buffer.committed
    ]
    unit = torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64, device="cpu")
    unit /= unit.norm().clamp_min(torch.finfo(torch.float64).tiny)
    return unit


def memory_distance(unit: Tensor, comm: Comm, damages: list[Exception | None]) -> float:
    """Mean over pairs of ranks of 1 − cosine; 0 if there are no pairs. `damages` collects the errors of
    `damage`.

    With u_r = m_r/‖m_r‖, the sum over all pairs' cosines is (‖Σu‖² − Σ‖u‖²)/2: one all-reduce, not N². `unit`
    is u_r on entry, and the sum afterwards.
    """
    if not unit.numel() or comm.world == 1:
        return 0.0
    own = (unit @ unit).reshape(1)  # takes no memory
    damages += [damage(comm.all_reduce(each)) for each in (unit, own)]
    pairs = comm.world * (comm.world - 1)
    return 1.0 - float(unit @ unit - own) / pairs


def _choices(seen: Sequence[SeenUnit], mean: Tensor) -> list[float]:
    """Chosen, of these in the true top-k, common area of histograms, energy left by each, and in all."""
    sums, start = torch.zeros(6, dtype=torch.float64, device="cpu"), 0
    for each in seen:
        here = mean[start : start + each.x.numel()]
        start += each.x.numel()
        selector = selector_of(each.exchange)
        if selector is not None:
            sums += _choice(selector, each, here)
    return [float(each) for each in sums]


def _choice(selector: Selector, each: SeenUnit, mean: Tensor) -> Tensor:
    chosen = selector.select(each.x, each.ctx)
    from gradwire.kernels.topk import topk_indices  # here: what is imported is compiled by all who attach

    true = topk_indices(mean, chosen.numel())
    found = torch.isin(chosen, true).sum()
    common = histogram_overlap(mean[chosen].abs(), mean[true].abs())
    energy = mean.double().square()
    total = energy.sum()
    left, least = (total - energy[indices].sum() for indices in (chosen, true))
    return torch.tensor(
        [chosen.numel(), float(found), common, left, least, total], dtype=torch.float64, device="cpu"
    )


def selector_of(exchange: Exchange) -> Selector | None:
    """The selector within an exchange, however deep; `None` where elements are not chosen.

    >>> from gradwire.codec.select.topk import top_k
    >>> from gradwire.codec.sparse import sparse
    >>> from gradwire.exchange.compose import remember
    >>> from gradwire.exchange.dense import dense
    >>> from gradwire.exchange.payloads import gather
    >>> selector_of(remember(gather(sparse(top_k(0.01))))), selector_of(dense())
    (TopK(ratio=0.01), None)
    """
    return next((part for part in parts(exchange) if isinstance(part, Selector)), None)


def histogram_overlap(left: Tensor, right: Tensor) -> float:
    """Number of the magnitudes `left` (k,) that have a partner in `right` in the same logarithmic bin.

    >>> histogram_overlap(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 4.1, 9.0]))
    2.0
    """
    both = torch.stack([left, right]).double()
    bins = both.log2().mul(BINS_PER_OCTAVE).floor().nan_to_num(0.0, 0.0, -1e9)
    _, places = bins.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    counts = [row.bincount(minlength=int(places.max()) + 1 if places.numel() else 0) for row in places]
    return float(torch.minimum(*counts).sum())


def rank_correlation(left: Tensor, right: Tensor) -> float:
    """Spearman's correlation of the magnitudes of two tensors (n,); equal ones share a rank.

    >>> rank_correlation(torch.tensor([1.0, -2.0, 3.0]), torch.tensor([0.1, 0.3, 0.2]))
    0.5
    """
    stride = -(-left.numel() // SAMPLE) or 1
    first, second = (_ranks(each[::stride].abs()) for each in (left, right))
    norms = first.norm() * second.norm()
    return round(float(first @ second / norms), 12) if norms else 0.0


def _ranks(values: Tensor) -> Tensor:
    """Ranks (n,) float64, centred at zero."""
    _, places, counts = values.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
    middle: Tensor = counts.cumsum(0) - (counts - 1) / 2
    ranks = middle.double()[places]
    return ranks - ranks.mean()
