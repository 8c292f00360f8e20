"""How fast does a core encode and decode exact steps, and how near is a frame to the entropy?

Weights are of a normal distribution of σ 0.02, in bfloat16, and each moves by a normal step of `--moves`, so
that 1e-5 changes about 0.9 bits a number and 1e-3 about 6. Times are of whole frames in one thread, heads and
checksums included, of the fastest of `--repetitions` calls in turn. "of the floor" is the frame's size over
the entropy of the changes, given the exponents of the old numbers; tables cost that nothing.

Goal: 1 GB/s of 16-bit numbers a core for decoding, in shards of 100,000 and more; 1.2 of the floor.

    python benchmarks/exact_codec.py [--sizes 20000 150000 1000000] [--layouts states runs widths]
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import numpy as np
import torch
from exact_steps import floor_bits

from gradwire.codec.exact_steps import Layout, StepsKey, decode_steps, encode_steps

KEY = StepsKey(module=0, world=4, base=1)


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def row(numel: int, move: float, layout: Layout, repetitions: int) -> str:
    """A line of the table. Raises `AssertionError` unless what was coded comes back."""
    random = torch.Generator().manual_seed(numel)
    weights = torch.randn(numel, generator=random) * 0.02
    old, new = weights.bfloat16(), (weights + move * torch.randn(numel, generator=random)).bfloat16()
    bits = [each.view(torch.int16).numpy().view(np.uint16) for each in (old, new)]
    data, held = encode_steps(new, old, KEY, layout), old.clone()
    decode_steps(data, held, KEY)
    assert torch.equal(held.view(torch.int16), new.view(torch.int16))
    encoded, decoded = [], []
    for _ in range(repetitions):
        encoded.append(timed(partial(encode_steps, new, old, KEY, layout)))
        held.copy_(old)
        decoded.append(timed(partial(decode_steps, data, held, KEY)))
    took_ns = 1e9 * min(decoded) / numel
    return (
        f"| {numel:,} | {move:g} | {layout} | {8 * data.numel() / numel:.2f} | "
        f"{8 * data.numel() / floor_bits(*bits):.2f} | {1e9 * min(encoded) / numel:.1f} | {took_ns:.1f} | "
        f"{2 / took_ns:.2f} |"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="*", default=[20_000, 150_000, 1_000_000])
    parser.add_argument("--moves", type=float, nargs="*", default=[1e-6, 1e-5, 1e-4, 1e-3])
    parser.add_argument(
        "--layouts", nargs="*", choices=get_args(Layout), default=["states", "runs", "widths"]
    )
    parser.add_argument("--repetitions", type=int, default=60)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| numbers | move | layout | bits | of the floor | encode, ns | decode, ns | decode, GB/s |")
    print("|---" * 8 + "|")
    for numel in options.sizes:
        for move in options.moves:
            for layout in options.layouts:
                print(row(numel, move, layout, options.repetitions), flush=True)


if __name__ == "__main__":
    main()
