"""Real gloo ranks: what frameworks save for gradwire is taken up by each rank, or refused on all of them.

They save in two ways: a file per rank, and all states gathered on rank 0.
"""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.integrations import rank_files
from gradwire.integrations.lightning import Gathered
from tests.support.models import optimizer_of, perceptron, train
from tests.support.states import own_state
from tests.support.world import Ranks

pytestmark = pytest.mark.process

RECIPE = "topk(ratio=0.05)"
STEPS = 5
Memory = dict[str, Tensor]


def attached(group: Any = None, steps: int = 0) -> gradwire.Wire:
    ddp = DistributedDataParallel(perceptron(), process_group=group)
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, RECIPE)
    train(ddp, optimizer, range(steps))
    return wire


def memory_of(wire: gradwire.Wire) -> Memory:
    memory: Memory = own_state(wire)["memory"]
    return memory


def shared_folder() -> Path:
    """The same on all ranks."""
    made = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(made)
    return Path(str(made[0]))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / rank_files.NAME).iterdir())


@dataclass(frozen=True)
class Smaller:
    """A run of two ranks that has taken up files of three, and saved its own."""

    mean: Memory
    """Of the three ranks' memories."""
    memory: Memory
    names: list[str]
    """Of the files that are there now."""


@dataclass(frozen=True)
class Files:
    """Saved on three ranks, and taken up by others."""

    names: list[str]
    memory: Memory
    """As it was saved."""
    is_taken: bool
    taken: Memory
    step: int
    smaller: Smaller | None
    """`None` on the last rank, which is in no smaller run."""


def files() -> Files:
    """Three ranks save; three others take it up, and then two."""
    wire, folder = attached(steps=STEPS), shared_folder()
    rank_files.save(wire, folder)
    dist.barrier()
    names, again = names_in(folder), attached()
    is_taken = rank_files.load(again, folder)
    taken, step = memory_of(again), again.report().step
    mean, pair, smaller = wire.mean_state_dict()["mean"], dist.new_group([0, 1]), None
    if dist.get_rank() < 2:
        two = attached(pair)
        rank_files.load(two, folder)
        memory = memory_of(two)
        rank_files.save(two, folder)
        dist.barrier(pair)
        smaller = Smaller(mean["memory"], memory, names_in(folder))
    dist.barrier()
    return Files(names, memory_of(wire), is_taken, taken, step, smaller)


def load_without_files() -> list[str]:
    """What is warned of."""
    wire, folder = attached(), shared_folder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert not rank_files.load(wire, folder)
    return [str(each.message) for each in caught]


@dataclass(frozen=True)
class Refused:
    """What a rank raises that loads, after rank 1's file was cut off, and after it was removed."""

    cut_off: str
    removed: str


def load_broken_files() -> Refused:
    """Three ranks load what they have saved."""
    wire, folder = attached(steps=3), shared_folder()
    rank_files.save(wire, folder)
    said = []
    for damage in (lambda file: file.write_bytes(file.read_bytes()[:1000]), Path.unlink):
        dist.barrier()
        if dist.get_rank() == 1:
            [file] = (folder / rank_files.NAME).glob("*-rank-1-of-3.pt")
            damage(file)
        dist.barrier()
        try:
            rank_files.load(attached(), folder)
            said.append("nothing")
        except (ValueError, FileNotFoundError, gradwire.PeerFailed) as error:
            said.append(f"{type(error).__name__} {error}")
    return Refused(*said)


@dataclass(frozen=True)
class Moved:
    """A state that a saver on rank 0 would write, and all ranks would read."""

    states_held: int
    memory: Memory
    taken: Memory


def gathered() -> Moved:
    """By way of rank 0."""
    wire = attached(steps=STEPS)
    saved = [Gathered(wire).state_dict()]
    held = len(saved[0]["ranks"])
    dist.broadcast_object_list(saved)
    again = attached()
    Gathered(again).load_state_dict(saved[0])
    return Moved(held, memory_of(wire), memory_of(again))


def require_equal(one: Memory, other: Memory) -> None:
    assert one.keys() == other.keys() != set()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_every_rank_writes_a_file_and_takes_up_its_own(three: Ranks) -> None:
    found = three(files)
    for rank in found:
        assert [name[-15:] for name in rank.names] == [f"-rank-{number}-of-3.pt" for number in range(3)]
        assert rank.is_taken
        assert rank.step == STEPS
        require_equal(rank.taken, rank.memory)
    sums = {rank.memory["0.weight"].sum().item() for rank in found}
    assert len(sums) == 3, "or any rank's file would do"


def test_fewer_ranks_start_with_the_mean_and_leave_no_old_files(three: Ranks) -> None:
    found = [rank.smaller for rank in three(files)]
    assert found.pop() is None
    for smaller in found:
        assert smaller is not None
        assert [name[-15:] for name in smaller.names] == ["-rank-0-of-2.pt", "-rank-1-of-2.pt"]
        for name, tensor in smaller.memory.items():
            # One adds thirds, the other divides a sum: a few roundings of float32 apart, of numbers below 1.
            torch.testing.assert_close(tensor, smaller.mean[name], rtol=0.0, atol=1e-6)


def test_a_checkpoint_without_gradwire_is_gone_on_from_with_a_warning(three: Ranks) -> None:
    for warned in three(load_without_files):
        assert len(warned) == 1
        assert "holds no state of gradwire" in warned[0]


def test_a_broken_or_missing_file_is_refused_on_all_ranks(three: Ranks) -> None:
    found = three(load_broken_files)
    assert [rank.cut_off.split()[0] for rank in found] == ["PeerFailed", "ValueError", "PeerFailed"]
    assert "cannot be read" in found[1].cut_off
    for rank in found:
        assert rank.removed.startswith("FileNotFoundError")
        assert "is not whole" in rank.removed


def test_rank_0_holds_all_states_and_every_rank_takes_up_its_own(three: Ranks) -> None:
    found = three(gathered)
    assert [rank.states_held for rank in found] == [3, 0, 0]
    for rank in found:
        require_equal(rank.taken, rank.memory)
