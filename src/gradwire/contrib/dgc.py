"""dgc: every rank sends the largest elements of a momentum of its own, which it corrects for what was sent
late. The ratio falls to its final value in four stages.

Lin, Han, Mao, Wang and Dally 2018, "Deep gradient compression: reducing the communication bandwidth for
distributed training". Section 3 is `MomentumCorrection`: every rank keeps a momentum u and remembers its
sum v, so that what is sent late carries the momentum that it would have had: u ← μ·u + g, v ← v + u. Where
v was sent both start again at zero (masking), because a stale momentum would push a parameter in the
direction of an old gradient. Section 3 and appendix D are `SampledTopK`: find the k-th largest of a sample
of 0.1 to 1 %, keep what reaches it; if that is far too much, choose the top k among those alone.

Differences from the paper:

- The k largest are chosen exactly, because that takes less time here than a threshold from a sample.
  `sample` below 1 draws one: stratified, one random element of each stretch, and of 2/ratio elements or
  more, so that about two of the wanted are among them. A threshold from a small sample is inexact, and
  exactly k are kept (`threshold.exactly`), where the paper keeps what comes. At a ratio of 0.1 %, with a
  sample of 1 % of a million x·|x| of normal x, what is chosen has 0.90 of the energy of the exact top k in
  the mean, and 0.63 at worst.
- The stages last `warmup_steps` together. The paper's last four epochs, whose length is unknown here.
- The choice is made per unit, and with `fused` over the whole gradient; in the paper per layer. Vectors and
  tiny tensors travel densely, with momentum but without masking, as nothing of them ever waits.
- The clipping threshold c/√W holds for each parameter's gradient, as in the authors' code, and not for the
  whole model's. A sent element is recognised by its v being exactly zero.
- A parameter whose gradient is exactly zero on a rank sends nothing there and keeps its momentum in that
  step; in the paper the momentum would decay and move the parameter.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from gradwire.codec.select.base import Selector, check_ratio, count_kept
from gradwire.codec.select.threshold import exactly, threshold_of_sample
from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse
from gradwire.exchange.compose import remember
from gradwire.exchange.dense import dense
from gradwire.exchange.payloads import gather
from gradwire.kernels.compensation import Findings, compensate_momentum, mask_zeros
from gradwire.kernels.dispatch import kernels_for
from gradwire.laws import Laws, joint_phase, phase_of
from gradwire.memory import MOMENTUM, UNSENT, Gradients, Planes
from gradwire.recipes.base import Composition, register
from gradwire.recipes.units import fused_cutter
from gradwire.unit.context import ExchangeContext


@dataclass(frozen=True)
class MomentumCorrection:
    """x = v + u with u = μ·u + g, or with μ·u + g in place of u (Nesterov).

    `clip` bounds the norm of each parameter's own gradient to clip/√W before anything else.
    """

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: float | None = None
    planes = (UNSENT, MOMENTUM)
    weight = 1.0
    as_arrived = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"momentum={self.momentum} is outside [0, 1); the usual value is 0.9")
        if self.clip is not None and not self.clip > 0.0:
            raise ValueError(f"clip={self.clip} must be positive: the largest norm of a parameter's gradient")

    @property
    def covers_momentum(self) -> bool:
        return self.momentum > 0.0

    @property
    def whole(self) -> bool:
        return self.masking

    @property
    def stays_on_device(self) -> bool:
        return self.clip is None  # which bounds a norm that the host computes with

    def coefficient(self, step: int) -> float:
        return 1.0

    def compensate(
        self, working: Planes, committed: Planes, grads: Gradients, step: int, world: int
    ) -> Findings:
        return grads.kernels[compensate_momentum](
            (working[UNSENT], working[MOMENTUM]),
            (committed[UNSENT], committed[MOMENTUM]),
            grads.bucket,
            self.momentum,
            self._scales(grads, world),
            grads.pieces,
            nesterov=self.nesterov,
        )

    def _scales(self, grads: Gradients, world: int) -> float | list[float]:
        """The factor on each parameter's gradient."""
        scale = grads.scale
        if self.clip is None:
            return scale
        each = (grads.bucket[bucket] for _plane, bucket in grads.pieces.slices())
        return [scale * self._clipping(grad, scale, self.clip / math.sqrt(world)) for grad in each]

    def _clipping(self, grad: Tensor, scale: float, bound: float) -> float:
        """Factor that clips `grad` to its bound; 1 for a norm of NaN, which the status vote rejects."""
        norm = abs(scale) * float(torch.linalg.vector_norm(grad, dtype=torch.float64))
        return bound / norm if bound < norm < math.inf else 1.0

    def update(self, working: Planes, committed: Planes) -> None:
        if self.masking:
            unsent = working[UNSENT]
            kernels_for(unsent.device, unsent.dtype)[mask_zeros](working[MOMENTUM], unsent)


@dataclass(frozen=True)
class SampledTopK:
    """Selector of k elements above a threshold that is estimated from a random sample.

    The ⌈k/2⌉ largest magnitudes are always among them. Every rank draws its own sample.

    Args:
        ratio: k as a share of the elements.
        sample: size of the sample as a share of the elements.
    """

    ratio: float
    sample: float = 0.01
    laws = Laws(contractive=True, fixed_size=True, fixed_rounds=True)

    def count(self, numel: int, ctx: ExchangeContext) -> int:
        return count_kept(self.ratio, numel)

    def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        if x.numel() == 0:
            return torch.empty(0, dtype=torch.int64, device=x.device)
        return exactly(x, self.threshold(x, ctx), self.count(x.numel(), ctx), ctx)

    def threshold(self, x: Tensor, ctx: ExchangeContext) -> float:
        """Magnitude that the wanted share of a sample reaches; Inf if it is NaN. x is not empty."""
        size = math.ceil(min(x.numel(), max(self.sample * x.numel(), 2 / self.ratio)))
        return threshold_of_sample(x, size, math.ceil(self.ratio * size), ctx)


