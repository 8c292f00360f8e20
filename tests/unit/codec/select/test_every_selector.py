"""What holds for every selector, on every kind of gradient, NaN and Inf included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from gradwire.codec.select.base import Selector, count_kept
from gradwire.codec.select.chunks import ChunkTopK
from gradwire.codec.select.rates import rated_top_k
from gradwire.codec.select.threshold import reused_threshold
from gradwire.codec.select.topk import top_k
from gradwire.contrib.adacomp import ada_comp
from gradwire.contrib.dgc import ramp, sampled_top_k
from gradwire.contrib.lwtopk import layer_top_k
from gradwire.contrib.mstopk import ms_top_k
from gradwire.contrib.randomk import random_k
from gradwire.contrib.sidco import sidco_top_k
from gradwire.contrib.threshold import fixed_threshold
from gradwire.step.context import ExchangeContext
from tests.support.bits import bits, global_generators
from tests.support.gradients import KINDS as LAW_KINDS
from tests.support.gradients import generator
from tests.support.inputs import KINDS
from tests.support.looped import looped
from tests.support.source import MODULES
from tests.support.whole import parts_of

AT = ExchangeContext(step=4, unit=1, rank=0, world=3)
SIZES = (0, 1, 2, 7, 127, 4097, 40_009)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
# The other types share one path, on which no size is special.
SIZES_AND_TYPES = [
    *((size, torch.float32) for size in SIZES),
    *((n, t) for n in (0, 1, 127) for t in DTYPES[1:]),
]


@dataclass(frozen=True)
class Case:
    """A selector, and what it leaves at most: ‖left‖² <= γ(numel)‖x‖² + numel·floor², numel >= 1."""

    selector: Selector
    gamma: Callable[[int], float]
    floor: float = 0.0
    everywhere: bool = True
    """Whether the largest of the whole unit are chosen before any others."""

    def __str__(self) -> str:
        fields = [f"{value}" for value in vars(self.selector).values() if not isinstance(value, bool)]
        return f"{type(self.selector).__name__}({', '.join(fields)})"


def exact(ratio: float) -> Callable[[int], float]:
    """What is left is the smaller part."""
    return lambda n: 1 - count_kept(ratio, n) / n


def half(ratio: float) -> Callable[[int], float]:
    """The larger half of k are the largest, the others may be anything."""
    return lambda n: 1 - -(-count_kept(ratio, n) // 2) / n


def bracketed(ratio: float) -> Callable[[int], float]:
    """All chosen are at least half as large as any left: k·(m/2)² of at most k·(m/2)² + (n - k)·m²."""
    return lambda n: 1 - count_kept(ratio, n) / (4 * n)


def chunked(keep: int, chunk: int) -> Callable[[int], float]:
    """Chunk by chunk; a short one keeps a larger share."""
    return lambda n: 1 - min(keep, n) / min(chunk, n)


CASES = (
    *(Case(top_k(ratio), exact(ratio)) for ratio in (0.001, 0.1, 1.0)),
    *(Case(layer_top_k(ratio), exact(ratio), everywhere=False) for ratio in (0.001, 0.1, 1.0)),
    Case(ramp(top_k, 0.01, 4), exact(0.01)),
    Case(reused_threshold(0.01), exact(0.01)),
    Case(rated_top_k(100), chunked(1, 100)),
    Case(rated_top_k(7, {"p[13]": 50}), chunked(1, 50), everywhere=False),
    Case(rated_top_k(100, keep=1), chunked(1, 100), everywhere=False),
    Case(rated_top_k(3, keep=5), chunked(5, 15), everywhere=False),
    Case(rated_top_k(1, keep=7), chunked(7, 7), everywhere=False),
    Case(rated_top_k(7, {"p[13]": 50, "p*": 10}, keep=2), chunked(2, 100), everywhere=False),
    Case(ChunkTopK(100, 1), chunked(1, 100), everywhere=False),
    Case(ChunkTopK(64, 7), chunked(7, 64), everywhere=False),
    *(Case(ms_top_k(ratio), bracketed(ratio)) for ratio in (0.001, 0.01, 0.3, 0.99, 1.0)),
    *(Case(ms_top_k(0.05, rounds), bracketed(0.05)) for rounds in (1, 3)),
    *(Case(sampled_top_k(ratio), half(ratio)) for ratio in (0.001, 0.01, 0.3, 1.0)),
    Case(sampled_top_k(0.01, sample=1.0), half(0.01)),
    *(Case(sidco_top_k(0.01, 3, fit), half(0.01)) for fit in ("exponential", "gamma", "pareto")),
    *(Case(sidco_top_k(0.3, 3, fit), half(0.3)) for fit in ("exponential", "gamma", "pareto")),
    *(Case(sidco_top_k(0.001, stages), half(0.001)) for stages in (1, 2, 5)),
    Case(sidco_top_k(1.0), half(1.0)),
    Case(fixed_threshold(1.0), exact(0.1), floor=1.0),
    Case(fixed_threshold(1e-3, at_most=1.0), lambda n: 0.0, floor=1e-3),
    Case(fixed_threshold(1e-42, at_most=0.01), exact(0.01), floor=1e-42),
    # Each bin sends its largest, unless the bound cuts: then the largest bound/n of those near the maxima.
    Case(ada_comp(), lambda n: 1 - count_kept(0.1, n) / n / min(500, n)),
    Case(ada_comp(50, at_most=1.0), lambda n: 1 - 1 / min(50, n)),
    Case(ada_comp(10, at_most=0.05), lambda n: 1 - count_kept(0.05, n) / n / min(10, n)),
)  # fmt: skip

every_case = pytest.mark.parametrize(
    "case", [*CASES, Case(random_k(0.1), lambda n: 1.0, everywhere=False)], ids=str
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def pieces(numel: int, number: int) -> tuple[int, ...]:
    """Uneven, one of them empty and one of a single element where there is room; or none at all."""
    if number == 0:
        return ()
    cuts = sorted({0, numel, min(1, numel), numel // 7, numel // 2})
    sizes = [stop - start for start, stop in pairwise(cuts)]
    return (*sizes[:1], 0, *sizes[1:])


def contexts(numel: int) -> tuple[ExchangeContext, ...]:
    """Two ranks, one with pieces."""
    ctx = ExchangeContext(step=4, unit=1, rank=0, world=3)
    return ctx, replace(ctx, rank=2, step=5, parts=parts_of(*pieces(numel, 4)))


def gradients(numel: int, dtype: torch.dtype) -> list[Tensor]:
    """Every kind of the kernels' tests and of the laws."""
    large = torch.finfo(dtype).max / 16
    laws = [kind(0, numel, dtype, generator(kind.__name__, numel), large) for kind in LAW_KINDS]
    return [*(kind(numel).to(dtype) for kind in KINDS), *laws]


