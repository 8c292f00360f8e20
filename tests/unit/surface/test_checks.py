"""A recipe that goes by the optimizer, or relies on it, says aloud when it was given none."""

from __future__ import annotations

import warnings

import pytest
import torch

from gradwire.checks import warn_without_optimizer
from gradwire.engine.layout import build
from gradwire.recipes import recipe
from tests.support.rig import specs

SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def warn(text: str, optimizer: torch.optim.Optimizer | None) -> None:
    main = recipe(text).build()
    warn_without_optimizer(build(specs(), main, None, torch.device("meta")), optimizer)


@pytest.mark.parametrize("text", ["gcomp", "gcomp(mode='levels')"])
def test_without_an_optimizer_it_is_said_that_nothing_is_dropped(text: str) -> None:
    with pytest.warns(UserWarning, match="sent without loss"):
        warn(text, None)


@pytest.mark.parametrize("text", ["dgc(ratio=0.1)", "signum"])
def test_without_an_optimizer_it_is_said_which_one_a_momentum_needs(text: str) -> None:
    with pytest.warns(UserWarning, match=r"applies momentum itself.*must be torch.optim.SGD\(momentum=0\)"):
        warn(text, None)


@pytest.mark.parametrize("text", ["dgc(ratio=0.1, momentum=0.0)", "signum(momentum=0.0)"])
def test_where_no_momentum_is_applied_nothing_is_said(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn(text, None)


def test_a_momentum_that_a_policy_brings_is_said_too() -> None:
    main = recipe("topk(ratio=0.1)").build()
    layout = build(specs(), main, {"*": "dgc(ratio=0.1)"}, torch.device("meta"))
    with pytest.warns(UserWarning, match="applies momentum itself"):
        warn_without_optimizer(layout, None)


@pytest.mark.parametrize(
    ("text", "optimizer"),
    [
        ("dgc(ratio=0.1)", SGD),
        ("gcomp", SGD),
        ("gcomp(mode='lossless')", None),
        ("gcomp(mode='truncate')", None),
        ("int8", None),
    ],
)
def test_otherwise_there_is_nothing_to_say(text: str, optimizer: torch.optim.Optimizer | None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn(text, optimizer)
