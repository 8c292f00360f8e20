"""Momentum is applied once, to all parameters."""

from __future__ import annotations

import pytest
import torch

from gradwire.recipes import recipe
from gradwire.sources.checks import check_momentum
from gradwire.step.layout import build
from tests.support.rig import specs

DGC = "dgc(ratio=0.1)"


def plain_sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)


@pytest.mark.parametrize("other", ["dense", "fp16", "topk(ratio=0.1)"])
def test_a_policy_that_leaves_momentum_out_for_some_is_refused(other: str) -> None:
    main = recipe(DGC).build()
    policy = {"middle.*": other, "*": DGC}
    layout = build(specs(), main, policy, torch.device("meta"), 2)
    with pytest.raises(ValueError, match=r"but the policy sends 'middle.weight' by a recipe without it"):
        check_momentum(layout, (plain_sgd(),))
    check_momentum(layout, ())
    check_momentum(build(specs(), main, None, torch.device("meta"), 2), (plain_sgd(),))


def test_one_of_several_optimizers_with_a_momentum_of_its_own_is_refused() -> None:
    layout = build(specs(), recipe(DGC).build(), None, torch.device("meta"), 2)
    check_momentum(layout, (plain_sgd(), plain_sgd()))
    adam = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="not Adam"):
        check_momentum(layout, (plain_sgd(), adam))
