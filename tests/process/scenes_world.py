"""Scenes that leave something behind, fail, or end a rank; and one that asks what there is."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradwire.comm.groups import borrow, give_back
from gradwire.recipes.base import REGISTRY


def looks() -> list[Any]:
    """The process, how many ranks there are, a sum over them, and the first random numbers."""
    one = torch.ones(1)
    dist.all_reduce(one)
    dist.new_group()
    drawn = [random.random(), float(np.random.random()), float(torch.rand(1))]
    return [os.getpid(), dist.get_world_size(), float(one), drawn]


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


def fails_on_one() -> None:
    """The others wait for it."""
    if dist.get_rank() == 1:
        raise ValueError("out of luck")
    dist.barrier()


def ends_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


SCENES: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(("first", "second", "third", "after all"), looks),
    "thread": leaves_a_thread,
    "lent": leaves_a_group_lent,
    "group": keeps_a_group,
    "hook": leaves_a_hook,
    "recipe": leaves_a_recipe,
    "variable": takes_a_variable,
    "fails": fails_on_one,
    "ends": ends_on_one,
    "number of threads": partial(torch.set_num_threads, 2),
}
