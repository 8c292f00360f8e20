"""Every selector keeps its promises, on every kind of gradient, NaN and Inf included."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import pairwise
from pkgutil import walk_packages
from types import ModuleType

import pytest
import torch
from torch import Tensor

from gradwire import codec, contrib
from gradwire.codec.select.base import Selector
from gradwire.codec.select.threshold import reused_threshold
from gradwire.codec.select.topk import top_k
from gradwire.contrib.adacomp import ada_comp
from gradwire.contrib.dgc import ramp, sampled_top_k
from gradwire.contrib.lwtopk import layer_top_k
from gradwire.contrib.mstopk import ms_top_k
from gradwire.contrib.randomk import random_k
from gradwire.contrib.sidco import sidco_top_k
from gradwire.contrib.threshold import fixed_threshold
from gradwire.unit.context import ExchangeContext
from tests.laws.cases import AT, BF16, F16, F32, F64, SELECTORS, SelectorCase
from tests.support.bits import bits, global_generators
from tests.support.depth import drawn
from tests.support.gradients import KINDS as LAW_KINDS
from tests.support.gradients import generator
from tests.support.inputs import KINDS
from tests.support.looped import looped
from tests.support.whole import Everything, parts_of

SIZES = (0, 1, 2, 7, 127, 4097, 40_009)
DTYPES = (F32, F64, F16, BF16)
# The other types share one path, on which no size is special.
SIZES_AND_TYPES = [
    *((size, F32) for size in SIZES),
    *((n, t) for n in (0, 1, 127) for t in DTYPES[1:]),
]

by_kind = partial(looped, "case", by=lambda case: case.kind)
every_case = by_kind(SELECTORS)
every_dtype = looped("dtype", DTYPES)
every_size = looped("numel", SIZES[1:])


def pieces(numel: int, number: int) -> tuple[int, ...]:
    """Uneven, one of them empty and one of a single element where there is room; or none at all."""
    if number == 0:
        return ()
    boundaries = sorted({0, numel, min(1, numel), numel // 7, numel // 2})
    sizes = [stop - start for start, stop in pairwise(boundaries)]
    return (*sizes[:1], 0, *sizes[1:])


def contexts(numel: int) -> tuple[ExchangeContext, ...]:
    """Two ranks, one with pieces."""
    ctx = ExchangeContext(step=4, unit=1, rank=0, world=3)
    return ctx, replace(ctx, rank=2, step=5, parts=parts_of(*pieces(numel, 4)))


def gradients(numel: int, dtype: torch.dtype, key: object) -> list[Tensor]:
    """Every kind of the kernels' tests and of the laws, or some of them."""
    large = torch.finfo(dtype).max / 16

    def drawn_from(kind: Callable[..., Tensor]) -> Tensor:
        if kind in KINDS:
            return kind(numel).to(dtype)
        return kind(0, numel, dtype, generator(kind.__name__, numel), large)

    return [drawn_from(kind) for kind in drawn((*KINDS, *LAW_KINDS), 2, f"{key} {numel} {dtype}")]


@every_case
@looped(("numel", "dtype"), SIZES_AND_TYPES)
def test_indices_are_as_announced_ascending_distinct_and_in_range(
    case: SelectorCase, numel: int, dtype: torch.dtype
) -> None:
    for ctx in contexts(numel):
        count = case.selector.count(numel, ctx)
        assert 0 <= count <= numel
        for x in gradients(numel, dtype, case):
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
def test_equal_moments_give_equal_choices_and_nothing_else_is_touched(case: SelectorCase) -> None:
    before = global_generators()
    for ctx in contexts(4097):
        for x in gradients(4097, F32, case):
            held = bits(x)
            first = case.selector.select(x, ctx).clone()
            assert torch.equal(first, case.selector.select(x.clone(), ctx))
            assert bits(x) == held
    assert global_generators() == before


def left(x: Tensor, indices: Tensor) -> Tensor:
    rest = x.double()
    rest[indices] = 0.0
    return rest


