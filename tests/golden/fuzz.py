"""Random damage to everything that is decoded: nothing but its typed error may come of it, and no memory
beyond what was asked for.

    python -m tests.golden.fuzz [--what frames] [--count 1000000] [--seed 0] [--within-s 60] [--most-mib 16]

- `frames`: half of the mutated frames get their checksum made right again, so that what lies after it is
  reached: the header's claims, the directory, the streams, and tables that were damaged on their way. What
  decodes all the same must have decoded to finite work: the test is that it returns.
- `steps`: frames of exact steps, in all layouts; half of them with a right checksum.
- `payloads`, `exchanges`, `rings`: what codecs decode and exchanges receive, and those that send frames in
  messages (`fuzz_payloads`).
- `states`, `files`, `texts`: what is loaded (`fuzz_files`).

A million frames must take no more than a minute of CPU time (nothing here waits, and what else runs does not
count), after a thousand in which kernels are compiled, and the process no more than 16 MiB beyond what it had
by then: frames are of a kilobyte, so that this is room for the interpreter's own, and none for a claim that
was believed. Otherwise the exit code is 1. Where a mutation takes longer there are fewer (`FEWER`).

To find accesses out of bounds, run it with NUMBA_BOUNDSCHECK=1: an `IndexError` then ends it. `make fuzz`
runs it with and without.
"""

from __future__ import annotations

import argparse
import re
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from random import Random
from typing import NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.codec.exact_steps import Layout, StepsKey, decode_steps, encode_steps
from gradwire.codec.gcomp import CodeTable, Key, frame, histogram, unframe
from gradwire.errors import WireError
from gradwire.kernels.frames import checksum

KEY = Key(step=5, unit=2, hop=1, state=77)
STEPS_KEY = StepsKey(module=5, world=2, base=77)


class Case(NamedTuple):
    """A frame, and what its receiver expects."""

    data: Tensor
    out: Tensor
    dropped: Tensor | int | None
    table: CodeTable


def cases(numel: int = 100) -> Iterator[Case]:
    """A frame of every kind: lossless, cut, levels, thresholds, raw; short types whole and cut."""
    random = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=random) * 1e-3
    x[::5] = 0.0
    odd = x.clone()
    odd[1::9] = torch.tensor([float("nan"), float("inf"), 1e-40, -0.0, 3e38, 1e-30]).repeat(numel)[
        : len(odd[1::9])
    ]
    limits = torch.randint(100, 130, (numel,), generator=random).to(torch.uint8)
    levels = 6 * torch.randint(0, 4, (numel,), generator=random).to(torch.uint8)
    noise = torch.randint(-(2**31), 2**31, (numel,), generator=random).to(torch.int32).view(torch.float32)
    for values, dropped, explicit, flush, own in (
        (odd, 0, False, False, False), (x, 16, False, True, True), (x, levels, True, True, True),
        (x, limits, False, True, True), (noise, 0, False, False, False),
        (odd.bfloat16(), 0, False, False, False), (x.half(), 0, False, False, True),
        (odd.bfloat16(), limits, False, True, False), (x.half(), limits % 32, False, False, True),
        (x.bfloat16(), levels.clamp(max=6), True, True, True), (x.half(), 3, False, False, True),
    ):  # fmt: skip
        counts = histogram(values, dropped, explicit=explicit, flush=flush)
        table = CodeTable.from_histogram(counts) if own else CodeTable.prior(values.dtype)
        data = frame(values, dropped, table, KEY, explicit=explicit, flush=flush)
        yield Case(data, torch.empty_like(values), None if explicit else dropped, table)


def sealed(data: Tensor) -> Tensor:
    """The same frame in place, with a right checksum."""
    data.numpy().view(np.uint64)[-1] = checksum(data[:-8])
    return data


def outcome(data: Tensor, case: Case, tables: dict[int, CodeTable] | None = None) -> str:
    """ "decoded", or why not; anything but a `WireError` goes through."""
    try:
        unframe(data, case.out, case.dropped, tables or {case.table.id: case.table}, KEY, add=False)
    except WireError as error:
        return re.sub(r"[^A-Za-z '].*", "…", str(error))[:40]
    return "decoded"


