"""Groups of our own are lent, given back, and lent again."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire.comm.groups import Borrowed, borrow, give_back, lent
from gradwire.errors import TransportError


@pytest.fixture(autouse=True)
def world_of_one() -> Iterator[None]:
    _begin()
    yield
    dist.destroy_process_group()


def _begin() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def test_a_group_that_was_given_back_is_lent_again() -> None:
    first = borrow(_world())
    second = borrow(_world())
    assert len({first, second, _world()}) == 3
    give_back(second)
    assert borrow(_world()) is second
    give_back(second)
    give_back(first)
    assert borrow(_world()) is first, "the oldest"


def test_a_group_has_the_terms_of_the_models() -> None:
    patient = dist.new_group(timeout=timedelta(seconds=77))
    ours = borrow(patient)
    give_back(ours)
    assert borrow(_world()) is not ours
    assert borrow(patient) is ours


@pytest.mark.rest
def test_a_group_of_the_users_is_not_lent() -> None:
    give_back(dist.new_group())
    assert borrow(_world()) is not borrow(_world())


@pytest.mark.rest
def test_a_group_on_which_something_runs_or_has_failed_is_not_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    running, failed, sound = (Borrowed(borrow(_world())) for _ in range(3))
    number = torch.ones(1, device="cpu")
    running.all_reduce(number)
    sound.all_reduce(number).wait()
    with monkeypatch.context() as patch:

        def breaks(*_: object) -> None:
            raise TransportError("broken")

        patch.setattr("gradwire.comm.process_group.ProcessGroupComm.issue", breaks)
        with pytest.raises(TransportError, match="broken"):
            failed.all_reduce(number)
    for each in (running, failed, sound):
        each.close()
    assert set(lent()) == {running.group, failed.group}


def test_a_group_that_was_ended_is_not_lent() -> None:
    ended = borrow(_world())
    give_back(ended)
    dist.destroy_process_group(ended)
    assert borrow(_world()) is not ended
    kept = borrow(_world())
    give_back(kept)
    dist.destroy_process_group()
    _begin()
    assert borrow(_world()) is not kept
