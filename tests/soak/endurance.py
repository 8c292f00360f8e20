"""Many steps of one run: what a process holds must not grow."""

from __future__ import annotations

from pathlib import Path

from tests.soak.plans import WORLD, Plan
from tests.soak.scenes import endure
from tests.support.ranks import returned, started

Samples = list[dict[str, float]]
SETTLED = 0.2
"""The share of a run after which caches and histories are full."""
SETTLED_STEPS = 1000
"""Until then the allocator's arenas may grow: nothing is said of resident memory."""
BYTES_A_STEP = 100.0
"""A leak of that rate would take a gigabyte in ten million steps: weeks of ten steps a second."""
GRAIN_BYTES = 2**20
"""Below it nothing can be said of resident memory: the allocator takes and returns it in such pieces."""
OBJECTS = 64 + 2 * 7
"""The longest history that fills slowly: 16 changes of the link, each a tuple, a change and two links. And
what the last step leaves: one with another collective, or two of them, holds 7 objects more for each."""
OBJECTS_A_STEP = 0.005
"""A listener is called in every tenth step, and a report is made in every hundredth at least: one object that
any of these leaves is more."""


def endured(steps: int, folder: Path, recipe: str = "topk(ratio=0.05)", source: str = "ddp") -> list[Samples]:
    """By rank what it held over time, in a run of `steps` steps."""
    folder.mkdir(parents=True)
    save_every = max(steps // 100, 1)
    Plan(0, source, recipe, steps, save_every).write(folder / "plan.json")
    place = folder / "0"
    place.mkdir()
    with started(endure, WORLD, place, 60.0) as ranks:
        for rank in ranks:
            rank.wait(60.0 + steps)  # a second a step would be a hang
    return [returned(place, rank)["samples"] for rank in range(WORLD)]


def grown(samples: Samples) -> list[str]:
    """What has grown beyond its bound since the run has settled."""
    last = samples[-1]
    settled = [each for each in samples if each["step"] >= SETTLED * last["step"]]
    old = [each for each in settled if each["step"] >= SETTLED_STEPS]
    wrong = []
    for name, since, bound, a_step in (
        ("threads", settled, 0.0, 0.0),
        ("descriptors", settled, 0.0, 0.0),
        ("objects", settled, OBJECTS, OBJECTS_A_STEP),
        ("resident_bytes", old or samples[-1:], GRAIN_BYTES, BYTES_A_STEP),
    ):
        first, steps = since[0], last["step"] - since[0]["step"]
        if last[name] - first[name] > max(bound, a_step * steps):
            wrong.append(f"{name} have grown from {first[name]:.0f} to {last[name]:.0f} in {steps:.0f} steps")
    return wrong


def table(samples: Samples, rows: int = 11) -> list[str]:
    """Some of the samples as lines of Markdown."""
    some = [samples[round(each * (len(samples) - 1) / (rows - 1))] for each in range(rows)]
    head = ["| step | seconds | resident MB | threads | descriptors | objects |", "|---|---|---|---|---|---|"]
    return head + [
        f"| {each['step']:.0f} | {each['at_s'] - samples[0]['at_s']:.0f} | "
        f"{each['resident_bytes'] / 1e6:.2f} | "
        f"{each['threads']:.0f} | {each['descriptors']:.0f} | {each['objects']:.0f} |"
        for each in some
    ]
