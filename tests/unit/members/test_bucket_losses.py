"""What a replica has learned and loses is counted, and told: over a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.errors import WireError
from gradwire.members.bucket.coder import Coder
from tests.unit.members.test_bucket_entry import enter, held, take

pytest.importorskip("obstore")


def test_steps_to_what_is_not_finite_are_lost_with_a_word(tmp_path: Path) -> None:
    of = held()
    wire = enter(tmp_path, of, "topk(ratio=0.2)")
    take(*of, 1)
    of[1].zero_grad()
    (of[0](torch.randn(8, 20)).sum() * torch.nan).backward()
    of[1].step()
    assert wire.report().rounds_lost == 1
    assert [each.what for each in wire.events] == ["dropped"]
    assert "is not finite" in wire.events[0].why
    wire.detach()


def test_an_offer_to_a_round_that_brings_nothing_is_lost_with_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_given: Any) -> None:
        raise WireError("a payload is damaged")

    of = held()
    wire = enter(tmp_path, of, "topk(ratio=0.2)")
    monkeypatch.setattr(Coder, "decode", fails)
    take(*of, 2)
    assert wire.report().rounds_lost == 1
    assert [each.why for each in wire.events if each.what == "dropped"] == [
        "round 0 brings nothing: a payload is damaged"
    ]
    wire.detach()