def sampled_top_k(ratio: float, sample: float = 0.01) -> SampledTopK:
    """Keep about the share `ratio` with the largest magnitudes, judged by the share `sample` of all.

    Raises `ValueError` for a share outside (0, 1].

    >>> x = torch.arange(1000.0)
    >>> indices = sampled_top_k(0.01, sample=0.5).select(x, ExchangeContext(step=0, unit=0, rank=0, world=1))
    >>> len(indices), bool((indices[-5:] >= 995).all())
    (10, True)
    """
    if not 0.0 < sample <= 1.0:
        raise ValueError(
            f"sample={sample} is outside (0, 1]; it is the share of elements looked at, e.g. 0.01"
        )
    return SampledTopK(check_ratio(ratio), sample)


@dataclass(frozen=True)
class Ramp:
    """Selector i is in force from committed step `starts[i]` on; the step is state, so a resumed run goes on.

    Memory knows nothing of ratios: what a looser choice would have sent simply waits.
    """

    starts: tuple[int, ...]
    selectors: tuple[Selector, ...]

    @cached_property
    def laws(self) -> Laws:
        """Laws that all selectors keep. The number of rounds is fixed only if there is a single selector."""
        return Laws(
            shared=all(selector.laws.shared for selector in self.selectors),
            contractive=all(selector.laws.contractive for selector in self.selectors),
            fixed_size=all(selector.laws.fixed_size for selector in self.selectors),
            stays_on_device=all(selector.laws.stays_on_device for selector in self.selectors),
            fixed_rounds=len(self.selectors) == 1 and self.selectors[0].laws.fixed_rounds,
        )

    def phase(self, ctx: ExchangeContext) -> Hashable | None:
        """Which selector is in force, and its own phase."""
        index = self._index(ctx)
        return joint_phase(index, phase_of(self.selectors[index], ctx))

    def now(self, ctx: ExchangeContext) -> Selector:
        """The selector in force."""
        return self.selectors[self._index(ctx)]

    def _index(self, ctx: ExchangeContext) -> int:
        return bisect_right(self.starts, ctx.step) - 1

    def count(self, numel: int, ctx: ExchangeContext) -> int:
        return self.now(ctx).count(numel, ctx)

    def select(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return self.now(ctx).select(x, ctx)


WARM_UP = (0.25, 0.0625, 0.015625, 0.004)
"""Ratios of the four warm-up epochs of the paper: 75, 93.75, 98.4 and 99.6 % are not sent."""


def ramp(make: Callable[[float], Selector], ratio: float, steps: int) -> Ramp:
    """`make(ratio)`, the final selector, after `steps` steps in which the ratio falls to it in the paper's
    stages; `make` builds a selector for the ratio of a stage. Raises `ValueError` for a ratio outside (0,
    1] or negative `steps`.

    >>> from gradwire.codec.select.topk import top_k
    >>> ramp(top_k, 0.001, steps=400).starts
    (0, 100, 200, 300, 400)
    >>> [choice.ratio for choice in ramp(top_k, 0.01, steps=300).selectors]
    [0.25, 0.0625, 0.015625, 0.01]
    """
    check_ratio(ratio)
    if steps < 0:
        raise ValueError(f"steps={steps} must not be negative; 0 starts with the ratio itself")
    stages = [stage for stage in WARM_UP if stage > ratio] if steps else []
    starts = tuple(steps * index // len(stages) for index in range(len(stages))) if stages else ()
    return Ramp((*starts, steps if stages else 0), tuple(make(stage) for stage in (*stages, ratio)))


@register
def dgc(
    ratio: float = 0.001,
    momentum: float = 0.9,
    warmup_steps: int = 200,
    sample: float = 1.0,
    clip: float | None = None,
    nesterov: bool = False,
    fused: bool = False,
) -> Composition:
    """Top-k of locally corrected momentum, all-gathered; for SGD without a momentum of its own.

    Travels: places and values of every rank's own choice.
    Paper: Lin et al. 2018, "Deep gradient compression".
    Use when: ratios of 0.1 % are wanted on two to four ranks, and the optimizer is SGD with momentum.

    Args:
        ratio: final share of the elements to send, above 0 and at most 1.
        momentum: factor μ of each rank's own momentum.
        warmup_steps: steps in which the ratio falls to its final value, in four stages.
        sample: share of the elements that a threshold is estimated from; 1 selects exactly.
        clip: bound on the norm of each parameter's gradient, divided by √W for W ranks.
        nesterov: use Nesterov momentum.
        fused: as in `topk`.
    """
    memory = MomentumCorrection(momentum, nesterov, masking=ratio < 1.0, clip=clip)
    choose = top_k if sample == 1.0 else partial(sampled_top_k, sample=sample)
    selector = ramp(choose, ratio, warmup_steps)
    exchange = gather(sparse(selector)) if ratio < 1.0 else dense()
    tiny = f"dgc(ratio=1.0, {momentum=}, {warmup_steps=}, {sample=}, {clip=}, {nesterov=})"
    return Composition(remember(exchange, memory), fused_cutter(fused), tiny=tiny)
