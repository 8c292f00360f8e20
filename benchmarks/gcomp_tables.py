"""How does a code of exponents fare with foreign gradients, and is a look-up worth it?

GComp (Li et al. 2024), section 7.3, on gradients of a model in training.

`foreign`: four blocks of gradients whose exponents differ much; a code is made for each and used for all.
Native is a Huffman code of all 256 exponents, as long as it gets, with a count of at least one for each; ours
is at most 8, 10 or 12 bits long and escapes rare exponents. Sizes as shares of a byte, tables not counted.

`decode`: nanoseconds per exponent and thread over blocks of different mean code length: down the tree bit by
bit, one look-up per code (the paper's), and ours, which finds up to seven codes with a look-up in four
streams. All read the same bytes, and what they give is compared. Settings in mixed order, medians of the
thread's own clock.

    python benchmarks/gcomp_tables.py [--workload resnet18] [--at 5 60] [--repetitions 9] [--json PATH]
"""

import argparse
import heapq
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numba
import numpy as np
import torch
from captured import snapshots
from numpy.typing import NDArray
from torch import Tensor

from gradwire.codec.gcomp import (
    SYMBOLS,
    CodeTable,
    canonical_codes,
    decode_symbols,
    encode_symbols,
    symbols_of,
)
from gradwire.kernels.cpu import huffman
from gradwire.lab.bench.statistics import mixed

LEAST = 1 << 14
"""Elements of a block; smaller layers are left out."""
LIMITS = (8, 10, 12)


def native_lengths(counts: Tensor) -> NDArray[np.int64]:
    """Lengths (256,) of a Huffman code without a limit.

    >>> native_lengths(torch.tensor([10**6] + [0] * 255))[:2].tolist()
    [1, 9]
    """
    heap = [(max(int(count), 1), symbol, [symbol]) for symbol, count in enumerate(counts)]
    heapq.heapify(heap)
    lengths = np.zeros(SYMBOLS, np.int64)
    while len(heap) > 1:
        (a, order, left), (b, _order, right) = heapq.heappop(heap), heapq.heappop(heap)
        lengths[left + right] += 1
        heapq.heappush(heap, (a + b, order, left + right))
    return lengths


def blocks(workload: str, at: list[int]) -> list[tuple[str, Tensor]]:
    """(name, symbols) of all large layers at the steps `at`, by ascending mean exponent."""
    found = [
        (f"{layer.name}, step {step}", symbols_of(layer.gradient, flush=True))
        for step, layers in snapshots(workload, at)
        for layer in layers
        if layer.gradient.numel() >= LEAST
    ]
    return sorted(found, key=lambda block: float(block[1].float().mean()))


def apart(found: list[tuple[str, Tensor]], count: int = 4) -> list[tuple[str, Tensor]]:
    """Blocks from all over the range, each once."""
    places = np.unique(np.linspace(0, len(found) - 1, count).round().astype(int))
    return [found[place] for place in places]


def foreign(chosen: list[tuple[str, Tensor]]) -> dict[str, list[list[float]]]:
    """By code: shares of a byte, a row for each source, a column for each block that is coded."""
    counts = [_counts(symbols) for _, symbols in chosen]
    sizes = [int(each.sum()) * 8 for each in counts]
    native = [native_lengths(each) for each in counts]
    rows = {
        "native": [
            [float((lengths * each.numpy()).sum()) / size for each, size in zip(counts, sizes, strict=True)]
            for lengths in native
        ]
    }
    for limit in LIMITS:
        tables = [CodeTable.from_histogram(each, limit) for each in counts]
        rows[f"at most {limit} bits"] = [
            [table.bits(each) / size for each, size in zip(counts, sizes, strict=True)] for table in tables
        ]
    return rows


def _counts(symbols: Tensor) -> Tensor:
    return torch.bincount(symbols.long(), minlength=SYMBOLS)


@numba.njit(cache=True)
def walk_tree(data: Any, bit: Any, children: Any, out: Any, start: Any, stop: Any) -> None:
    """Symbols [start, stop) from bit `bit` of `data`, a step down the tree for each bit."""
    for index in range(start, stop):
        node = 0
        while node >= 0:
            node = children[node, (data[bit >> 3] >> (bit & 7)) & 1]
            bit += 1
        out[index] = -node - 1


@numba.njit(cache=True)
def look_up(data: Any, bit: Any, singles: Any, mask: Any, out: Any, start: Any, stop: Any) -> None:
    """The same with one look-up per code: `singles` (2^n,) holds symbol · 16 + length."""
    for index in range(start, stop):
        place = bit >> 3
        window = data[place] | data[place + 1] << 8 | data[place + 2] << 16
        entry = singles[(window >> (bit & 7)) & mask]
        out[index] = entry >> 4
        bit += entry & 15


