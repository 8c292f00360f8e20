"""Recipes in few bits: what an all-gather changes, and what it does not."""

from __future__ import annotations

import pytest
import torch

from gradwire.comm import Round
from gradwire.memory import Forgetful, Residual
from gradwire.moment import Moment
from gradwire.recipes import recipe


def _rounds(text: str, world: int) -> tuple[Round, ...]:
    built = recipe(text).build()
    return built.exchange.rounds(1 << 20, torch.float32, Moment(0, 0, 0, world))


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_between_two_ranks_an_all_gather_costs_the_same_bytes_in_one_round(name: str) -> None:
    halves, whole = _rounds(name, 2), _rounds(f"{name}(collective='all_gather')", 2)
    assert {each.verb for each in halves} == {"all_to_all", "all_gather"}
    assert [each.verb for each in whole] == ["all_gather"]
    assert sum(each.wire_bytes(2) for each in halves) == whole[0].wire_bytes(2)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
@pytest.mark.parametrize(("feedback", "kind"), [(True, Residual), (False, Forgetful)])
def test_either_collective_remembers_if_it_is_to(name: str, feedback: bool, kind: type) -> None:
    for collective in ("all_reduce", "all_gather"):
        built = recipe(f"{name}(feedback={feedback}, collective='{collective}')").build()
        assert isinstance(built.exchange.memory, kind)
