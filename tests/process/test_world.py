"""The world that scenes share: each finds it as the first did, and one that leaves it otherwise fails."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire.comm.groups import borrow, give_back
from gradwire.recipes.base import REGISTRY
from tests.support.world import Ranks, World

pytestmark = pytest.mark.process


@dataclass(frozen=True)
class Seen:
    """A scene's process, how many ranks there are, a sum over them, and the first random numbers."""

    process: int
    world: int
    ones: float
    drawn: tuple[float, ...]


def looks(_turn: int) -> Seen:
    one = torch.ones(1)
    dist.all_reduce(one)
    dist.new_group()
    drawn = random.random(), float(np.random.random()), float(torch.rand(1))
    return Seen(os.getpid(), dist.get_world_size(), float(one), drawn)


def leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(60.0,), name="sleeper", daemon=True).start()


def leaves_a_group_lent() -> None:
    world = dist.group.WORLD
    assert world is not None
    give_back(borrow(world))
    borrow(world)


KEPT: list[Any] = []


def keeps_a_group() -> None:
    KEPT.append(dist.new_group())


def leaves_a_hook() -> None:
    register_optimizer_step_post_hook(lambda *_: None)


def leaves_a_recipe() -> None:
    REGISTRY["mine"] = REGISTRY["dense"]


def takes_a_variable() -> None:
    del os.environ["OMP_NUM_THREADS"]


def asks_for_threads() -> None:
    torch.set_num_threads(2)


def fails_on_one() -> None:
    """The others wait for it."""
    if dist.get_rank() == 1:
        raise ValueError("out of luck")
    dist.barrier()


def ends_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def test_to_end_a_world_that_has_not_begun_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kept").touch()
    World().end()
    assert Path("kept").exists()


def test_scenes_share_processes_and_neither_groups_nor_random_numbers(two: Ranks, three: Ranks) -> None:
    first, second, third = two(looks, 1), three(looks, 2), two(looks, 3)
    assert first == third
    assert [(each.world, each.ones) for each in first] == [(2, 2.0)] * 2
    assert [(each.world, each.ones) for each in second] == [(3, 3.0)] * 3
    assert [each.process for each in second][:2] == [each.process for each in first]
    assert {each.drawn for each in first + second} == {first[0].drawn}


@pytest.mark.parametrize(
    ("scene", "says"),
    [
        (leaves_a_thread, "has left behind ['thread sleeper']"),
        (leaves_a_group_lent, "has left behind ['group lent by gradwire']"),
        (keeps_a_group, "has left behind groups with threads ['gloo_tcp_loop', "),
        (fails_on_one, "ValueError: out of luck"),
        (ends_on_one, "rank 1: it has ended"),
        *(
            pytest.param(*each, marks=pytest.mark.rest)
            for each in (
                (
                    leaves_a_hook,
                    "behind ['hook after steps of all optimizers, from tests.process.test_world']",
                ),
                (leaves_a_recipe, "has left behind ['recipe mine']"),
                (takes_a_variable, "taken away ['variable OMP_NUM_THREADS=1']"),
                (asks_for_threads, 'has left behind ["2 threads of torch\'s"]'),
            )
        ),
    ],
)
def test_a_scene_that_fails_or_leaves_something_says_so_and_the_next_one_finds_nothing_of_it(
    scene: Callable[[], None], says: str, tmp_path: Path
) -> None:
    with pytest.raises(AssertionError) as caught:
        Ranks(2, tmp_path, grace_s=1.0)(scene)
    assert says in str(caught.value)
    assert [(each.world, each.ones) for each in Ranks(2, tmp_path)(looks, 0)] == [(2, 2.0)] * 2
