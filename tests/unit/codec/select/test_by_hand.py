"""Examples worked by hand, what is refused, and how many are announced."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from gradwire.codec.select.base import Selector, count_kept
from gradwire.codec.select.rates import rated_top_k
from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse, values
from gradwire.contrib.adacomp import ada_comp
from gradwire.contrib.lwtopk import layer_top_k
from gradwire.contrib.threshold import fixed_threshold
from gradwire.exchange.leader import leader
from gradwire.laws import Laws
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped
from tests.support.whole import parts_of

AT = ExchangeContext(step=4, unit=1, rank=0, world=3)
X = torch.tensor([1.0, -5.0, 2.0, -2.0, 0.0, 5.0, 2.0, 0.5, 0.1, 0.1])


@looped(
    ("selector", "chosen"),
    [
        (top_k(0.4), [1, 2, 3, 5]),  # of equals the lowest
        (rated_top_k(2), [1, 2, 3, 5, 6]),
        (rated_top_k(2, keep=1), [1, 2, 3, 5, 9]),  # five chunks: 0 and 5, 1 and 6, …
        (rated_top_k(3, keep=1), [1, 2, 3, 5, 9]),  # four would be even
        (rated_top_k(4, keep=1), [1, 3, 5]),  # of 0, 3, 6 and 9: of equals the lowest
        (rated_top_k(2, keep=2), [1, 2, 3, 5, 6, 7]),  # of the same three chunks two each
        (fixed_threshold(2.0, at_most=0.5), [1, 2, 3, 5, 6]),
        (fixed_threshold(2.0, at_most=0.4), [1, 2, 3, 5]),  # over the bound: of equals the lowest
        (fixed_threshold(5.1), []),
        (ada_comp(5, at_most=1.0), [1, 5]),
        (ada_comp(2, at_most=1.0), [1, 2, 3, 5, 6, 8, 9]),
        (ada_comp(2, at_most=0.2), [1, 5]),
    ],
)
def test_chosen_by_hand(selector: Selector, chosen: list[int]) -> None:
    assert selector.select(X, AT).tolist() == chosen


@looped(
    ("ratio", "numel", "count"),
    [(0.01, 0, 0), (0.01, 1, 1), (0.01, 49, 1), (0.01, 1000, 10), (0.5, 7, 4), (1.0, 7, 7), (1e-9, 10**6, 1)],
)
def test_count(ratio: float, numel: int, count: int) -> None:
    assert count_kept(ratio, numel) == count


def test_every_parameter_keeps_its_share_and_at_least_one() -> None:
    ctx = ExchangeContext(0, 0, 0, 1, parts=parts_of(4, 0, 1, 5))
    assert layer_top_k(0.4).select(X, ctx).tolist() == [1, 2, 4, 5, 6]
    assert layer_top_k(0.4).count(10, ctx) == 2 + 0 + 1 + 2
    assert layer_top_k(0.4).count(10, AT) == 4


def test_parts_that_do_not_make_up_the_unit_are_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="do not make up 10"):
        layer_top_k(0.1).select(torch.zeros(10), ExchangeContext(0, 0, 0, 1, parts=parts_of(4, 5)))


@looped(
    ("rate", "keep", "numel", "count"),
    [
        (100, None, 0, 0),
        (100, None, 99, 1),
        (100, None, 101, 2),
        (100, 1, 0, 0),
        (100, 1, 99, 1),
        (100, 1, 101, 3),
        (100, 1, 201, 3),
        (100, 3, 602, 9),
        (1, 1, 8, 8),
        (2, 4, 7, 4),
        (2, 4, 9, 9),
    ],
)
def test_count_by_chunks(rate: int, keep: int | None, numel: int, count: int) -> None:
    assert rated_top_k(rate, keep=keep).count(numel, AT) == count


def test_all_zero_bins_send_nothing() -> None:
    x = torch.zeros(1000)
    x[700] = 1e-30
    assert ada_comp(at_most=1.0).select(x, AT).tolist() == [700]


def test_adacomp_asks_what_another_such_gradient_would_bring() -> None:
    x = torch.tensor([4.0, 3.0, -3.0, 1.0, 0.0])
    selector = ada_comp(at_most=1.0)
    # Residuals 4, 2, -3, -1, 1: the last gradients were 0, 1, 0, 2, -1.
    ctx = replace(AT, unsent=torch.tensor([4.0, 2.0, -3.0, -1.0, 1.0]))
    assert selector.select(x, ctx).tolist() == [0, 1]


def test_adacomp_sends_less_once_residuals_have_grown() -> None:
    generator, size, residual, shares = torch.Generator().manual_seed(1), 40_000, torch.zeros(40_000), []
    scales = torch.rand(80, 1, generator=generator).expand(80, 500).reshape(-1)
    for _ in range(40):
        x = residual + scales * torch.randn(size, generator=generator)
        chosen = ada_comp().select(x, replace(AT, unsent=residual))
        shares.append(chosen.numel() / size)
        residual = x.index_fill(0, chosen, 0.0)
    assert shares[0] == 0.1
    assert max(shares[-10:]) < 0.03


def test_other_options_outside_their_ranges_raise() -> None:
    for threshold in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="threshold="):
            fixed_threshold(threshold)
    with pytest.raises(ValueError, match="bin_elements=0"):
        ada_comp(0)
    with pytest.raises(ValueError, match="keep=0"):
        rated_top_k(10, keep=0)


@looped("selector", [fixed_threshold(1.0), ada_comp()])
@looped("use", [sparse, leader])
def test_sizes_that_depend_on_values_are_refused_where_nobody_agrees_on_them(selector: Selector, use) -> None:
    with pytest.raises(ValueError, match=r"depends on their values.*uneven_gather\.agreed"):
        use(selector)


def test_values_alone_refuse_them_too() -> None:
    class Shared:
        laws = Laws(shared=True, contractive=True)

    with pytest.raises(ValueError, match=r"uneven_gather\.agreed"):
        values(Shared())
