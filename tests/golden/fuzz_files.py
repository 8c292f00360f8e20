"""Random damage to what is read from files: states, caches of measured numbers, JSON that commands are given.

Each is refused with the error that its reader names, or taken as a whole; a state that is refused changes
nothing.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from math import isfinite
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import torch

from gradwire.checkpoint import file_set, state
from gradwire.cli.cluster_options import codecs_of
from gradwire.comm import run_ranks
from gradwire.integrations.safetensors import flat, nested
from gradwire.measure import cache
from gradwire.planning.shapes import read
from gradwire.recipes import recipe
from tests.golden.fuzz import mutate
from tests.support.rig import Rig, gradients

RECIPE = "dgc(ratio=0.1, warmup_steps=0)"
ODD: tuple[Any, ...] = (
    None, True, -1, 2**63, 10**400, 0.5, float("nan"), float("inf"), "", "dense", "topk(", b"", [], {}, (1,),
    torch.zeros(0), torch.tensor(3), torch.full((37, 61), torch.nan), torch.zeros(37, 61, dtype=torch.int64),
)  # fmt: skip
"""What may stand in a state where something else belongs."""

Read = Callable[[Path], object]


def of_states(count: int, seed: int) -> Counter[str]:
    """`count` states with one or two entries replaced, dropped, or renamed."""
    random, found = Random(seed), Counter[str]()
    rig, good = _rig()
    before = rig.planes
    for _ in range(count):
        saved = deepcopy(good)
        for _ in range(random.randrange(1, 3)):
            _damage(saved, random)
        try:
            state.load(rig.reducer, saved)
            said = "taken"
            state.load(rig.reducer, deepcopy(good))
        except ValueError:
            said = "refused"
        assert all(torch.equal(tensor, before[key]) for key, tensor in rig.planes.items()), saved
        found[f"state: {said}"] += 1
    return found


@functools.cache
def _rig() -> tuple[Rig, dict[str, Any]]:
    """One rank after two steps, and its state."""

    def rank(comm: Any) -> Rig:
        rig = Rig(comm, RECIPE)
        for step in range(2):
            assert rig.step(gradients(0, step)).step.committed
        return rig

    [rig] = run_ranks(1, rank)
    return rig, state.save(rig.reducer)


def _damage(saved: dict[Any, Any], random: Random) -> None:
    place = saved
    while True:
        key = random.choice(list(place))
        if not (isinstance(place[key], dict) and place[key] and random.random() < 0.8):
            break
        place = place[key]
    match random.randrange(4):
        case 0:
            del place[key]
        case 1:
            place[random.choice(["", "weight", 0, None])] = place.pop(key)
        case _:
            place[key] = random.choice(ODD)
    if not saved:
        saved["format"] = 6


def of_saved_files(count: int, seed: int) -> Counter[str]:
    """`count` times damage to the bytes of what `wire.save` wrote."""
    random, found = Random(seed), Counter[str]()
    rig, _good = _rig()
    before = rig.planes
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file_set.save(file_set.of_reducer(rig.reducer), folder)
        [path] = [each for each in folder.iterdir() if each.is_file()]
        whole = path.read_bytes()
        for _ in range(count):
            path.write_bytes(_mutated(whole, random))
            try:
                file_set.load(file_set.of_reducer(rig.reducer), folder, "refuse")
                found["file: taken"] += 1
                assert all(torch.equal(tensor, before[key]) for key, tensor in rig.planes.items())
            except ValueError:
                found["file: refused"] += 1
            path.write_bytes(whole)
    return found


def _mutated(data: bytes, random: Random) -> bytes:
    """Bytes changed as those of a frame, or cut off."""
    changed = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()
    mutate(changed.numpy(), random)
    return changed.numpy().tobytes()[: random.randrange(len(data)) if random.random() < 0.2 else None]


def _measured(path: Path) -> object:
    with patch("gradwire.measure.cache.path_of", return_value=path):
        found = cache.load({"a": "b"})
    assert found is None or all(isfinite(number) for number in found.values())
    return found


def _stated(path: Path) -> object:
    costs = codecs_of(str(path), ())
    assert all(isfinite(line(9.0)) for cost in costs.values() for line in (cost.encode, cost.decode))
    return costs


def _metadata(path: Path) -> object:
    tensors, _metadata = flat({"rank0": {"memory": {"w": torch.zeros(2)}, "step": 3}})
    return nested(tensors, {"gradwire": path.read_text(encoding="utf-8")})


LINE = {"base_s": 0.001, "slope_s": 1e-9}
TEXTS: dict[str, tuple[str, Read]] = {
    "cache": (json.dumps({"key": {"a": "b"}, "numbers": {"base_s": 0.25, "slope_s": 1e-9}}), _measured),
    "codecs": (
        json.dumps({"codecs": {"topk(ratio=0.1)": {"encode": LINE, "decode": LINE}}}),
        _stated,
    ),
    "shapes": (json.dumps({"first.weight": [64, 32], "first.bias": [64]}), read),
    "layers": (json.dumps({"model": "two", "layers": [["a", 3, [[2, 2]]], ["b", 1, [[5], [1]]]]}), read),
    "safetensors": (flat({"rank0": {"memory": {"w": torch.zeros(2)}, "step": 3}})[1]["gradwire"], _metadata),
    "recipe": ("topk(ratio=0.1, values='int8', reuse=True)", lambda path: recipe(path.read_text("utf-8"))),
}
"""Texts, and what reads them: it raises nothing but `ValueError`."""

WORDS = ("null", "NaN", "-Infinity", "1e999", "-1", "[]", "{}", '"x"', "[" * 50, "9" * 400, "\ud7ff")


def of_texts(count: int, seed: int) -> Counter[str]:
    """`count` damaged texts, shared out among all kinds: bytes changed, or a word in the place of another."""
    random, found = Random(seed), Counter[str]()
    descriptor, name = tempfile.mkstemp()
    os.close(descriptor)
    path = Path(name)
    try:
        for number in range(count):
            kind = list(TEXTS)[number % len(TEXTS)]
            text, reads = TEXTS[kind]
            path.write_bytes(
                _with_a_word(text, random) if random.random() < 0.5 else _mutated(text.encode(), random)
            )
            found[f"{kind}: {_said(reads, path)}"] += 1
    finally:
        path.unlink()
    return found


def _with_a_word(text: str, random: Random) -> bytes:
    start = random.randrange(len(text))
    stop = start + random.randrange(12)
    return (text[:start] + random.choice(WORDS) + text[stop:]).encode()


def _said(reads: Read, path: Path) -> str:
    try:
        return "nothing" if reads(path) is None else "taken"
    except ValueError:
        return "refused"