@every_case
@looped(("numel", "dtype"), SIZES_AND_TYPES)
def test_indices_are_as_announced_ascending_distinct_and_in_range(
    case: Case, numel: int, dtype: torch.dtype
) -> None:
    for ctx in contexts(numel):
        count = case.selector.count(numel, ctx)
        assert 0 <= count <= numel
        for x in gradients(numel, dtype):
            indices = case.selector.select(x, ctx)
            assert indices.dtype == torch.int64
            assert indices.dim() == 1
            assert (indices.diff() > 0).all()
            assert not numel or not indices.numel() or 0 <= indices[0] <= indices[-1] < numel
            if case.selector.laws.fixed_size:
                assert indices.numel() == count
            else:
                assert indices.numel() <= count


@every_case
def test_equal_moments_give_equal_choices_and_nothing_else_is_touched(case: Case) -> None:
    before = global_generators()
    for ctx in contexts(4097):
        for x in gradients(4097, torch.float32):
            held = bits(x)
            first = case.selector.select(x, ctx).clone()
            assert torch.equal(first, case.selector.select(x.clone(), ctx))
            assert bits(x) == held
    assert global_generators() == before


def left(x: Tensor, indices: Tensor) -> Tensor:
    rest = x.double()
    rest[indices] = 0.0
    return rest


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("numel", SIZES[1:])
def test_what_is_left_is_smaller_as_stated(case: Case, numel: int) -> None:
    assert case.selector.laws.contractive
    for ctx in contexts(numel):
        if ctx.parts and not case.everywhere:
            continue  # by pieces or chunks: below
        for x in gradients(numel, torch.float32):
            if not x.isfinite().all():
                continue
            # Scaled, so that no square overflows or vanishes in float64; sums of n squares err by n·2^-53.
            scale = float(x.abs().max().double()) or 1.0
            rest = left(x.double() / scale, case.selector.select(x, ctx)).square().sum()
            bound = (
                case.gamma(numel) * (x.double() / scale).square().sum() + numel * (case.floor / scale) ** 2
            )
            assert rest <= bound * (1 + 1e-11)


