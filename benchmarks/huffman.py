"""How fast are exponents coded and decoded, and how near is the size to the entropy?

The Huffman stage of `gradwire.codec.gcomp` on the exponent bytes of float32, one thread, beside zstd with
its match finder off, so that only its entropy coder huff0 is left (strategy fast, a step of 131 072 bytes,
literals compressed always), and beside zstd at level 1 on the float32 bytes themselves, which is what one
does who knows nothing of floats. A whole lossless frame, mantissas and checksum included, is shown too.

huff0 counts symbols and builds a code for every 128 KiB; ours uses a table for 50 steps. Both are shown:
`encode` with the table at hand, as in training, and `count + build + encode`, where each call builds its own.
Size is against the entropy of all exponents together plus the table's 128 bytes.

Exponents of a normal distribution, of Laplace's, of one with layers of different scale, and of one that is
half zeros; fresh in every repetition. Settings of a repetition run in mixed order; `A/A` is the 95 % interval
of the paired ratio of encoding to encoding. All write to memory that was used before.
Times are the thread's own clock's. Every repetition checks that
what was coded comes back, from the peers too; first, streams are compared with the slow decoder at a small n.

The match finder's switch and the literals' mode are parameters that only libzstd's C interface has: it is
loaded by ctypes, and the system's version is printed. zlib and the `zstandard` package are in `--others`.

Goal: size at most 1.02 of entropy + table; at least 1x / 1x of huff0's speed (stretch 1.3x / 1.5x), and 4x
that of zstd level 1 on the floats, per element.

    python benchmarks/huffman.py [--numel 16000000] [--repetitions 9] [--lengths] [--others] [--json PATH]
"""

import argparse
import ctypes
import ctypes.util
import json
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.codec.gcomp import (
    CodeTable,
    Key,
    decode_symbols,
    encode_symbols,
    frame,
    histogram,
    largest_frame,
    symbols_of,
    unframe,
)
from gradwire.kernels.huffman import Lookups, count_symbols, encoded_words
from gradwire_lab.bench.statistics import mixed, paired

sys.path.append(str(Path(__file__).parents[1]))  # the slow decoder belongs to the tests
from tests.golden import slow

KEY = Key(step=0, unit=0, hop=0)


def normal(numel: int) -> Tensor:
    return torch.randn(numel).mul_(1e-3)


def laplace(numel: int) -> Tensor:
    return torch.empty(numel).exponential_().mul_(1e-4).mul_(torch.randn(numel).sign_())


