"""Replicas of one process over a folder: saves, rounds that are under way, and when rounds come."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire
from gradwire.members.bucket import meet, member
from tests.unit.members.test_bucket_entry import held, take

pytest.importorskip("obstore")


def site(folder: Path, name: str = "site-a", at_least: int = 1, alone: Any = "wait", **options: Any) -> Any:
    """Its wire, model and optimizer."""
    model, optimizer = held()
    members = gradwire.members.store(str(folder / "run"), name, at_least=at_least, alone=alone)
    wire = gradwire.outer(model, optimizer, "topk(ratio=0.2)", members=members, **options)
    return wire, model, optimizer


def test_a_save_while_a_round_is_under_way_goes_on_and_counts_nothing_twice(tmp_path: Path) -> None:
    wire, model, optimizer = site(tmp_path, every=4, delay=2)
    take(model, optimizer, 4)
    wire.save(tmp_path / "saves")
    take(model, optimizer, 2)  # the round lands
    assert wire.rounds == 1
    again, *held = site(tmp_path, every=4, delay=2, resume=tmp_path / "saves")
    take(*held, 7)
    assert again.rounds == 2
    assert again.attempts == 11
    assert again.events[0].what == "dropped"
    again.detach()


def test_one_that_is_alone_trains_on_and_its_offer_counts_once_another_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meet, "ALONE_S", 0.1)
    a, *of_a = site(tmp_path, at_least=2, alone="train", every=2)
    take(*of_a, 7)
    assert (a.rounds, a.attempts) == (0, 7)
    assert [each.what for each in a.events] == ["alone"]  # it is said once, and no later step waits
    b, *of_b = site(tmp_path, "site-b", at_least=2, every=2)
    take(*of_b, 2)
    assert (b.rounds, b.members) == (1, ("site-a", "site-b"))
    for _ in range(600):
        if a.rounds:
            break
        time.sleep(0.1)  # its seal is read beside training
        take(*of_a, 1)
    assert (a.rounds, a.members) == (1, ("site-a", "site-b"))
    with a.shared_parameters(), b.shared_parameters():
        assert torch.equal(of_a[0].weight, of_b[0].weight)
    assert not torch.equal(of_a[0].weight, of_b[0].weight)
    a.detach()
    b.detach()


def test_with_a_delay_one_that_may_be_alone_lands_no_round_before_its_time(tmp_path: Path) -> None:
    wire, *held = site(tmp_path, every=4, delay=2, alone="train")
    landed = list[int]()
    for _ in range(15):
        time.sleep(0.02)  # a seal comes at once
        take(*held, 1)
        landed += [wire.attempts] if wire.rounds > len(landed) else []
    assert landed == [6, 10, 14]
    wire.detach()


def test_one_that_was_alone_lands_the_round_that_others_have_sealed_before_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meet, "ALONE_S", 0.1)
    a, *of_a = site(tmp_path, at_least=2, alone="train", every=2)
    take(*of_a, 2)
    assert [each.what for each in a.events] == ["alone"]
    b, *of_b = site(tmp_path, "site-b", at_least=2, every=2)
    take(*of_b, 2)
    assert (b.rounds, b.members) == (1, ("site-a", "site-b"))
    a.detach()
    assert (a.rounds, a.members) == (1, ("site-a", "site-b"))
    assert torch.equal(of_a[0].weight, of_b[0].weight)
    b.detach()


def test_rounds_by_time_follow_the_time_of_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, step_s, rounds_at = [0.0], 0.125, list[int]()
    monkeypatch.setattr(member, "now_s", lambda: clock[0])
    wire, *held = site(tmp_path, every=2, every_seconds=1.0)
    while wire.attempts < 28:
        clock[0] += step_s
        take(*held, 1)
        if wire.rounds > len(rounds_at):
            rounds_at.append(wire.attempts)
            step_s = 0.125 if wire.attempts < 18 else 0.5
    assert rounds_at == [2, 10, 18, 26, 28]
    wire.detach()
