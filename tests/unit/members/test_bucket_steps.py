"""A replica of one process over a folder: saves, and rounds that are under way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire

pytest.importorskip("obstore")


def trained(folder: Path, steps: int, **options: Any) -> Any:
    """A wire after so many steps; rounds come after four, and land two steps later."""
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    members = gradwire.members.store(str(folder / "run"), "site-a", at_least=1)
    wire = gradwire.outer(model, optimizer, "topk(ratio=0.2)", every=4, delay=2, members=members, **options)
    take(model, optimizer, steps)
    return wire, model, optimizer


def take(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()


def test_a_save_while_a_round_is_under_way_goes_on_and_counts_nothing_twice(tmp_path: Path) -> None:
    wire, model, optimizer = trained(tmp_path, 4)
    wire.save(tmp_path / "saves")
    take(model, optimizer, 2)  # the round lands
    assert wire.rounds == 1
    again, *_held_too = trained(tmp_path, 7, resume=tmp_path / "saves")
    assert again.rounds == 2
    assert again.attempts == 11
    assert again.events[0].what == "dropped"
    again.detach()