def tree_of(table: CodeTable) -> NDArray[np.int16]:
    """Children (nodes, 2): a node, or −1 − symbol."""
    children = [[0, 0]]
    for symbol, code in enumerate(canonical_codes(table.lengths)):
        length, node = int(table.lengths[symbol]), 0
        for depth in range(length):
            side = int(code) >> depth & 1
            if depth == length - 1:
                children[node][side] = -1 - symbol
            elif children[node][side] == 0:
                children.append([0, 0])
                children[node][side] = len(children) - 1
            node = children[node][side]
    return np.array(children, np.int16)


def singles_of(table: CodeTable) -> tuple[NDArray[np.int32], int]:
    """What `look_up` takes."""
    longest = int(table.lengths.max())
    singles = np.zeros(1 << longest, np.int32)
    for symbol, code in enumerate(canonical_codes(table.lengths)):
        length = int(table.lengths[symbol])
        if length:
            singles[int(code) :: 1 << length] = symbol << 4 | length
    return singles, (1 << longest) - 1


class Decoding:
    """One block of symbols, coded with a table of its own."""

    def __init__(self, symbols: Tensor) -> None:
        self.count = symbols.numel()
        self.table = CodeTable.from_histogram(_counts(symbols))
        self.words, self.sizes = encode_symbols(symbols, self.table.lookups)
        self.data = np.concatenate([self.words.numpy().view(np.uint8), np.zeros(4, np.uint8)])
        self.tree, (self.singles, self.mask) = tree_of(self.table), singles_of(self.table)
        self.out = np.empty(self.count, np.uint8)
        written = self.table.lookups.singles[symbols.numpy()] & np.uint32(31)
        self.mean_bits = float(written.mean())

    def streams(self) -> list[tuple[int, int, int]]:
        """First bit, and symbols [start, stop), of each."""
        quarter = int(huffman.quarter(self.count))
        firsts = np.cumsum([0, *self.sizes])[:4] * 64
        return [
            (int(bit), min(k * quarter, self.count), min((k + 1) * quarter, self.count))
            for k, bit in enumerate(firsts)
        ]

    def by_tree(self) -> None:
        """Bit by bit."""
        for bit, start, stop in self.streams():
            walk_tree(self.data, bit, self.tree, self.out, start, stop)

    def by_look_up(self) -> None:
        """Code by code."""
        for bit, start, stop in self.streams():
            look_up(self.data, bit, self.singles, self.mask, self.out, start, stop)

    def ours(self) -> None:
        """As in a frame."""
        decode_symbols(self.words, self.sizes, self.count, self.table.lookups, torch.from_numpy(self.out))

    def measure(self, symbols: Tensor, repetitions: int) -> dict[str, float]:
        """Nanoseconds per symbol."""
        expected = torch.where(torch.from_numpy(self.table.lengths == 0)[symbols.long()], 255, symbols)
        ways: dict[str, Callable[[], None]] = {
            "tree": self.by_tree,
            "look-up": self.by_look_up,
            "ours": self.ours,
        }
        spent: dict[str, list[float]] = {name: [] for name in ways}
        for number in range(repetitions + 1):
            for name in mixed(list(ways), number):
                self.out.fill(0)
                start = time.thread_time()
                ways[name]()
                if number:
                    spent[name].append((time.thread_time() - start) / self.count * 1e9)
                assert torch.equal(torch.from_numpy(self.out), expected), f"{name} decodes wrongly"
        return {"mean bits": self.mean_bits, **{name: median(each) for name, each in spent.items()}}


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", default="resnet18")
    parser.add_argument("--at", nargs="+", type=int, default=[5, 60])
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = blocks(arguments.workload, arguments.at)
    if not found:
        raise SystemExit(f"no layer of {arguments.workload} has {LEAST} elements")
    chosen = apart(found)
    names = [f"S{k + 1}" for k in range(len(chosen))]
    print("\n".join(f"{short}: {name}" for short, (name, _) in zip(names, chosen, strict=True)))
    sizes = foreign(chosen)
    for what, rows_of in sizes.items():
        print(f"\n| {what}: code of | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
        for name, row in zip(names, rows_of, strict=True):
            print(f"| {name} | " + " | ".join(f"{size:.3f}" for size in row) + " |")
    print("\n| mean code, bits | tree, ns | one look-up, ns | ours, ns |\n|---|---|---|---|")
    rows = [Decoding(symbols).measure(symbols, arguments.repetitions) for _, symbols in _ranged(found)]
    for row in rows:
        print(f"| {row['mean bits']:.2f} | {row['tree']:.2f} | {row['look-up']:.2f} | {row['ours']:.2f} |")
    print("All three gave the symbols that were coded, in every repetition.")
    if arguments.json:
        document = {"blocks": [name for name, _ in chosen], "sizes": sizes, "decode": rows}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


def _ranged(found: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Five blocks from the shortest to the longest mean code."""

    def bits(block: tuple[str, Tensor]) -> float:
        counts = _counts(block[1])
        return CodeTable.from_histogram(counts).bits(counts) / block[1].numel()

    return apart(sorted(found, key=bits), 5)


if __name__ == "__main__":
    main()