def layered(numel: int) -> Tensor:
    """Forty layers with scales apart by e each way."""
    scales = torch.randn(40).exp_().repeat_interleave(-(-numel // 40))[:numel]
    return torch.randn(numel).mul_(scales).mul_(1e-4)


def half_zeros(numel: int) -> Tensor:
    return normal(numel).mul_(torch.rand(numel) < 0.5)


KINDS: dict[str, Callable[[int], Tensor]] = {
    "normal": normal, "laplace": laplace, "layered": layered, "half zeros": half_zeros
}  # fmt: skip


class Zstd:
    """libzstd through its C interface."""

    LEVEL, STRATEGY, TARGET_LENGTH, LITERALS = 100, 107, 106, 1002

    def __init__(self, parameters: dict[int, int], numel: int) -> None:
        name = ctypes.util.find_library("zstd")
        if name is None:
            raise SystemExit(
                "libzstd is not installed (apt-get install libzstd1): there is no peer to measure"
            )
        self.lib = ctypes.CDLL(name)
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        self.lib.ZSTD_versionString.restype = ctypes.c_char_p
        for create in (self.lib.ZSTD_createCCtx, self.lib.ZSTD_createDCtx):
            create.restype = pointer
        for function in (self.lib.ZSTD_compress2, self.lib.ZSTD_decompressDCtx):
            function.argtypes, function.restype = [pointer, pointer, size, pointer, size], size
        self.lib.ZSTD_CCtx_setParameter.argtypes = [pointer, ctypes.c_int, ctypes.c_int]
        self.lib.ZSTD_CCtx_setParameter.restype = size
        self.lib.ZSTD_isError.argtypes = [size]
        self.compressor, self.decompressor = self.lib.ZSTD_createCCtx(), self.lib.ZSTD_createDCtx()
        for parameter, value in parameters.items():
            answer = self.lib.ZSTD_CCtx_setParameter(self.compressor, parameter, value)
            assert not self.lib.ZSTD_isError(answer), f"libzstd refuses parameter {parameter}={value}"
        self.room = np.zeros(numel + numel // 8 + 4096, np.uint8)
        self.back = np.zeros(numel, np.uint8)

    def compress(self, data: np.ndarray) -> int:
        """Into `room`; returns the size."""
        to, given = self.room, data
        return int(
            self.lib.ZSTD_compress2(self.compressor, to.ctypes.data, to.size, given.ctypes.data, given.size)
        )

    def decompress(self, size: int) -> int:
        """`size` bytes of `room` into `back`."""
        to, given = self.back, self.room
        return int(
            self.lib.ZSTD_decompressDCtx(self.decompressor, to.ctypes.data, to.size, given.ctypes.data, size)
        )


def check_against_slow(numel: int) -> None:
    """What the fast encoder writes, the slow decoder reads."""
    for draw in KINDS.values():
        x = draw(numel)
        table = CodeTable.from_histogram(histogram(x))
        data = frame(x, 0, table, KEY, explicit=False, flush=False).numpy().tobytes()
        words = slow.unframe(data, numel, "torch.float32", 0, {table.id: table.lengths.tolist()}, KEY)
        assert words == [word % 2**32 for word in x.view(torch.int32).tolist()]


def entropy_bits(counts: Tensor) -> float:
    """Bits of all symbols together, if each cost -log2 of its share."""
    some = counts[counts > 0].double()
    return float((some * (some.sum() / some).log2()).sum())


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Of one call, on the thread's own clock."""
    start = time.thread_time()
    work()
    return time.thread_time() - start


def coded_alone(symbols: Tensor, room: Tensor) -> None:
    """Count, build a table with its look-ups, and encode."""
    table = CodeTable.from_histogram(count_symbols(symbols))
    encode_symbols(symbols, table.lookups, room)


def measure(kind: str, numel: int, repetitions: int) -> dict[str, Any]:
    """One row of the table."""
    huff0 = Zstd({Zstd.LEVEL: 1, Zstd.STRATEGY: 1, Zstd.TARGET_LENGTH: 131_072, Zstd.LITERALS: 1}, numel)
    level1 = Zstd({Zstd.LEVEL: 1}, 4 * numel)
    seconds: dict[str, list[float]] = {}
    sizes: dict[str, list[float]] = {}
    buffer, out = torch.zeros(largest_frame(numel, torch.float32), dtype=torch.uint8), torch.zeros(numel)
    room, back = torch.zeros(encoded_words(numel), dtype=torch.int64), torch.zeros(numel, dtype=torch.uint8)
    for repetition in range(repetitions):
        x = KINDS[kind](numel)
        symbols, counts = symbols_of(x), histogram(x)
        exponents, floats = symbols.numpy(), x.numpy().view(np.uint8)
        table = CodeTable.from_histogram(counts)
        lookups, tables = table.lookups, {table.id: table}
        _ = lookups.encoding, lookups.decoding
        words, parts = encode_symbols(symbols, lookups)
        data = frame(x, 0, table, KEY, explicit=False, flush=False, buffer=buffer)
        literals, whole = huff0.compress(exponents), level1.compress(floats)
        work: list[tuple[str, Callable[[], Any]]] = [
            ("encode", lambda s=symbols, t=lookups: encode_symbols(s, t, room)),
            ("encode again", lambda s=symbols, t=lookups: encode_symbols(s, t, room)),
            ("count + build + encode", lambda s=symbols: coded_alone(s, room)),
            ("decode", lambda w=words, p=parts, t=lookups: decode_symbols(w, p, numel, t, back)),
            ("huff0 encode", lambda e=exponents: huff0.compress(e)),
            ("huff0 decode", lambda n=literals: huff0.decompress(n)),
            ("frame", lambda x=x, t=table: frame(x, 0, t, KEY, explicit=False, flush=False, buffer=buffer)),
            ("unframe", lambda d=data, t=tables: unframe(d, out, 0, t, KEY)),
            ("zstd 1 encode", lambda f=floats: level1.compress(f)),
            ("zstd 1 decode", lambda n=whole: level1.decompress(n)),
        ]
        for name, call in mixed(work, repetition):
            seconds.setdefault(name, []).append(cpu_seconds(call))
        escaped = torch.from_numpy(lookups.escaped)[symbols.long()]
        found = decode_symbols(words, parts, numel, lookups)
        assert found is not None
        assert torch.equal(torch.where(escaped, symbols, found), symbols)
        assert torch.equal(out.view(torch.int32), x.view(torch.int32))
        assert np.array_equal(huff0.back, exponents)
        assert np.array_equal(level1.back, floats)
        escapes = 8 * int(escaped.sum())
        ours = 64 * words.numel() + escapes + 8 * 128
        entropy = entropy_bits(counts)
        for name, bits in (
            ("entropy", entropy), ("ours", ours), ("to entropy", 1.0), ("huff0", 8 * literals),
            ("frame", 8 * data.numel()), ("zstd 1", 8 * whole),
        ):  # fmt: skip
            sizes.setdefault(name, []).append(bits / numel)
        sizes["to entropy"][-1] = ours / (entropy + 8 * 128)
    return row_of(kind, numel, seconds, sizes)


PAIRS = (
    ("huff0 encode", "encode"),
    ("huff0 encode", "count + build + encode"),
    ("huff0 decode", "decode"),
    ("zstd 1 encode", "encode"),
    ("zstd 1 decode", "decode"),
    ("zstd 1 encode", "frame"),
    ("zstd 1 decode", "unframe"),
)


def row_of(
    kind: str, numel: int, seconds: dict[str, list[float]], sizes: dict[str, list[float]]
) -> dict[str, Any]:
    """Medians, and paired ratios of the peer's time to ours."""
    again = paired(seconds["encode again"], seconds["encode"])
    ratios = {f"{theirs} / {ours}": paired(seconds[theirs], seconds[ours]).ratio for theirs, ours in PAIRS}
    return {
        "kind": kind,
        "ns": {name: median(values) / numel * 1e9 for name, values in seconds.items()},
        "bits": {name: median(values) for name, values in sizes.items()},
        "ratios": ratios,
        "aa": [again.low, again.high],
    }


def show(row: dict[str, Any]) -> None:
    """A row as text."""
    ns, bits = row["ns"], row["bits"]
    print(f"\n{row['kind']}, A/A {row['aa'][0]:.2f} … {row['aa'][1]:.2f}")
    print(
        f"  exponents, bits: entropy {bits['entropy']:.4f}, ours {bits['ours']:.4f} "
        f"({bits['to entropy']:.4f} of entropy + table), huff0 {bits['huff0']:.4f}; "
        f"floats: frame {bits['frame']:.2f}, zstd 1 {bits['zstd 1']:.2f}"
    )
    print("  ns per element: " + ", ".join(f"{name} {value:.2f}" for name, value in ns.items()))
    print("  " + ", ".join(f"{name} {value:.2f}x" for name, value in row["ratios"].items()))


def lengths(numel: int) -> None:
    """Which limit n_theta: sizes and speeds of 8 … 12 bits."""
    print("\nn_theta: bits per exponent / encode / decode, ns per element")
    for kind, draw in KINDS.items():
        symbols = symbols_of(draw(numel))
        counts = count_symbols(symbols)
        texts = []
        for longest in (8, 9, 10, 11, 12):
            table = CodeTable.from_histogram(counts, longest)
            lookups: Lookups = table.lookups
            words, parts = encode_symbols(symbols, lookups)
            decode_symbols(words, parts, numel, lookups)
            encode_s = median(
                cpu_seconds(lambda s=symbols, t=lookups: encode_symbols(s, t)) for _ in range(7)
            )
            decode_s = median(
                cpu_seconds(lambda w=words, p=parts, t=lookups: decode_symbols(w, p, numel, t))
                for _ in range(7)
            )
            share, scale = table.bits(counts) / numel, 1e9 / numel
            texts.append(f"{longest}: {share:.4f} / {encode_s * scale:.2f} / {decode_s * scale:.2f}")
        print(f"  {kind:<11}" + "   ".join(texts))


def others(numel: int) -> None:
    """The comparison codecs on the same floats: zlib, and zstd's levels as its Python package offers them."""
    import zstandard  # a development dependency

    print("\nlossless codecs on float32 bytes: size of the original, ns per element")
    for kind, draw in KINDS.items():
        data = draw(numel).numpy().tobytes()
        codecs: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
            "zlib 1": (lambda b: zlib.compress(b, 1), zlib.decompress),
            "zlib 6": (lambda b: zlib.compress(b, 6), zlib.decompress),
            "zstd 1": (zstandard.ZstdCompressor(level=1).compress, zstandard.ZstdDecompressor().decompress),
            "zstd 3": (zstandard.ZstdCompressor(level=3).compress, zstandard.ZstdDecompressor().decompress),
        }
        texts = []
        for name, (compress, decompress) in codecs.items():
            start = time.thread_time()
            packed = compress(data)
            middle = time.thread_time()
            assert decompress(packed) == data
            stop = time.thread_time()
            spent = [1e9 * s / numel for s in (middle - start, stop - middle)]
            texts.append(f"{name}: {len(packed) / len(data):.3f}, {spent[0]:.1f} / {spent[1]:.1f}")
        print(f"  {kind:<11}" + "   ".join(texts))


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--numel", type=int, default=16_000_000)
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--lengths", action="store_true", help="compare limits of the code's length too")
    parser.add_argument("--others", action="store_true", help="zlib and other levels of zstd too")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    check_against_slow(min(arguments.numel, 5000))
    version = Zstd({}, 1).lib.ZSTD_versionString().decode()
    print(f"{arguments.numel} elements, CPU time of one thread; libzstd {version}")
    rows = []
    for kind in KINDS:
        rows.append(measure(kind, arguments.numel, arguments.repetitions))
        show(rows[-1])
    verdict(rows)
    if arguments.lengths:
        lengths(arguments.numel)
    if arguments.others:
        others(min(arguments.numel, 2_000_000))
    if arguments.json:
        document = {"numel": arguments.numel, "libzstd": version, "rows": rows}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")


def verdict(rows: list[dict[str, Any]]) -> None:
    """The goals, by the worst row."""
    size = max(row["bits"]["to entropy"] for row in rows)
    print(f"\ngoal: size ≤ 1.02 of entropy + table: {size:.4f},", "met" if size <= 1.02 else "missed")
    goals = {"huff0 encode / encode": 1, "huff0 decode / decode": 1}
    goals |= {"zstd 1 encode / encode": 4, "zstd 1 decode / decode": 4}
    for name in rows[0]["ratios"]:
        worst = min(row["ratios"][name] for row in rows)
        goal = goals.get(name)
        text = f"goal {goal}x, {'met' if worst >= goal else 'missed'}" if goal else "no goal"
        print(f"{name}: at least {worst:.2f}x ({text})")


if __name__ == "__main__":
    main()
