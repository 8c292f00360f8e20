"""Four steps of every recipe on worlds of 1 to 4: the rounds they announce, and hashes of what they leave.

The rounds are a golden file (`test_shape.py`). Hashes differ between processors and versions of torch, so
they are compared with those of another commit, in one run on one machine (`same.py`). By itself this module
prints the hashes::

    python -m tests.golden.steps
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

from torch import Tensor

from gradwire.comm import Comm, Round, run_ranks
from gradwire.step.step import ExchangeTask, Step
from tests.support.recipes import EVERY_RECIPE
from tests.support.rig import Outcome, Rig, gradients

WORLDS = (1, 2, 3, 4)
UNIT_ELEMENTS = (None, 1000)
"""Units as the recipe cuts them, and many small ones, as of a large model."""
STEPS = 4

BY_THE_CLOCK = {"flexible, eager", "mergecomp, timed"}
"""Their plans follow from times that they measure within four steps."""

NAMES = [name for name in EVERY_RECIPE if name not in BY_THE_CLOCK]


class Announcing(Rig):
    """A rig that notes what the tasks of the current step announce."""

    def __init__(self, comm: Comm, text: str, *, unit_elements: int | None) -> None:
        super().__init__(comm, text, unit_elements=unit_elements)
        self.announced: list[str] = []
        launch = self.engine.runner.launch

        def noted(step: Step, task: ExchangeTask) -> None:
            self.announced.append(f"{task.plan.label}: {spelled(task.agreed.rounds)}")
            launch(step, task)

        self.engine.runner.launch = noted  # type: ignore[method-assign]

    def hash(self, outcome: Outcome) -> str:
        """Of means, of memories, and of what exchanges keep."""
        tensors = {("mean", name): mean for name, mean in outcome.mean.items()} | self.planes
        digest = hashlib.blake2b(digest_size=8)
        for key in sorted(tensors):
            digest.update(f"{key} {tensors[key].dtype}".encode())
            digest.update(_bytes(tensors[key]))
        return digest.hexdigest()


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).numpy().tobytes()


def spelled(rounds: tuple[Round, ...]) -> str:
    """Rounds in a few words each; equal neighbours are counted.

    >>> import torch
    >>> spelled((Round("all_gather", 3, torch.uint8), Round("shift", 8, torch.uint8, at_most=True)) * 1)
    'all_gather 3 uint8, shift at most 8 uint8'
    """
    words = []
    for each, run in itertools.groupby(rounds):
        times = len(list(run))
        extent = "at most " if each.at_most else ""
        details = [f" by {each.by}"] * (each.by != 1) + [f" from {each.src}"] * (each.src != 0)
        details += [f" {each.algorithm}"] * (each.algorithm != "library")
        dtype = str(each.dtype).removeprefix("torch.")
        word = f"{each.verb} {extent}{each.numel} {dtype}{''.join(details)}"
        words.append(word if times == 1 else f"{times} x {word}")
    return ", ".join(words)


def run(name: str, world: int, unit_elements: int | None) -> tuple[list[str], list[str]]:
    """Rounds and hashes, step by step; rank 0 announces what all do, each rank has a hash."""

    def rank(comm: Comm) -> list[tuple[str, str]]:
        rig, told = Announcing(comm, EVERY_RECIPE[name], unit_elements=unit_elements), []
        for step in range(STEPS):
            rig.announced.clear()
            outcome = rig.step(gradients(comm.rank, step))
            assert outcome.step.committed, outcome.error
            small = sum(each.buffer.numel() for each in outcome.step.small)
            told.append(("; ".join([*rig.announced, f"small: {small}"]), rig.hash(outcome)))
        return told

    by_rank = run_ranks(world, rank)
    rounds = [announced for announced, _hash in by_rank[0]]
    return rounds, ["-".join(of_rank[step][1] for of_rank in by_rank) for step in range(STEPS)]


def settings() -> Iterator[tuple[str, int, int | None]]:
    """All of them."""
    return itertools.product(NAMES, WORLDS, UNIT_ELEMENTS)


def label(name: str, world: int, unit_elements: int | None) -> str:
    """How a setting is called in files."""
    return f"{EVERY_RECIPE[name]} | {world} ranks | units of {unit_elements or 'its own'}"


def main() -> None:
    """Print the hashes of every setting."""
    for setting in settings():
        print(label(*setting), *run(*setting)[1], sep="\t", flush=True)


if __name__ == "__main__":
    main()
