"""Exact steps: the change of 16-bit numbers whose old values the receiver has, without any loss.

From one optimizer step to the next, most weights in bfloat16 keep their bits. The others move by a few units
in the last place. How often and how far follows from the exponent of the old weight, which costs nothing to
send. So changes are coded by classes of exponents (`gradwire.kernels.ulps`), in one of three layouts:

- *states*: asymmetric numeral systems (Duda, "Asymmetric numeral systems", 2013, arXiv:1311.2540), with a
  table for each class. Within a thirtieth of the entropy, and tables of 0.1 to 0.6 kB; a CPU reads it fast.
- *runs*: Rice's codes (Rice, "Some practical universal noiseless coding techniques", 1979) of the gaps
  between changes of a class, and of the changes. Within an eighth of the entropy, and shorter than states
  where numbers are few.
- *widths*: a field of fixed width for each number, by its class, and a list of changes that do not fit. About
  one bit a number longer; all numbers can be decoded at the same time.

If neither is shorter, a frame holds the new numbers. `docs/engineering/wire-format.md` has the layout of a
frame, which does not change: `tests/golden/steps` holds frames that later versions read.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gradwire.errors import WireError
from gradwire.kernels.frames import checksum
from gradwire.kernels.ulps import (
    CLASSES,
    EVERY,
    LEVELS,
    MOST_ONES,
    NO_CHANGE,
    STATE_BITS,
    SYMBOLS,
    Halves,
    add_runs,
    add_states,
    add_widths,
    listed_symbols,
    pack_runs,
    pack_states,
    pack_widths,
    shares_of,
    tally_changes,
)

Layout = Literal["raw", "runs", "widths", "states"]

MAGIC = b"GWes"
VERSION = 2
_VERSIONS: dict[Layout, int] = {"raw": 1, "runs": 1, "widths": 1, "states": 2}
"""Version that a frame of each layout has: the first one that has the layout."""
_LAYOUT = struct.Struct("<4sBBBBIIQQQ")
_TABLE = slice(_LAYOUT.size, _LAYOUT.size + CLASSES)
HEADER_BYTES = _TABLE.stop
CHECKSUM_BYTES = 8
_LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_FOR_CPUS: tuple[Layout, ...] = ("states", "runs")
_TYPES = {torch.bfloat16: (1, 7), torch.float16: (2, 10)}
"""Number in the header, and bits of the mantissa."""
_ABOVE = 1 / 1024
"""Share of the numbers whose exponents may lie above the first class, so that an outlier moves no class."""
_LISTED_BITS = 32
_DIRECTORY_BITS = 64 / 2048


@dataclass(frozen=True)
class StepsKey:
    """Identity of a frame: a receiver refuses a frame with another key than it expects.

    `module` and `world` are the sender's numbers for what is sent, below 2^32. `base`, below 2^64, stands for
    the old numbers: `digest_of` them, or any number that sender and receiver change alike.

    >>> StepsKey(module=0, world=2, base=7)
    StepsKey(module=0, world=2, base=7)
    """

    module: int
    world: int
    base: int

    def __post_init__(self) -> None:
        for name, bits in (("module", 32), ("world", 32), ("base", 64)):
            value = getattr(self, name)
            if not 0 <= value < 1 << bits:
                raise ValueError(f"{name}={value} does not fit into {bits} bits without a sign")


def digest_of(x: Tensor) -> int:
    """XXH64 of the bytes of `x`, which tells other numbers from these.

    >>> digest_of(torch.zeros(4, dtype=torch.bfloat16)) == digest_of(torch.zeros(5, dtype=torch.bfloat16))
    False
    """
    return checksum(x)


def largest_steps(numel: int) -> int:
    """Largest size in bytes of a frame of `numel` numbers: all of them raw.

    >>> largest_steps(1000)
    2064
    """
    return HEADER_BYTES + -(-numel // 4) * 8 + CHECKSUM_BYTES


def encode_steps(new: Tensor, old: Tensor, key: StepsKey, layout: Layout | None = None) -> Tensor:
    """Encode `new` (n,), given `old` (n,), as one frame. Returns it as uint8 bytes, on the device of `new`.

    The number of bytes is a multiple of 8, and at most `largest_steps(n)`.

    Args:
        new, old: bfloat16 or float16, contiguous. All bits are kept, of NaN, too.
        key: identifies the frame.
        layout: "states", "runs" or "widths" (as the module has them), or "raw". If "raw" is shorter, it is
            taken. By default the shorter one of states and runs, which suit a CPU.

    Raises `ValueError` for other types or sizes.
    >>> old = torch.ones(1000, dtype=torch.bfloat16)
    >>> new, key = old.clone(), StepsKey(module=0, world=1, base=digest_of(old))
    >>> new[3] = 1.0078125
    >>> data = encode_steps(new, old, key)
    >>> decode_steps(data, old, key)
    >>> data.numel(), torch.equal(old, new)
    (72, True)
    """
    number, mantissa = _halves(new, old)
    table, words, base = bytes(CLASSES), new, 0
    taken: Layout = "raw"
    if layout != "raw" and new.numel():
        tally = tally_changes(_bits(new), _bits(old), mantissa).cpu().numpy()
        base, classes = _classes(tally)
        fitted = [(each, *_FITTED[each](classes)) for each in ([layout] if layout else _FOR_CPUS)]
        taken, parameters, bits = min(fitted, key=lambda each: each[2])
        if bits < 16 * new.numel():
            table = (listed_symbols(parameters) if taken == "states" else parameters).tobytes()
            given = torch.from_numpy(parameters).to(new.device)
            words = _PACKED[taken](_bits(new), _bits(old), Halves(mantissa, base), given)
    if words.numel() * words.element_size() >= 2 * new.numel():
        words, taken = new, "raw"
    body = words.contiguous().view(torch.uint8)
    length = HEADER_BYTES + -(-body.numel() // 8) * 8 + CHECKSUM_BYTES
    head = _LAYOUT.pack(
        MAGIC, _VERSIONS[taken], _LAYOUTS.index(taken), number, base, key.world, key.module, new.numel(),
        key.base, length,
    )  # fmt: skip
    data = torch.zeros(length, dtype=torch.uint8, device="cpu")
    data[:HEADER_BYTES] = torch.frombuffer(bytearray(head + table), dtype=torch.uint8)
    data[HEADER_BYTES : HEADER_BYTES + body.numel()] = body
    data.numpy().view(np.uint64)[-1] = checksum(data[:-CHECKSUM_BYTES])
    return data.to(new.device)


def decode_steps(data: Tensor, held: Tensor, key: StepsKey) -> None:
    """Make the new numbers of the old ones in `held`, in place.

    Args:
        data: uint8 (bytes,), a frame.
        held: (n,), the old numbers; written.
        key: identity that the frame must have.

    Raises `WireError` for bytes that are no frame, are damaged, or are a frame of another key, type, size or
    version. `held` is then as before, unless the frame was made for other old numbers than its key says.
    """
    number, mantissa = _halves(held, held)
    most = largest_steps(held.numel())
    if data.dtype != torch.uint8 or data.dim() != 1 or not HEADER_BYTES < data.numel() <= most:
        raise WireError(f"{data.numel()} bytes are no frame of {held.numel()} numbers")
    here = data.cpu().contiguous()
    here = here.clone() if here.data_ptr() % 8 else here
    head = here[:HEADER_BYTES].numpy().tobytes()
    magic, version, layout, kind, base, world, module, count, digest, length = _LAYOUT.unpack_from(head)
    if magic != MAGIC:
        raise WireError(f"a frame of steps begins with {MAGIC!r}, not {magic!r}")
    if not 1 <= version <= VERSION:
        raise WireError(f"the frame is of version {version}; this gradwire reads versions 1 to {VERSION}")
    if length != data.numel() or length % 8:
        raise WireError(f"a frame of {length} bytes arrived as {data.numel()}")
    if int(here.numpy().view(np.uint64)[-1]) != checksum(here[:-CHECKSUM_BYTES]):
        raise WireError("a frame's checksum is wrong: its bytes were damaged on the way")
    if (found := StepsKey(module, world, digest)) != key:
        raise WireError(f"the frame belongs to {found}; expected was {key}")
    is_known = layout < len(_LAYOUTS) and version == _VERSIONS[_LAYOUTS[layout]]
    if (count, kind) != (held.numel(), number) or not is_known:
        raise WireError(
            f"the frame of version {version} holds {count} numbers of type {kind} in layout {layout}; "
            f"expected were {held.numel()} of type {number}"
        )
    body = data[HEADER_BYTES:-CHECKSUM_BYTES]
    if not _decoded(body, held, _LAYOUTS[layout], Halves(mantissa, base), data[_TABLE]):
        raise WireError("a frame of steps does not decode")


def _decoded(body: Tensor, held: Tensor, layout: Layout, halves: Halves, table: Tensor) -> bool:
    """Decode `body` into `held`; False if it is no such code."""
    if layout == "raw":
        if body.numel() != -(-held.numel() // 4) * 8 or bool(body[2 * held.numel() :].any()):
            return False
        held.view(torch.uint8).copy_(body[: 2 * held.numel()])
        return True
    body = body.clone() if body.data_ptr() % 8 else body
    if layout != "widths":
        add = add_runs if layout == "runs" else add_states
        return bool(add(body.view(torch.int64), _bits(held), halves, table.clone()))
    if bool((table > 16).any()):
        return False
    words = body.view(torch.int32)
    return bool(add_widths(words, _bits(held), halves, table.clone()))


def _halves(new: Tensor, old: Tensor) -> tuple[int, int]:
    """Number and mantissa's bits of the type. Raises `ValueError` for what a frame cannot hold."""
    if new.dtype not in _TYPES or new.dtype != old.dtype or new.shape != old.shape or new.dim() != 1:
        raise ValueError(
            f"exact steps are of flat bfloat16 or float16, as old and new: not {new.dtype} "
            f"{tuple(new.shape)} and {old.dtype} {tuple(old.shape)}"
        )
    return _TYPES[new.dtype]


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.int16)


