"""What a replica has learned and loses is counted, and told: over a folder."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import gradwire
from gradwire.errors import WireError
from gradwire.members.bucket import meet
from gradwire.members.bucket.coder import Coder
from gradwire.members.bucket.objects import Bucket, StoreError, created
from gradwire.members.bucket.records import Beat, member_key
from gradwire.members.bucket.rounds import NO_MORE
from gradwire.members.site import Site
from gradwire.sources.delta import Delta
from tests.support.command import eventually
from tests.unit.members.test_bucket_entry import beating, enter, held, take

pytest.importorskip("obstore")


def test_a_store_that_is_gone_does_not_hold_training_up_for_a_quarter_of_an_hour() -> None:
    at_s = [0.0]

    def fails(*_asked: Any) -> None:
        at_s[0] += 57.0
        raise StoreError("packets are lost")

    gone = Mock(create=fails, get=fails, now_s=lambda: at_s[0])
    with pytest.raises(StoreError, match="packets are lost"):
        created(gone, "an offer", b"")
    assert at_s == [2 * 57.0], "one attempt, and one look whether it was made"


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


def test_rounds_that_are_caught_up_with_are_counted_told_and_logged(tmp_path: Path) -> None:
    def site(name: str) -> Any:
        of = held()
        members = gradwire.members.store(str(tmp_path), name, at_least=1, patience_s=0.2)
        return gradwire.outer(*of, "topk(ratio=0.2)", every=2, members=members), of

    seen = list[float]()
    a, of_a = site("site-a")
    take(*of_a, 2)
    b, of_b = site("site-b")
    b.log_to(lambda numbers, step: seen.append(numbers["gradwire/rounds"]))
    take(*of_a, 2)  # without the other one, which begins in the middle
    take(*of_b, 2)
    assert b.report().rounds_committed == 2
    assert seen == [2.0, 3.0]
    a.detach()
    b.detach()


def test_a_model_that_goes_takes_its_heartbeats_along(tmp_path: Path) -> None:
    before, of = beating(), held()
    wire = enter(tmp_path, of, "topk(ratio=0.2)")
    take(*of, 2)
    mine, model = beating() - before, weakref.ref(of[0])
    assert mine
    del wire, of
    gc.collect()
    assert model() is None
    for each in mine:
        each.join(60.0)
        assert not each.is_alive()


def test_a_site_leaves_while_its_snapshot_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload, begun, may_end = Bucket.upload, threading.Event(), threading.Event()

    def slow(store: Bucket, key: str, data: bytes, bytes_per_s: float) -> None:
        begun.set()
        may_end.wait(120.0)
        upload(store, key, data, bytes_per_s)

    monkeypatch.setattr(Bucket, "upload", slow)
    of = held()
    members = gradwire.members.store(str(tmp_path / "run"), "site-a", at_least=1, snapshot_every=1)
    wire = gradwire.outer(*of, "topk(ratio=0.2)", every=2, members=members)
    take(*of, 2)
    assert begun.wait(60.0)
    leaves = threading.Thread(target=wire.detach, daemon=True)
    leaves.start()
    leaves.join(60.0)
    assert not leaves.is_alive()
    may_end.set()


def test_a_site_leaves_a_last_round_for_which_others_are_missing(tmp_path: Path) -> None:
    before, of = beating(), held()
    members = gradwire.members.store(str(tmp_path), "site-a", at_least=2, patience_s=0.2, wait_s=10.0)
    wire = gradwire.outer(*of, "topk(ratio=0.2)", every=4, delay=2, members=members)
    take(*of, 4)
    wire.detach()
    assert [(each.what, each.why) for each in wire.events] == [
        ("alone", "no seal yet: local steps go on meanwhile")
    ]
    take(*of, 4)
    for each in beating() - before:
        each.join(60.0)
        assert not each.is_alive()


def test_without_the_store_one_that_may_be_alone_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_self: Bucket, key: str) -> None:
        raise StoreError("no answer")

    of = held()
    members = gradwire.members.store(str(tmp_path), "site-a", at_least=1, alone="train", wait_s=0.001)
    wire = gradwire.outer(*of, "topk(ratio=0.2)", every=2, members=members)
    with monkeypatch.context() as patched:
        patched.setattr(Bucket, "get", fails)
        take(*of, 6)
    assert (wire.rounds, wire.attempts) == (0, 6)
    assert [each.why for each in wire.events] == ["no answer: local steps go on meanwhile"]
    take(*of, 2)
    assert wire.rounds == 1
    wire.detach()


@pytest.mark.parametrize("where", [(Delta, "pack"), (Site, "numbers")], ids=["in its round", "before it"])
def test_a_site_whose_error_is_caught_is_not_waited_for_until_it_offers_again(
    where: tuple[type, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def site(name: str) -> Any:
        of = held()
        members = gradwire.members.store(
            str(tmp_path), name, at_least=1, beat_s=0.1, patience_s=1e5, wait_s=100.0
        )
        often: dict[str, Any] = {"every": 1, "every_seconds": 1e-6}
        return gradwire.outer(*of, "topk(ratio=0.2)", members=members, **often), of

    (a, of_a), (b, of_b) = site("site-a"), site("site-b")
    with monkeypatch.context() as patched:
        patched.setattr(*where, Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            take(*of_a, 1)
    take(*of_b, 1)
    assert (b.rounds, b.members) == (1, ("site-b",))
    again = threading.Thread(target=take, args=(*of_a, 1), daemon=True)
    again.start()
    until_s = time.monotonic() + 60.0
    while not (tmp_path / "offers" / "00000001" / "site-a-000000").exists():
        assert time.monotonic() < until_s
        time.sleep(0.02)
    take(*of_b, 1)
    again.join(60.0)
    assert a.members == b.members == ("site-a", "site-b")
    a.detach()
    b.detach()


def test_a_site_that_fails_between_rounds_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meet, "ALONE_S", 0.1)
    of = held()
    members = gradwire.members.store(str(tmp_path), "site-a", at_least=2, alone="train", beat_s=0.1)
    wire = gradwire.outer(*of, "topk(ratio=0.2)", every=2, members=members)
    take(*of, 2)  # its offer has no seal: before each step it asks for one
    with monkeypatch.context() as patched:
        patched.setattr(Site, "numbers", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            take(*of, 1)
    beat = tmp_path / member_key("site-a", 0)
    assert eventually(lambda: Beat.of(beat.read_bytes()).passes == NO_MORE, 60.0)
    wire.detach()
