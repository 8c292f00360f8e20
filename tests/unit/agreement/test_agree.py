"""Do all ranks mean the same?"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from gradwire.agreement.agree import OptimizerText, require_agreement, require_same_optimizer
from gradwire.comm import Comm, run_ranks
from gradwire.errors import RanksDisagree


def _said(ask: Callable[[Comm], None], world: int) -> list[str]:
    def rank(comm: Comm) -> str:
        try:
            ask(comm)
        except RanksDisagree as error:
            return str(error)
        return ""

    return run_ranks(world, rank)


def _asked(fields: list[dict[str, str]]) -> list[str]:
    return _said(lambda comm: require_agreement(fields[comm.rank], comm), len(fields))


def test_equal_fields_pass_on_any_world() -> None:
    for world in (1, 2, 5):
        assert _asked(world * [{"a": "x", "b": ""}]) == world * [""]


def test_the_first_field_that_differs_is_named_with_every_ranks_value() -> None:
    texts = _asked([{"a": "x", "b": "1"}, {"a": "x", "b": "2"}, {"a": "x", "b": "1"}])
    assert len(set(texts)) == 1
    assert texts[0].startswith("ranks disagree on b: rank 0: 1 ")
    assert "; rank 1: 2 " in texts[0]


def test_a_difference_beyond_what_is_shown_is_found() -> None:
    long = 500 * "é"
    texts = _asked([{"names": long + "1"}, {"names": long + "2"}])
    assert all("ranks disagree on names" in text for text in texts)
    first, second = texts[0].split("; ")
    assert first.split("fingerprint")[1] != second.split("fingerprint")[1]


@pytest.mark.parametrize("text", ["a", 119 * "a", 120 * "a", 121 * "a", 200 * "é"])
def test_a_prefix_is_not_the_whole(text: str) -> None:
    assert all("disagree" in said for said in _asked([{"x": text}, {"x": text + "b"}]))


Optimizer = Callable[[Any], torch.optim.Optimizer] | None
SGD, ADAM = partial(torch.optim.SGD, lr=0.1), partial(torch.optim.Adam, lr=0.1)


def _groups(*rates: float, **options: Any) -> Optimizer:
    """One group per rate; the rest is alike in all of them."""
    return lambda parameters: torch.optim.SGD(
        [{"params": [each], "lr": rate} for each, rate in zip(parameters, rates, strict=False)], **options
    )


def _optimizers(makes: Sequence[Optimizer]) -> list[str]:
    made = [() if make is None else (make(nn.Linear(2, 2).parameters()),) for make in makes]
    return _said(lambda comm: require_same_optimizer(OptimizerText.of(made[comm.rank]), comm), len(made))


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (None, None),
        (SGD, SGD),
        (_groups(0.1, 0.2), _groups(0.1, 0.2)),
        (partial(SGD, weight_decay=0), partial(SGD, weight_decay=np.float64(0))),
        # Neither tensors nor state are compared.
        (partial(ADAM, lr=torch.tensor(0.1)), partial(ADAM, lr=torch.tensor(0.2))),
    ],
)
def test_optimizers_that_are_alike_pass(make: Optimizer, other: Optimizer) -> None:
    assert _optimizers([make, other, make]) == 3 * [""]


def test_of_several_optimizers_the_groups_are_numbered_through() -> None:
    def two(rate: float) -> list[torch.optim.Optimizer]:
        return [each(nn.Linear(2, 2).parameters()) for each in (ADAM, partial(SGD, lr=rate))]

    ranks = [two(0.1), two(0.2)]
    texts = _said(lambda comm: require_same_optimizer(OptimizerText.of(ranks[comm.rank]), comm), 2)
    assert all("optimizer group 1 lr: rank 0: 0.1" in text for text in texts)


@pytest.mark.parametrize(
    ("make", "other", "difference"),
    [
        (SGD, None, "optimizer: rank 0: torch.optim.sgd.SGD .*; rank 1: none "),
        (SGD, ADAM, "optimizer: rank 0: torch.optim.sgd.SGD .*; rank 1: torch.optim.adam.Adam "),
        (_groups(0.1, 0.2), _groups(0.1), "optimizer groups: rank 0: 2 .*; rank 1: 1 "),
        (SGD, partial(SGD, lr=0.2), "optimizer group 0 lr: rank 0: 0.1 .*; rank 1: 0.2 "),
        (_groups(0.1, 0.2), _groups(0.1, 0.3), "optimizer group 1 lr: rank 0: 0.2 .*; rank 1: 0.3 "),
        (ADAM, partial(ADAM, betas=(0.9, 0.99)), r"optimizer group 0 betas: .*; rank 1: \(0.9, 0.99\) "),
        (ADAM, partial(ADAM, amsgrad=True), "optimizer group 0 amsgrad: rank 0: False .*; rank 1: True "),
        (ADAM, partial(ADAM, lr=torch.tensor(0.1)), "group 0 lr: rank 0: 0.1 .*; rank 1: Tensor "),
    ],
)
def test_optimizers_that_differ_are_named_by_what_differs(
    make: Optimizer, other: Optimizer, difference: str
) -> None:
    texts = _optimizers([make, other])
    assert len(set(texts)) == 1
    assert re.search(f"ranks disagree on .*{difference}", texts[0])


def test_an_option_that_only_one_rank_has_is_found() -> None:
    def scheduled(parameters: Any) -> torch.optim.Optimizer:
        optimizer = SGD(parameters)
        torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)  # which notes the first rate
        return optimizer

    texts = _optimizers([SGD, scheduled])
    assert all("ranks disagree on optimizer options" in text for text in texts)
