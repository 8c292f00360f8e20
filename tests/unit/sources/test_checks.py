"""A recipe that goes by the optimizer says aloud when it was given none; policies and optimizers must fit."""

from __future__ import annotations

import warnings

import pytest
import torch

from gradwire.errors import GradwireWarning
from gradwire.recipes import recipe
from gradwire.sources.checks import check_optimizers, check_policy, warn_without_optimizer
from gradwire.step.layout import build
from tests.support.rig import specs

SGD = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


def warn(text: str, optimizer: torch.optim.Optimizer | None) -> None:
    main = recipe(text).build()
    given = () if optimizer is None else (optimizer,)
    warn_without_optimizer(build(specs(), main, None, torch.device("meta"), 2), given)


@pytest.mark.parametrize("text", ["gcomp", "gcomp(mode='levels')"])
def test_without_an_optimizer_it_is_said_that_nothing_is_dropped(text: str) -> None:
    with pytest.warns(GradwireWarning, match="sent without loss"):
        warn(text, None)


@pytest.mark.parametrize("text", ["dgc(ratio=0.1)", "signum"])
def test_without_an_optimizer_it_is_said_which_one_a_momentum_needs(text: str) -> None:
    with pytest.warns(
        GradwireWarning, match=r"applies momentum itself.*must be torch.optim.SGD\(momentum=0\)"
    ):
        warn(text, None)


@pytest.mark.parametrize("text", ["dgc(ratio=0.1, momentum=0.0)", "signum(momentum=0.0)"])
def test_where_no_momentum_is_applied_nothing_is_said(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn(text, None)


def test_a_momentum_that_a_policy_brings_is_said_too() -> None:
    main = recipe("topk(ratio=0.1)").build()
    layout = build(specs(), main, {"*": "dgc(ratio=0.1)"}, torch.device("meta"), 2)
    with pytest.warns(GradwireWarning, match="applies momentum itself"):
        warn_without_optimizer(layout, ())


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


NAMES = ("body.0.weight", "body.0.bias", "head.weight")


@pytest.mark.parametrize("pattern", ["*.wieght", "body.1.*", "HEAD.*", ""])
def test_a_pattern_that_no_parameter_matches_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"policy: no parameter matches .* Names are like '(body|head)"):
        check_policy({"*.bias": "dense", pattern: "int8"}, NAMES)


def test_a_policy_whose_patterns_all_match_passes_and_so_does_a_function() -> None:
    check_policy({"body.*": "dense", "*.bias": "int8"}, NAMES)
    check_policy(lambda _spec: None, NAMES)
    check_policy(None, NAMES)


def test_every_optimizer_must_step_something_of_the_model() -> None:
    mine, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    ours = torch.optim.SGD(mine.parameters(), lr=0.1)
    both = torch.optim.SGD([*mine.parameters(), *other.parameters()], lr=0.1)
    check_optimizers((ours, both), mine)
    with pytest.raises(ValueError, match="SGD has no parameter of this model"):
        check_optimizers((both, ours), other)
