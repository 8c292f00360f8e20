"""The tables of selectors, codecs and exchanges; recipes have theirs in `tests/support/recipes.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import get_args

import torch
from torch import Tensor

from gradwire.codec.base import Codec
from gradwire.codec.blocks import blocks
from gradwire.codec.cast import cast
from gradwire.codec.levels import four_levels
from gradwire.codec.select.base import Selector
from gradwire.codec.select.chunks import ChunkTopK
from gradwire.codec.select.rates import rated_top_k
from gradwire.codec.select.threshold import reused_threshold
from gradwire.codec.select.topk import top_k
from gradwire.codec.signs import one_bit, sign
from gradwire.codec.sparse import sparse, sparse_coded, values
from gradwire.contrib.adacomp import ada_comp
from gradwire.contrib.dgc import ramp, sampled_top_k
from gradwire.contrib.gtopk import gtop_k
from gradwire.contrib.lwtopk import layer_top_k
from gradwire.contrib.mstopk import ms_top_k
from gradwire.contrib.oktopk import ok_topk
from gradwire.contrib.randomk import RandomK, random_k
from gradwire.contrib.sidco import Fit, sidco_top_k
from gradwire.contrib.signs_by_vote import Signum, majority_vote
from gradwire.contrib.sketchsgd import sketch
from gradwire.contrib.stochastic_levels import qsgd_codec, tern_grad
from gradwire.contrib.threshold import fixed_threshold
from gradwire.contrib.truncate import upper_bits
from gradwire.exchange.ar_topk import ar_topk
from gradwire.exchange.base import Exchange, parts
from gradwire.exchange.compose import every, forget, remember, warm
from gradwire.exchange.dense import dense
from gradwire.exchange.gcomp import Gcomp, gcomp
from gradwire.exchange.leader import leader
from gradwire.exchange.low_rank import acp_sgd, power_sgd
from gradwire.exchange.payloads import gather, reduce
from gradwire.exchange.scatter_reduce import scatter_reduce
from gradwire.exchange.uneven_gather import agreed
from gradwire.kernels.layouts import LARGEST, BlockKind
from gradwire.laws import Laws
from gradwire.memory import Residual
from gradwire.planning.facts import Facts
from gradwire.recipes import Composition, recipe
from gradwire.unit.context import ExchangeContext
from tests.support.recipes import BF16, F16, LAWS, composed, kind_of, low_rank_coarse
from tests.support.whole import Raw, everything

F32, F64 = torch.float32, torch.float64
AT = ExchangeContext(step=3, unit=1, rank=0, world=3, seed=2)


@dataclass(frozen=True)
class ScaledRandomK:
    """Random elements times 1/ratio: right in the mean, and larger than what came. Of the tests alone."""

    ratio: float
    laws = Laws(linear=True, unbiased=True, may_overflow=True)

    def payload(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[int, torch.dtype]:
        return RandomK(self.ratio).count(numel, ctx), dtype

    def encode(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        return x[RandomK(self.ratio).select(x, ctx)] / self.ratio

    def take(self, x: Tensor, ctx: ExchangeContext) -> Tensor:
        payload = self.encode(x, ctx)
        self.add_decoded(payload, x, -1.0, ctx)
        return payload

    def add_decoded(self, payload: Tensor, out: Tensor, weight: float, ctx: ExchangeContext) -> None:
        out[RandomK(self.ratio).select(out, ctx)] += weight * payload


@dataclass(frozen=True)
class CodecCase:
    """A codec, and how much smaller than x it leaves x − C(x): ‖x − C(x)‖² ≤ γ‖x‖² + n·floor²."""

    name: str
    codec: Codec
    gamma: Callable[[int], float]
    floor: float = 0.0
    in_mean: bool = False  # γ holds in the mean over draws
    exact: bool = True
    """What travels is the elements themselves, so that integers are sent whole and NaN stays in its place."""

    @property
    def kind(self) -> str:
        """The class that makes the bytes of its elements."""
        return type([*parts(self.codec)][-1]).__name__

    def __str__(self) -> str:
        return self.name


def left_by(selector: Selector) -> Callable[[int], float]:
    """γ = 1 − k/d of a selector that sends k of d elements as they are."""
    return lambda numel: 1.0 - selector.count(numel, AT) / max(numel, 1)


def left_by_half(selector: Selector) -> Callable[[int], float]:
    """γ = 1 − ⌈k/2⌉/d where only half of the k chosen are surely the largest."""
    return lambda numel: 1.0 - -(-selector.count(numel, AT) // 2) / max(numel, 1)


def left_by_bracket(selector: Selector) -> Callable[[int], float]:
    """γ = 1 − k/4d where all chosen are at least half as large as any that is left."""
    return lambda numel: 1.0 - selector.count(numel, AT) / (4 * max(numel, 1))


def left_by_chunks(keep: int, chunk: int) -> Callable[[int], float]:
    """γ = 1 − keep/chunk; a unit shorter than a chunk keeps a larger share."""
    return lambda numel: 1.0 - min(keep, numel) / max(1, min(chunk, numel))


def left_by_bins(size: int, at_most: float) -> Callable[[int], float]:
    """γ = 1 − b/(d·n) of bins of n elements whose largest travel, or the largest b of d near these."""
    return lambda numel: 1.0 - top_k(at_most).count(numel, AT) / max(numel, 1) / max(1, min(size, numel))


def left_by_rounding(dtype: torch.dtype) -> Callable[[int], float]:
    """γ = u²: every element is within a relative u, half the spacing at 1, of what is sent."""
    return lambda numel: (torch.finfo(dtype).eps / 2) ** 2


def left_by_narrow(ratio: float, dtype: torch.dtype) -> Callable[[int], float]:
    """γ = (1 − k/d) + u²: what is not sent, and the rounding of what is."""
    return lambda numel: left_by(top_k(ratio))(numel) + left_by_rounding(dtype)(numel)


def left_by_signs(block: int) -> Callable[[int], float]:
    """γ = 1 − 1/d: of a block of d elements ‖x‖₁²/d is sent, and ‖x‖₁ ≥ ‖x‖; two means send no less."""
    return lambda numel: 1.0 - 1.0 / max(1, min(block, numel))


def left_by_levels(bits: int, bucket: int) -> Callable[[int], float]:
    """γ = d/s² of s levels and buckets of d elements: none moves by more than a step, ‖x‖/s.

    The step, the quotient by it and the product with it are rounded, and so is what is left: by at most
    (‖x‖ + step)·8u per element.
    """
    levels = 2 ** (bits - 1) - 1
    return lambda numel: min(bucket, max(numel, 1)) * (1.0 / levels + 1e-6) ** 2


@cache
def left_by_halves(count: int) -> float:
    """γ of `count` elements, none of them 0, whose magnitudes become the mean of their half of the range.

    The share left is convex in each magnitude wherever it is below 1, so it is largest where all are at ends:
    low ones 0 or M/2, high ones M/2 or M. With p of l low ones at M/2, and r of h high ones there, it is
    (p(l − p)/l + r(h − r)/h) / (p + r + 4(h − r)).
    """
    shares = (
        (p * (low - p) / low + r * (count - low - r) / (count - low)) / (p + r + 4 * (count - low - r))
        for low in range(1, count)
        for p in range(low)
        for r in range(count - low)
    )
    return max(shares, default=0.0)


def left_by_four(block: int) -> Callable[[int], float]:
    """γ of `left_by_halves`, or with a 0 among n elements of n − 2 at M/2, which wait, beside one maximum.

    Levels, and what is left, are rounded: by a relative 2^-22 of the largest.
    """

    def gamma(numel: int) -> float:
        n = min(block, numel)
        return max(left_by_halves(n), (n - 2) / (n + 2)) * (1 + 2.0**-13) + n * 2.0**-44

    return gamma


def left_by_both(ratio: float, inner: Callable[[int], float]) -> Callable[[int], float]:
    """γ = 1 − (1 − γ')k/d of k values that travel in a codec of γ'."""

    def gamma(numel: int) -> float:
        count = top_k(ratio).count(numel, AT)
        return 1.0 - (1.0 - inner(count)) * count / max(numel, 1)

    return gamma


def half_smallest(dtype: torch.dtype) -> float:
    """Below the normal range the error is absolute: half the smallest subnormal."""
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps / 2


def left_by_blocks(kind: BlockKind, block: int) -> Callable[[int], float]:
    """γ of blocks of n elements: what one maximum and n − 1 elements of the same error leave at worst.

    int8 and int4: |e| ≤ min(|x|, s/2) with s = max/L, and none at the maximum itself. Σe²/Σx² is largest
    where all others are s/2: (n − 1)/(4L² + n − 1). fp8: e² ≤ x²/2^8 + (s/2^10)². Quotients and products are
    rounded: a relative 2^-16 of s/2, and 2^-22 of the maximum.
    """

    def gamma(numel: int) -> float:
        n = min(block, numel)
        share = 2.0**-8 + n * 2.0**-20 / LARGEST[kind] ** 2
        if kind != "fp8":
            share = max(n - 1, 0) / (4 * LARGEST[kind] ** 2 + max(n - 1, 0))
        return share * (1 + 2.0**-13) + 2.0**-44

    return gamma


def raised_scale(kind: BlockKind) -> float:
    """What rounding a subnormal scale up adds to the error of an element, η being the smallest subnormal.

    L·s ≤ max + Lη, so γ·max² grows by γ(2·max·Lη + L²η²), and the maximum itself may err by Lη. For maxima
    above 2^15·Lη that is within the relative 2^-13 of `left_by_blocks`; below, it is less than (2^9·Lη)².
    """
    return 2.0**9 * LARGEST[kind] * 2 * half_smallest(F32)


@dataclass(frozen=True)
class SelectorCase:
    """A selector, and how much it leaves of x: ‖left‖² ≤ γ‖x‖² + n·floor² of n elements, n ≥ 1."""

    selector: Selector
    gamma: Callable[[int], float]
    floor: float = 0.0
    everywhere: bool = True
    """Whether the largest of the whole unit are chosen before any others."""

    @property
    def kind(self) -> str:
        """Its class."""
        return type(self.selector).__name__

    def __str__(self) -> str:
        fields = [f"{value}" for value in vars(self.selector).values() if not isinstance(value, bool)]
        return f"{type(self.selector).__name__}({', '.join(fields)})"


def _selected(
    bound: Callable[[Selector], Callable[[int], float]], *selectors: Selector, everywhere: bool = True
) -> Iterator[SelectorCase]:
    """Cases of one kind of bound."""
    return (SelectorCase(each, bound(each), everywhere=everywhere) for each in selectors)


SELECTORS = (
    *_selected(left_by, top_k(0.001), top_k(0.1), top_k(1.0), everything(), reused_threshold(0.01)),
    *_selected(left_by, *(layer_top_k(ratio) for ratio in (0.001, 0.1, 1.0)), everywhere=False),
    SelectorCase(ramp(top_k, 0.01, 4), left_by(top_k(0.01))),  # from step 4 on
    SelectorCase(rated_top_k(100), left_by_chunks(1, 100)),
    SelectorCase(rated_top_k(7, {"p[13]": 50}), left_by_chunks(1, 50), everywhere=False),
    SelectorCase(rated_top_k(100, keep=1), left_by_chunks(1, 100), everywhere=False),
    SelectorCase(rated_top_k(3, keep=5), left_by_chunks(5, 15), everywhere=False),
    SelectorCase(rated_top_k(1, keep=7), left_by_chunks(7, 7), everywhere=False),
    SelectorCase(rated_top_k(7, {"p[13]": 50, "p*": 10}, keep=2), left_by_chunks(2, 100), everywhere=False),
    SelectorCase(ChunkTopK(100, 1), left_by_chunks(1, 100), everywhere=False),
    SelectorCase(ChunkTopK(64, 7), left_by_chunks(7, 64), everywhere=False),
    *_selected(left_by_bracket, *(ms_top_k(ratio) for ratio in (0.001, 0.01, 0.3, 0.99, 1.0))),
    *_selected(left_by_bracket, ms_top_k(0.05, 1), ms_top_k(0.05, 3)),
    *_selected(left_by_half, *(sampled_top_k(ratio) for ratio in (0.001, 0.01, 0.3, 1.0))),
    *_selected(left_by_half, sampled_top_k(0.01, sample=1.0), sidco_top_k(1.0)),
    *_selected(left_by_half, *(sidco_top_k(ratio, 3, fit) for ratio in (0.01, 0.3) for fit in get_args(Fit))),
    *_selected(left_by_half, *(sidco_top_k(0.001, stages) for stages in (1, 2, 5))),
    SelectorCase(fixed_threshold(1.0), left_by(top_k(0.1)), floor=1.0),
    SelectorCase(fixed_threshold(1e-3, at_most=1.0), lambda numel: 0.0, floor=1e-3),
    SelectorCase(fixed_threshold(1e-42, at_most=0.01), left_by(top_k(0.01)), floor=1e-42),
    # Each bin sends its largest, unless the bound cuts: then the largest bound/n of those near the maxima.
    SelectorCase(ada_comp(), left_by_bins(500, 0.1)),
    SelectorCase(ada_comp(50, at_most=1.0), left_by_bins(50, 1.0)),
    SelectorCase(ada_comp(10, at_most=0.05), left_by_bins(10, 0.05)),
    # In every draw; in the mean over draws they leave 1 − k/d, as in `CODECS`.
    SelectorCase(random_k(0.1), lambda numel: 1.0, everywhere=False),
    SelectorCase(random_k(1.0), left_by(random_k(1.0))),
)


BLOCKS: tuple[tuple[BlockKind, int], ...] = (
    ("int8", 256), ("int8", 7), ("int4", 256), ("int4", 33), ("fp8", 256),
)  # fmt: skip

LEVEL_FLOOR = 2.0 * torch.finfo(F32).smallest_normal * torch.finfo(F32).eps
"""Below the normal range a step is rounded up by at most one smallest subnormal; so is what is left."""


CODECS = (
    CodecCase("raw", Raw(), lambda numel: 0.0),
    CodecCase("cast f16", cast(F16), left_by_rounding(F16), half_smallest(F16)),
    CodecCase("cast bf16", cast(BF16), left_by_rounding(BF16), half_smallest(BF16)),
    CodecCase("sparse top 1%", sparse(top_k(0.01)), left_by(top_k(0.01))),
    CodecCase("sparse top 30%", sparse(top_k(0.3)), left_by(top_k(0.3))),
    CodecCase("sparse top all", sparse(top_k(1.0)), left_by(top_k(1.0))),
    CodecCase("sparse top 20% f16", sparse(top_k(0.2), F16), left_by_narrow(0.2, F16), half_smallest(F16)),
    CodecCase(
        "sparse top 1% bf16", sparse(top_k(0.01), BF16), left_by_narrow(0.01, BF16), half_smallest(BF16)
    ),
    CodecCase(
        "sparse top 20% int8",
        sparse_coded(top_k(0.2), blocks("int8", 64)),
        left_by_both(0.2, left_by_blocks("int8", 64)),
        raised_scale("int8"),
        exact=False,
    ),
    CodecCase(
        "sparse top 20% int2",
        sparse_coded(top_k(0.2), four_levels()),
        left_by_both(0.2, left_by_four(64)),
        half_smallest(F32),
        exact=False,
    ),
    CodecCase(
        "sparse top 20% sign",
        sparse_coded(top_k(0.2), sign()),
        left_by_both(0.2, left_by_signs(1 << 40)),
        half_smallest(F32),
        exact=False,
    ),
    CodecCase(
        "sparse top 30% qsgd 4", sparse_coded(top_k(0.3), qsgd_codec(4)), left_by_levels(4, 512), exact=False
    ),
    CodecCase("sparse ramp", sparse(ramp(top_k, 0.01, 8)), left_by(ramp(top_k, 0.01, 8))),
    CodecCase("sparse layers 5%", sparse(layer_top_k(0.05)), left_by(layer_top_k(0.05))),
    CodecCase("sparse chunks of 100", sparse(rated_top_k(100, keep=1)), left_by_chunks(1, 100)),
    CodecCase("sparse rated 30", sparse(rated_top_k(30)), left_by_chunks(1, 30)),
    CodecCase("sparse chunks, 4 of 12", sparse(rated_top_k(3, keep=4)), left_by_chunks(4, 12)),
    CodecCase("sparse ms 1%", sparse(ms_top_k(0.01)), left_by_bracket(ms_top_k(0.01))),
    CodecCase("sparse ms 30%, 3 rounds", sparse(ms_top_k(0.3, 3)), left_by_bracket(ms_top_k(0.3, 3))),
    CodecCase("sparse sampled 1%", sparse(sampled_top_k(0.01)), left_by_half(sampled_top_k(0.01))),
    CodecCase("sparse sampled 30%", sparse(sampled_top_k(0.3)), left_by_half(sampled_top_k(0.3))),
    CodecCase("sparse sidco 1%", sparse(sidco_top_k(0.01)), left_by_half(sidco_top_k(0.01))),
    CodecCase(
        "sparse sidco gamma 5%", sparse(sidco_top_k(0.05, 2, "gamma")), left_by_half(sidco_top_k(0.05))
    ),
    CodecCase(
        "sparse sidco pareto 1%", sparse(sidco_top_k(0.01, 3, "pareto")), left_by_half(sidco_top_k(0.01))
    ),
    CodecCase("sparse random 10%", sparse(random_k(0.1)), left_by(random_k(0.1)), in_mean=True),
    CodecCase("sparse everything", sparse(everything()), left_by(everything())),
    CodecCase("values random 1%", values(random_k(0.01)), left_by(random_k(0.01)), in_mean=True),
    CodecCase("values random 50%", values(random_k(0.5)), left_by(random_k(0.5)), in_mean=True),
    CodecCase("values everything", values(everything()), left_by(everything())),
    CodecCase("sign", sign(), left_by_signs(1 << 40), half_smallest(F32), exact=False),
    CodecCase("sign by 64", sign(64), left_by_signs(64), half_smallest(F32), exact=False),
    CodecCase("one bit", one_bit(), left_by_signs(1 << 40), half_smallest(F32), exact=False),
    CodecCase("one bit by 8", one_bit(8), left_by_signs(8), half_smallest(F32), exact=False),
    CodecCase("four levels", four_levels(), left_by_four(64), half_smallest(F32), exact=False),
    CodecCase("four levels by 8", four_levels(8), left_by_four(8), half_smallest(F32), exact=False),
    *(
        CodecCase(
            f"blocks {kind} by {n}", blocks(kind, n), left_by_blocks(kind, n), raised_scale(kind), exact=False
        )
        for kind, n in BLOCKS
    ),
    # A relative 2^(bits − 23) at most, below the normal range 2^bits subnormal steps.
    CodecCase("truncate 18", upper_bits(18), lambda numel: 4.0**-5, 2.0**18 * 2 * half_smallest(F32)),
    CodecCase("truncate 20", upper_bits(20), lambda numel: 4.0**-3, 2.0**20 * 2 * half_smallest(F32)),
    CodecCase("truncate 1", upper_bits(1), lambda numel: 4.0**-22, 2.0 * 2 * half_smallest(F32)),
    CodecCase("qsgd 8", qsgd_codec(8), left_by_levels(8, 512), LEVEL_FLOOR, exact=False),
    CodecCase("qsgd 8 max 100", qsgd_codec(8, 100, "max"), left_by_levels(8, 100), LEVEL_FLOOR, exact=False),
    CodecCase("qsgd 4", qsgd_codec(4), left_by_levels(4, 512), exact=False),
    CodecCase("qsgd 4 of 30", qsgd_codec(4, 30), left_by_levels(4, 30), LEVEL_FLOOR, exact=False),
    CodecCase("qsgd 4 max of 45", qsgd_codec(4, 45, "max"), left_by_levels(4, 45), LEVEL_FLOOR, exact=False),
    CodecCase("qsgd 2", qsgd_codec(2), left_by_levels(2, 512), exact=False),
    CodecCase("qsgd 2 max", qsgd_codec(2, 512, "max"), left_by_levels(2, 512), exact=False),
    CodecCase("tern_grad", tern_grad(), left_by_levels(2, 512), exact=False),
    CodecCase("tern_grad clipped", tern_grad(2.5), left_by_levels(2, 512), exact=False),
)


@dataclass(frozen=True)
class ExchangeCase:
    """An exchange, and the type in which payloads are summed where that is not the gradient's own.

    Where an element is rounded together with others (`coarse`), its error is relative to the largest of
    them: so many further roundings of that.
    """

    name: str
    exchange: Exchange
    sums_in: torch.dtype | None = None
    coarse: int = 0

    @property
    def kind(self) -> str:
        """How it travels."""
        return kind_of(self.exchange)

    def __str__(self) -> str:
        return self.name


_EXCHANGES = (
    ExchangeCase("dense", dense()),
    ExchangeCase("dense by ring", dense("ring")),
    ExchangeCase("dense by tree", dense("tree")),
    ExchangeCase("dense by star", dense("star")),
    ExchangeCase("dense direct", dense("direct")),
    ExchangeCase("reduce raw", reduce(Raw())),
    ExchangeCase("reduce f16", reduce(cast(F16)), F16),
    ExchangeCase("reduce bf16", reduce(cast(BF16)), BF16),
    ExchangeCase("reduce random 1%", reduce(values(random_k(0.01)))),
    ExchangeCase("reduce random 50%", reduce(values(random_k(0.5)))),
    ExchangeCase("reduce everything", reduce(values(everything()))),
    ExchangeCase("gather f16", gather(cast(F16))),
    ExchangeCase("gather bf16", gather(cast(BF16))),
    ExchangeCase("gather top 1%", gather(sparse(top_k(0.01)))),
    ExchangeCase("gather top 30%", gather(sparse(top_k(0.3)))),
    ExchangeCase("gather top all", gather(sparse(top_k(1.0)))),
    ExchangeCase("gather top 30% f16", gather(sparse(top_k(0.3), F16))),
    ExchangeCase("gather top 5% bf16", gather(sparse(top_k(0.05), BF16))),
    ExchangeCase("gather top 30% int8", gather(sparse_coded(top_k(0.3), blocks("int8"))), coarse=4),
    ExchangeCase("gather ramp", gather(sparse(ramp(top_k, 0.01, 8)))),
    ExchangeCase("leader ramp", leader(ramp(top_k, 0.01, 8))),
    ExchangeCase("gather reused 5%", gather(sparse(reused_threshold(0.05)))),
    ExchangeCase("agreed adacomp", agreed(ada_comp(50))),
    ExchangeCase("gather layers 5%", gather(sparse(layer_top_k(0.05)))),
    ExchangeCase("gather ms 5%", gather(sparse(ms_top_k(0.05)))),
    ExchangeCase("gather sampled 1%", gather(sparse(sampled_top_k(0.01)))),
    ExchangeCase("gather random 10%", gather(sparse(random_k(0.1)))),
    ExchangeCase("gather values random 10%", gather(values(random_k(0.1)))),
    ExchangeCase("leader top 1%", leader(top_k(0.01))),
    ExchangeCase("leader top 25% norm", leader(top_k(0.25), "norm")),
    ExchangeCase("leader chunks of 100", leader(rated_top_k(100, keep=1))),
    ExchangeCase("leader rated 30", leader(rated_top_k(30))),
    ExchangeCase("leader chunks, 2 of 60", leader(rated_top_k(30, keep=2))),
    ExchangeCase("leader sidco 5% norm", leader(sidco_top_k(0.05), "norm")),
    ExchangeCase("leader random 10%", leader(random_k(0.1))),
    ExchangeCase("leader everything", leader(everything(), "norm")),
    ExchangeCase("leader top 30% f16", leader(top_k(0.3), dtype=F16), F16),
    ExchangeCase("leader top 1% bf16 norm", leader(top_k(0.01), "norm", BF16), BF16),
    ExchangeCase("ar top 1%", ar_topk(top_k(0.01))),
    ExchangeCase("ar top 30% tree, tree", ar_topk(top_k(0.3), algorithm="tree", broadcast="library")),
    ExchangeCase("ar top 10% variance, ring", ar_topk(top_k(0.1), "variance", algorithm="ring")),
    ExchangeCase("ar top 10% auto, star", ar_topk(top_k(0.1), "auto", algorithm="star")),
    ExchangeCase("ar random 10% variance", ar_topk(random_k(0.1), "variance")),
    ExchangeCase("ar everything auto", ar_topk(everything(), "auto")),
    ExchangeCase("ar top 30% f16 auto", ar_topk(top_k(0.3), "auto", F16), F16),
    ExchangeCase("ok top 1%", ok_topk(top_k(0.01))),
    ExchangeCase("ok top 30% slack 1", ok_topk(top_k(0.3), slack=1.0)),
    ExchangeCase("ok top all", ok_topk(top_k(1.0), slack=1.5)),
    ExchangeCase("ok random 10%", ok_topk(random_k(0.1))),
    ExchangeCase("gtop 1%", gtop_k(0.01)),
    ExchangeCase("gtop 30%", gtop_k(0.3)),
    ExchangeCase("gtop all", gtop_k(1.0)),
    ExchangeCase("sketch 1%", sketch(0.01)),
    ExchangeCase("sketch 30%, three rows", sketch(0.3, rows=3, table=1.0, candidates=2)),
    ExchangeCase("sketch all", sketch(1.0, rows=1, table=0.1, candidates=1)),
    ExchangeCase("gather int8", gather(blocks("int8")), coarse=4),
    ExchangeCase("gather truncate 12", gather(upper_bits(12))),
    ExchangeCase("scatter raw", scatter_reduce(Raw())),
    ExchangeCase("scatter int8", scatter_reduce(blocks("int8")), coarse=4),
    ExchangeCase("scatter int8, one stage", scatter_reduce(blocks("int8"), second_stage=False), coarse=4),
    ExchangeCase("scatter bf16, one stage", scatter_reduce(cast(BF16), second_stage=False)),
    ExchangeCase("scatter int4 by 33", scatter_reduce(blocks("int4", 33)), coarse=4),
    ExchangeCase("scatter int8 in segments", scatter_reduce(blocks("int8"), segment=500), coarse=4),
    ExchangeCase("scatter raw in segments", scatter_reduce(Raw(), segment=90)),
    ExchangeCase("scatter fp8", scatter_reduce(blocks("fp8")), coarse=4),
    ExchangeCase("scatter truncate 18", scatter_reduce(upper_bits(18))),
    ExchangeCase("scatter top 30%", scatter_reduce(sparse(top_k(0.3)))),
    ExchangeCase("scatter random 10%", scatter_reduce(values(random_k(0.1)))),
    ExchangeCase("power 1", power_sgd(), coarse=low_rank_coarse(1)),
    ExchangeCase("power 3", power_sgd(3), coarse=low_rank_coarse(3)),
    ExchangeCase("acp 1", acp_sgd(), coarse=low_rank_coarse(1)),
    ExchangeCase("acp 2", acp_sgd(2), coarse=low_rank_coarse(2)),
    ExchangeCase("remember warm power 2", remember(warm(4, power_sgd(2))), coarse=low_rank_coarse(2)),
    ExchangeCase("every 1 dense", every(1, dense())),
    ExchangeCase("every 4 dense", every(4, dense())),
    ExchangeCase("every 2 reduce bf16", every(2, reduce(cast(BF16))), BF16),
    ExchangeCase("every 3 leader", every(3, leader(top_k(0.1)))),
    ExchangeCase("every 3 in the paper's order", every(3, dense(), order="paper")),
    ExchangeCase("every 2 together", every(2, dense(), together=True)),
    ExchangeCase("warm gather top", warm(4, gather(sparse(top_k(0.05))))),
    ExchangeCase("warm every 4", warm(4, every(4, dense()))),
    ExchangeCase("remember dense", remember(dense())),
    ExchangeCase("remember gather top", remember(gather(sparse(top_k(0.1))))),
    ExchangeCase("remember warm leader", remember(warm(4, leader(top_k(0.25), "norm")))),
    ExchangeCase("remember warm ok top", remember(warm(4, ok_topk(top_k(0.1))))),
    ExchangeCase("remember warm scatter int4", remember(warm(4, scatter_reduce(blocks("int4")))), coarse=4),
    ExchangeCase("remember gtop", remember(gtop_k(0.1))),
    ExchangeCase("every 2 sketch", every(2, remember(sketch(0.1)))),
    ExchangeCase("covap", remember(every(4, dense()), Residual(0.5, 0.1, 50))),
    ExchangeCase("warm remember reduce f16", warm(4, remember(reduce(cast(F16)))), F16),
    # Scales are rounded, and x minus a scale: each relative to the largest of the part.
    ExchangeCase("gather sign", gather(sign()), coarse=2),
    ExchangeCase("gather sign by 64", gather(sign(64)), coarse=2),
    ExchangeCase("remember gather one bit", remember(gather(one_bit())), coarse=2),
    ExchangeCase("warm gather one bit by 8", warm(4, gather(one_bit(8))), coarse=2),
    ExchangeCase("majority", majority_vote()),
    ExchangeCase("forget majority l1", forget(majority_vote("l1"))),
    ExchangeCase("warm signum", warm(4, forget(majority_vote("l1"), Signum()))),
    ExchangeCase("gather qsgd 8", gather(qsgd_codec(8)), coarse=2),
    ExchangeCase("gather qsgd 4 max", gather(qsgd_codec(4, 64, "max")), coarse=11),
    ExchangeCase("gather qsgd 2", gather(qsgd_codec(2, 100)), coarse=110),
    ExchangeCase("gather tern_grad", gather(tern_grad()), coarse=11),
    ExchangeCase("gather tern_grad clipped", gather(tern_grad(2.5)), coarse=11),
    ExchangeCase("every 2 qsgd", every(2, gather(qsgd_codec(8))), coarse=2),
    ExchangeCase("remember qsgd", remember(gather(qsgd_codec(8))), coarse=2),
    ExchangeCase("gcomp lossless", gcomp("lossless", refresh=2)),
    ExchangeCase("gcomp lossless, short segments", Gcomp("lossless", segment=100)),
    ExchangeCase("gcomp near", gcomp("near")),
    ExchangeCase("gcomp levels, short segments", Gcomp("levels", tables="static", segment=100)),
    ExchangeCase("gcomp truncate 20", gcomp("truncate", 20)),
    ExchangeCase("every remember", every(3, remember(reduce(values(random_k(0.3)))))),
)


def decided(text: str, ratio: float, world: int = 3) -> list[Composition]:
    """What an adaptive recipe makes of a ratio of communication to computation, or all that it may choose."""
    decision = recipe(text).build().next
    assert decision is not None, f"{text} is not adaptive"
    if decision.candidates:
        return [composed(each) for each in decision.candidates]
    return [decision.decide(Facts(backward_s=1.0, allreduce_s=ratio, world=world))]


EXCHANGES = (
    *_EXCHANGES,
    *(ExchangeCase(f"recipe {text}", composed(text).exchange, *sums) for text, sums in LAWS.items()),
)
