"""What `outer` leaves behind where it is refused, or where the store fails while a run is entered."""

from __future__ import annotations

import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import gradwire
from gradwire.errors import GradwireError
from gradwire.members.bucket.objects import Bucket, StoreError

pytest.importorskip("obstore")


def held() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(20, 500)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def enter(folder: Path, of: Any, recipe: str, **options: Any) -> Any:
    members = gradwire.members.store(str(folder / "run"), "site-a", at_least=1)
    return gradwire.outer(*of, recipe, every=2, members=members, **options)


def take(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 20)).square().mean().backward()
        optimizer.step()


def beating() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "gradwire heartbeat"}


def refused_by_its_recipe(folder: Path, of: Any, _patch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="int4"):
        enter(folder, of, "int4")


def refused_by_the_run(folder: Path, of: Any, _patch: pytest.MonkeyPatch) -> None:
    enter(folder, held(), "topk(ratio=0.5)").detach()
    with pytest.raises(GradwireError, match="the run at this URL has other settings"):
        enter(folder, of, "topk(ratio=0.2)")


def failed_by_the_store(folder: Path, of: Any, patch: pytest.MonkeyPatch) -> None:
    def fails(_self: Bucket, key: str, data: bytes) -> None:
        raise StoreError("no answer")

    with patch.context() as patched:
        patched.setattr(Bucket, "put", fails)
        with pytest.raises(StoreError, match="no answer"):
            enter(folder, of, "topk(ratio=0.2)")


@pytest.mark.parametrize("fails", [refused_by_its_recipe, refused_by_the_run, failed_by_the_store])
def test_after_an_outer_that_failed_training_goes_on_alone_and_then_with_a_right_one(
    fails: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, of = beating(), held()
    fails(tmp_path, of, monkeypatch)
    take(*of, 3)
    for each in beating() - before:
        each.join(60.0)  # it has been told to end
    assert not beating() - before
    wire = enter(tmp_path / "another", of, "topk(ratio=0.2)")
    take(*of, 4)
    assert wire.rounds == 2
    wire.detach()


def test_a_site_resumes_its_save_after_the_outer_rate_has_changed(tmp_path: Path) -> None:
    of = held()
    wire = enter(tmp_path, of, "topk(ratio=0.2)")
    take(*of, 2)
    wire.outer_optimizer.param_groups[0]["lr"] *= 0.5
    rate = wire.outer_optimizer.param_groups[0]["lr"]
    wire.save(tmp_path / "saves")
    wire.detach()
    again = held()
    wire = enter(tmp_path, again, "topk(ratio=0.2)", resume=tmp_path / "saves")
    assert (wire.rounds, wire.outer_optimizer.param_groups[0]["lr"]) == (1, rate)
    take(*again, 2)
    assert wire.rounds == 2
    wire.detach()


def test_a_model_that_differs_is_refused_with_what_differs(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(20)])
    enter(tmp_path, (model, torch.optim.SGD(model.parameters(), lr=0.1)), "topk(ratio=0.2)").detach()
    model[17] = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
    with pytest.raises(GradwireError, match=r"17\.weight', \(8, 8\), 'torch.bfloat16'.* there") as caught:
        enter(tmp_path, (model, torch.optim.SGD(model.parameters(), lr=0.1)), "topk(ratio=0.2)")
    assert len(str(caught.value)) < 2000


def test_members_that_had_a_wire_are_refused_in_words_also_after_detach(tmp_path: Path) -> None:
    members = gradwire.members.store(str(tmp_path), "site-a", at_least=1)
    gradwire.outer(*held(), "topk(ratio=0.2)", every=2, members=members).detach()
    with pytest.raises(ValueError, match="these members had a wire: make new ones"):
        gradwire.outer(*held(), "topk(ratio=0.2)", every=2, members=members)


def test_a_run_of_last_week_is_resumed_with_its_age_and_round(tmp_path: Path) -> None:
    first, later = held(), held()
    wire = enter(tmp_path, first, "topk(ratio=0.2)")
    take(*first, 4)
    wire.detach()
    spec = tmp_path / "run" / "spec"
    old_s = spec.stat().st_mtime - 7 * 24 * 3600
    os.utime(spec, (old_s, old_s))
    wire = enter(tmp_path, later, "topk(ratio=0.2)")
    (told,) = [each.why for each in wire.events if each.what == "joined"]
    minutes = re.fullmatch(r"a run that began (\d+) minutes ago, after 2 rounds", told)
    assert minutes is not None
    assert 0 <= int(minutes[1]) - 7 * 24 * 60 < 600
    wire.detach()


def test_of_two_sites_with_one_name_the_older_one_raises_what_to_do(tmp_path: Path) -> None:
    older, younger = held(), held()
    one = enter(tmp_path, older, "topk(ratio=0.2)")
    other = enter(tmp_path, younger, "topk(ratio=0.2)")
    with pytest.raises(
        GradwireError, match=r"another process has taken the name 'site-a' .* give each replica its own"
    ):
        take(*older, 2)
    take(*younger, 2)
    assert other.rounds == 1
    one.detach()
    other.detach()