Counts = NDArray[np.int64]


def _classes(tally: Counts) -> tuple[int, Counts]:
    """Exponent of the first class, and the rows of `tally` (256, 60) added up by class (16, 60)."""
    above = tally[::-1].sum(1).cumsum()
    base = 255 - int(np.searchsorted(above, _ABOVE * above[-1], side="right"))
    padded = np.concatenate([np.zeros((CLASSES, SYMBOLS), np.int64), tally])[: base + CLASSES + 1][::-1]
    classes = padded[:CLASSES].copy()
    classes[0] += tally[base + 1 :].sum(0)
    classes[-1] += padded[CLASSES:].sum(0)
    return base, classes


_FIRST_OF_BITS = np.array([0, 1, 2, *range(4, SYMBOLS, 4)])
"""First symbol (17,) of changes of 0, 1, … 16 bits."""


def _by_bits(classes: Counts) -> Counts:
    """Counts by symbol (16, 60), added up by the bits of changes (16, 17)."""
    return np.add.reduceat(classes, _FIRST_OF_BITS, 1)


_LOW_BITS = np.maximum(np.arange(SYMBOLS) // 4 - 1, 0)


def _states(classes: Counts) -> tuple[NDArray[np.uint8], int]:
    """Weights (16, 60) of the layout "states" for classes (16, 60), and about how many bits it then takes.

    A weight is the one nearest to the count of a symbol, in units in which the largest one fits.
    """
    unit = np.maximum(classes.max(1, keepdims=True) / LEVELS[-1], 1)
    weights = np.searchsorted(_BETWEEN, classes / unit).astype(np.uint8)
    weights[(classes > 0) & (weights == 0)] = 1
    shares = np.maximum(shares_of(weights), 1)
    listed = listed_symbols(weights)
    is_changing = listed > 0
    bits = classes * (STATE_BITS + _LOW_BITS - np.log2(shares))
    return weights, int(bits[is_changing].sum()) + 6 * int(listed.sum()) + _ROUNDED_UP


_ROUNDED_UP = 128
"""Bits of the first word, and of what is over in others."""
_BETWEEN = (LEVELS[1:] + LEVELS[:-1]) / 2


_VALUES = np.array([0.0, 1.0, *(1.45 * 2.0**bits for bits in range(1, 16))])
"""About the mean of changes of 0, 1, … 16 bits: smaller ones occur more often."""


def _rice(counts: Counts, values: NDArray[np.float64], most: int) -> tuple[NDArray[np.float64], Counts]:
    """Bits and parameters (classes,) of the best of Rice's codes for `counts` (classes, n) numbers of
    `values` (n,) or (classes, n). One number takes no more than what Rice's code is left for, so that few
    large ones choose no parameter.
    """
    parameters = np.arange(most + 1)[:, None, None]
    ones = np.maximum(values - (2.0**parameters - 1) / 2, 0) / 2.0**parameters
    bits = (counts * np.minimum(ones + 1 + parameters, MOST_ONES + 32)).sum(2)
    best = bits.argmin(0)
    return bits[best, np.arange(len(counts))], best


def _runs(classes: Counts) -> tuple[NDArray[np.uint8], int]:
    """Table of the layout "runs" for classes (16, 60), and about how many bits changes then take."""
    classes = _by_bits(classes)
    numbers, still = classes.sum(1), classes[:, 0]
    gaps = numbers - still + 1
    gap_bits, gap = _rice(gaps[:, None], (still / gaps)[:, None], NO_CHANGE - 1)
    step_bits, step = _rice(classes[:, 1:], _VALUES[1:] - 1, 15)
    all_bits, each = _rice(classes, _VALUES, 15)
    is_every = all_bits < gap_bits + step_bits
    table = np.where(is_every, EVERY << 4 | each, gap << 4 | step)
    bits = np.where(is_every, all_bits, gap_bits + step_bits)
    is_still = numbers == still
    return np.where(is_still, NO_CHANGE << 4, table).astype(np.uint8), int(bits[~is_still].sum())


def _widths(classes: Counts) -> tuple[NDArray[np.uint8], int]:
    """Table of the layout "widths" for classes (16, 60), and how many bits changes then take, about."""
    classes = _by_bits(classes)
    numbers = classes.sum(1)
    listed = numbers[:, None] - classes.cumsum(1)
    bits = numbers[:, None] * np.arange(17) + _LISTED_BITS * listed
    best = bits.argmin(1)
    total = bits[np.arange(CLASSES), best].sum() + _DIRECTORY_BITS * numbers.sum()
    return best.astype(np.uint8), int(total)


_FITTED: dict[Layout, Callable[[Counts], tuple[NDArray[np.uint8], int]]]
_FITTED = {"states": _states, "runs": _runs, "widths": _widths}
"""From counts by class to the layout's parameters, and about how many bits changes then take."""
_PACKED: dict[Layout, Callable[[Tensor, Tensor, Halves, Tensor], Tensor]]
_PACKED = {"states": pack_states, "runs": pack_runs, "widths": pack_widths}