@every_case
@every_size
def test_what_is_left_is_smaller_as_stated(case: SelectorCase, numel: int) -> None:
    assert case.selector.laws.contractive
    for ctx in contexts(numel):
        if ctx.parts and not case.everywhere:
            continue  # by pieces or chunks: below
        for x in gradients(numel, F32, case):
            if not x.isfinite().all():
                continue
            # Scaled, so that no square overflows or vanishes in float64; sums of n squares err by n·2^-53.
            scale = float(x.abs().max().double()) or 1.0
            rest = left(x.double() / scale, case.selector.select(x, ctx)).square().sum()
            bound = (
                case.gamma(numel) * (x.double() / scale).square().sum() + numel * (case.floor / scale) ** 2
            )
            assert rest <= bound * (1 + 1e-11)


@looped("ratio", [0.001, 0.1, 0.5])
@every_size
def test_what_is_left_of_each_piece_is_the_smaller_part_of_it(ratio: float, numel: int) -> None:
    selector, (_, ctx) = layer_top_k(ratio), contexts(numel)
    for x in gradients(numel, F32, "pieces"):
        indices, start = selector.select(x, ctx), 0
        for size in ctx.sizes(numel):
            part = x[start : start + size]
            own = indices[(indices >= start) & (indices < start + size)] - start
            assert torch.equal(own, top_k(ratio).select(part, ctx))
            start += size


@by_kind([case for case in SELECTORS if case.everywhere])
@every_dtype
def test_nan_and_inf_are_the_largest_of_all(case: SelectorCase, dtype: torch.dtype) -> None:
    for numel in SIZES[1:] if dtype == F32 else (1, 127):
        ctx = contexts(numel)[0]
        for x in gradients(numel, dtype, "poison"):
            poison = ~x.isfinite()
            chosen = int(poison[case.selector.select(x, ctx)].sum())
            assert chosen == min(int(poison.sum()), case.selector.count(numel, ctx))


def declaring(flag: str):
    """All cases whose `flag` is set."""
    return by_kind([case for case in SELECTORS if getattr(case.selector.laws, flag)])


@declaring("shared")
def test_declared_shared(case: SelectorCase) -> None:
    for numel in SIZES:
        one, other = contexts(numel)
        chosen = case.selector.select(torch.zeros(numel), one)
        for x in gradients(numel, F32, case):
            here = replace(other, step=one.step, unsent=x)
            assert torch.equal(case.selector.select(x, here), chosen)


@looped("field", ["step", "unit", "seed", "flat_buffer"])
def test_random_choice_changes_with_time_and_place(field: str) -> None:
    x, later = torch.zeros(500), replace(AT, **{field: 9})
    assert not torch.equal(random_k(0.1).select(x, AT), random_k(0.1).select(x, later))


@looped("make", [top_k, ms_top_k, sampled_top_k, sidco_top_k, reused_threshold])
@looped("ratio", [0.01, 0.1])
def test_what_is_left_is_k_of_d_smaller_in_the_mean(make: Callable[[float], Selector], ratio: float) -> None:
    selector, numel, draws = make(ratio), 2000, 60
    for x in gradients(numel, F32, selector):
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


@looped(
    "make",
    [
        top_k,
        random_k,
        layer_top_k,
        ms_top_k,
        sampled_top_k,
        sidco_top_k,
        reused_threshold,
        partial(ramp, top_k, steps=4),
        lambda ratio: ada_comp(at_most=ratio),
        lambda ratio: fixed_threshold(1.0, at_most=ratio),
    ],
)
@looped("ratio", [0.0, -0.1, 1.01, math.nan])
def test_a_ratio_outside_its_range_is_refused(make: Callable[[float], Selector], ratio: float) -> None:
    with pytest.raises(ValueError, match=r"outside \(0, 1\]"):
        make(ratio)


def test_cases_name_every_selector() -> None:
    found = {each for package in (codec, contrib) for each in selectors(package)} - {Selector}
    assert {type(case.selector) for case in SELECTORS} - {Everything} == found


def selectors(package: ModuleType) -> Iterator[type]:
    """The classes in a package that select, wherever they are."""
    for each in walk_packages(package.__path__, f"{package.__name__}."):
        module = import_module(each.name)
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "select"):
                yield value