def mutate(bytes_: NDArray[np.uint8], random: Random) -> None:
    """One to four bits flipped; a byte or a 16-bit number replaced; a word; or a stretch copied elsewhere."""
    below, size = random.randrange, bytes_.size
    kind, at = below(5), below(max(1, size - 8))
    if kind <= 1:
        for _ in range(below(1, 5)):
            bytes_[below(size)] ^= 1 << below(8)
    elif kind == 2:
        half = bytes_[at // 2 * 2 : at // 2 * 2 + 2]
        half[:] = [below(256) for _ in half]
    elif kind == 3:
        bytes_[at : at + 8] = random.choice((0, 1, 255, 128))
    else:
        there = below(max(1, size - 8))
        bytes_[at : at + 8] = bytes_[there : there + 8].copy()


def damaged_tables(table: CodeTable, random: Random) -> str:
    """What comes of a table's bytes after damage."""
    packed = table.to_tensor()
    mutate(packed.numpy(), random)
    try:
        CodeTable(packed.numpy().tobytes())
    except WireError as error:
        return str(error)[:30]
    return "another table"


def run(count: int, seed: int) -> Counter[str]:
    """`count` mutations; how often each came out how."""
    random, found = Random(seed), Counter[str]()
    everything = [*cases(100), *cases(40)]
    for number in range(count):
        case = everything[number % len(everything)]
        if number % 50 == 49:
            found["table: " + damaged_tables(case.table, random)] += 1
            continue
        data = case.data.clone()
        mutate(data.numpy(), random)
        if number % 2:
            sealed(data)
        found[outcome(data, case)] += 1
    return found


def step_frames(numel: int, layouts: Sequence[Layout] = get_args(Layout)) -> Iterator[tuple[Tensor, Tensor]]:
    """Frames of exact steps of both types and of `layouts`, each with the old numbers."""
    random = torch.Generator().manual_seed(numel)
    old = torch.randn(numel, generator=random) * 0.02
    for move, dtype in ((1e-5, torch.bfloat16), (1e-3, torch.bfloat16), (1e-4, torch.float16)):
        new = old + move * torch.randn(numel, generator=random)
        new[3::40] = torch.nan
        for layout in layouts:
            yield encode_steps(new.to(dtype), old.to(dtype), STEPS_KEY, layout), old.to(dtype)


def of_steps(count: int, seed: int) -> Counter[str]:
    """`count` mutations of frames of exact steps."""
    random, found = Random(seed), Counter[str]()
    everything = [*step_frames(100), *step_frames(40), *step_frames(500, ["states"])]
    for number in range(count):
        data, held = (each.clone() for each in everything[number % len(everything)])
        mutate(data.numpy(), random)
        found[steps_outcome(sealed(data) if number % 2 else data, held)] += 1
    return found


def steps_outcome(data: Tensor, held: Tensor) -> str:
    """ "decoded", or why not; anything but a `WireError` goes through."""
    try:
        decode_steps(data, held, STEPS_KEY)
    except WireError as error:
        return "steps: " + re.sub(r"[^A-Za-z '].*", "…", str(error))[:40]
    return "steps: decoded"


FEWER = {
    "frames": 1,
    "steps": 1,
    "payloads": 1,
    "exchanges": 20,
    "rings": 50,
    "states": 50,
    "files": 100,
    "texts": 10,
}
"""What can be damaged, and in how many times the time of a frame, roughly."""


def runner(what: str) -> Callable[[int, int], Counter[str]]:
    """What takes count and seed, and counts how mutations came out."""
    if what in ("frames", "steps"):
        return run if what == "frames" else of_steps
    home = "fuzz_payloads" if what in ("payloads", "exchanges", "rings") else "fuzz_files"
    named = {"payloads": "of_codecs", "files": "of_saved_files"}.get(what, f"of_{what}")
    found: Callable[[int, int], Counter[str]] = getattr(import_module(f"tests.golden.{home}"), named)
    return found


def main() -> None:
    """Damage, count, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--what", choices=list(FEWER), default="frames")
    parser.add_argument("--count", type=int, default=1_000_000, help="frames; of all else as many fewer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--within-s", type=float, default=60.0, help="seconds of CPU time")
    parser.add_argument("--most-mib", type=float, default=16.0, help="growth of the largest resident size")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    damage, count = runner(arguments.what), arguments.count // FEWER[arguments.what]
    damage(min(1000, count), arguments.seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter(), time.process_time()
    found = damage(count, arguments.seed + 1)
    wall_s, cpu_s = time.perf_counter() - start[0], time.process_time() - start[1]
    more_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    for name, times in found.most_common():
        print(f"{times:>9}  {name}")
    print(f"{count} mutations in {wall_s:.1f} s ({cpu_s:.1f} s of CPU), {more_kib} KiB more memory")
    if cpu_s > arguments.within_s or more_kib > 1024 * arguments.most_mib:
        sys.exit(f"more than {arguments.within_s:g} s of CPU time or {arguments.most_mib:g} MiB")


if __name__ == "__main__":
    main()
