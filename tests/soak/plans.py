"""What befalls a run, drawn from a seed: which fault, on which rank, in which step."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from tests.support.recipes import ROWS

WORLD = 4
SOURCES = ("ddp", "plain", "nodes", "hsdp")

Inner = Literal["nan", "inf", "compensate", "encode", "decode", "flip"]
"""Faults that a rank brings about itself: numbers that are not finite, an exception at that place, or a bit
that is flipped in a message that it receives."""
INNER: tuple[Inner, ...] = ("nan", "inf", "compensate", "encode", "decode", "flip")
Outer = Literal["kill", "kill two", "pause", "stall"]
"""Faults from outside. A stall is a pause that is longer than the process group's timeout."""
FATAL: tuple[Outer, ...] = ("kill", "kill two", "stall")

# Measured cuts and clocks decide what these run, so a second run of them need not have the same bits.
_CLOCKED = ("covap", "mergecomp(inner='topk(ratio=0.05)')")
RECIPES = tuple(
    each
    for name, row in ROWS.items()
    for each in row.trains or ()
    if each not in _CLOCKED and "timed" not in each and name not in ("allreduce", "bf16")
)
"""Those that remember something, and are the same in every run."""


@dataclass(frozen=True)
class Fault:
    """`kind` befalls `rank` in the first try of `step`."""

    step: int
    rank: int
    kind: Inner | Outer


@dataclass(frozen=True)
class Plan:
    """A run of `steps` steps that count, on four ranks that save after every `save_every` of them."""

    seed: int
    source: str
    recipe: str
    steps: int
    save_every: int
    checksums: bool = False
    inner: tuple[Fault, ...] = ()
    outer: tuple[Fault, ...] = ()

    def without_faults(self) -> Plan:
        """The same training, undisturbed; what it ends with is what this one has to end with."""
        return replace(self, inner=(), outer=())

    def write(self, path: Path) -> None:
        """As JSON, for `read`."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Plan:
        """What `write` wrote."""
        found = json.loads(path.read_text())
        faults = {name: tuple(Fault(**each) for each in found[name]) for name in ("inner", "outer")}
        return cls(**{**found, **faults})


def drawn(seed: int, steps: int = 200) -> Plan:
    """The plan of a seed. One step in ten has an inner fault, one in fifty a kill, one in fifty a pause.

    Sources take turns, so that consecutive seeds go through all of them, and recipes are drawn. Every fifth
    plan has a stall. At least one fault of each kind is there, where there are steps enough.
    """
    draw = random.Random(seed)

    def some(kinds: list[Inner] | list[Outer]) -> tuple[Fault, ...]:
        at = sorted(draw.sample(range(1, steps), len(kinds)))
        draw.shuffle(kinds)
        return tuple(Fault(step, draw.randrange(WORLD), kind) for step, kind in zip(at, kinds, strict=True))

    checksums = seed % 3 != 2  # without them a flipped bit goes unnoticed
    kinds = INNER if checksums else INNER[:-1]
    inner: list[Inner] = [kinds[number % len(kinds)] for number in range(max(steps // 10, len(kinds)))]
    outer: list[Outer] = ["kill", "pause"] * max(steps // 50, 1)
    if seed % 5 == 3:
        outer[-2:] = ["stall", "kill two"]
    return Plan(
        seed=seed,
        source=SOURCES[seed % len(SOURCES)],
        recipe=RECIPES[draw.randrange(len(RECIPES))],
        steps=steps,
        save_every=draw.randint(5, 20),
        checksums=checksums,
        inner=some(inner),
        outer=some(outer),
    )