@pytest.mark.parametrize("ratio", [0.001, 0.1, 0.5])
@pytest.mark.parametrize("numel", SIZES[1:])
def test_what_is_left_of_each_piece_is_the_smaller_part_of_it(ratio: float, numel: int) -> None:
    selector, (_, ctx) = layer_top_k(ratio), contexts(numel)
    for x in gradients(numel, torch.float32):
        indices, start = selector.select(x, ctx), 0
        for size in ctx.sizes(numel):
            part = x[start : start + size]
            own = indices[(indices >= start) & (indices < start + size)] - start
            assert torch.equal(own, top_k(ratio).select(part, ctx))
            start += size


@pytest.mark.parametrize("case", [case for case in CASES if case.everywhere], ids=str)
@every_dtype
def test_nan_and_inf_are_the_largest_of_all(case: Case, dtype: torch.dtype) -> None:
    for numel in SIZES[1:] if dtype == torch.float32 else (1, 127):
        ctx = contexts(numel)[0]
        for x in gradients(numel, dtype):
            poison = ~x.isfinite()
            chosen = int(poison[case.selector.select(x, ctx)].sum())
            assert chosen == min(int(poison.sum()), case.selector.count(numel, ctx))


def test_parts_that_do_not_make_up_the_unit_are_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="do not make up 10"):
        layer_top_k(0.1).select(torch.zeros(10), ExchangeContext(0, 0, 0, 1, parts=parts_of(4, 5)))


def test_cases_name_every_selector() -> None:
    named = {type(case.selector) for case in CASES} | {type(random_k(0.1))}
    assert named == selectors()


def selectors() -> set[type]:
    """The classes of the package that select."""
    homes = ("gradwire.codec.select.", "gradwire.contrib.")
    values = {
        value
        for module in MODULES
        if module.name.startswith(homes)
        for value in vars(import_module(module.name)).values()
        if isinstance(value, type) and value.__module__.startswith("gradwire.")
    }
    return {value for value in values if hasattr(value, "select")} - {Selector}


@pytest.mark.parametrize("ratio", [0.01, 0.1])
@pytest.mark.parametrize(
    "make",
    [top_k, ms_top_k, sampled_top_k, sidco_top_k, reused_threshold],
    ids=lambda make: make.__name__,
)
def test_what_is_left_is_k_of_d_smaller_in_the_mean(make: Callable[[float], Selector], ratio: float) -> None:
    selector, numel, draws = make(ratio), 2000, 60
    for x in gradients(numel, torch.float32):
        if not x.isfinite().all() or not x.any():
            continue
        x = (x.double() / x.abs().max().double()).float()
        shares, total = [], float(x.double().square().sum())
        for step in range(draws):
            # A threshold from the last step that is twice, or half, as high as the right one.
            kth = float(x.abs().sort().values[-selector.count(numel, AT)])
            ctx = replace(AT, step=step, unsent=torch.tensor([kth * (0.5 if step % 2 else 2.0)]))
            shares.append(float(left(x, selector.select(x, ctx)).square().sum()) / total)
        mean, spread = torch.tensor(shares).mean(), torch.tensor(shares).std() / draws**0.5
        assert mean <= 1 - selector.count(numel, AT) / numel + 4 * spread + 1e-9
