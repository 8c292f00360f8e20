"""Terms that members compare before they meet: what is not in them would end all who have met."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import gradwire
from gradwire.errors import TransportError
from gradwire.members.base import Card, Entry, Roster
from tests.support.models import perceptron


class Lone:
    """`Members` of one replica, which keeps what it says."""

    name = id = "site-a"
    address = "127.0.0.1"
    alone_s = None
    terms: Mapping[str, str] = {}

    def ask(self, card: Card) -> Roster:
        self.terms = card.terms
        return Roster(1, (Entry(self.name, self.id, card),))

    def close(self) -> None:
        """Nothing is held."""


class Refused(Lone):
    """The others cannot be asked."""

    def ask(self, card: Card) -> Roster:
        raise TransportError("no quorum")


def test_after_an_outer_that_failed_training_goes_on_alone_and_then_with_a_right_one() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with pytest.raises(TransportError, match="no quorum"):
        gradwire.outer(model, optimizer, "int4", every=1, members=Refused())
    take(model, optimizer)
    wire = gradwire.outer(model, optimizer, "int4", every=1, members=Lone())
    take(model, optimizer)
    assert wire.attempts == 1
    wire.detach()


def take(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, next(model.parameters()).shape[1])).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def terms(change: Callable[[nn.Module], Any] = lambda _model: None, **options: Any) -> Mapping[str, str]:
    """Those of a replica whose model is changed."""
    model, members = perceptron(), Lone()
    change(model)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    gradwire.outer(model, optimizer, "int4", every=1, members=members, **options).detach()
    return members.terms


def different(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
    assert one.keys() == other.keys()
    return {key for key in one if one[key] != other[key]}


def frozen(model: nn.Module) -> None:
    model.register_parameter("scale", nn.Parameter(torch.ones(3), requires_grad=False))


def test_terms_have_types_frozen_parameters_buffers_and_the_class_of_the_outer_optimizer() -> None:
    here = terms()
    assert not different(here, terms())
    assert {"types", "parameters and buffers"} <= different(here, terms(lambda model: model.bfloat16()))
    assert "parameters and buffers" in different(here, terms(frozen))
    buffered = terms(lambda model: model.register_buffer("seen", torch.zeros(2)))
    assert "parameters and buffers" in different(here, buffered)
    assert different(here, terms(outer=lambda given: torch.optim.Adam(given, lr=0.1))) == {"outer optimizer"}
    # Rates and momentum come from the run.
    assert not different(here, terms(outer=lambda given: torch.optim.SGD(given, lr=0.1)))
