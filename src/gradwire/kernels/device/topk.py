"""Exact top-k by magnitude: one pass over memory sifts by a guess, the others read what passed.

Differences from the CPU's kernel: the threshold does not rise while it sifts. Where more pass than there is
room for, or fewer than k do, the same launches read the tensor itself, three times more: nothing on the host
knows of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.device.bodies import topk as bodies
from gradwire.kernels.device.launch import TILE, is_taken, launch
from gradwire.kernels.dispatch import DECLINED, Declined
from gradwire.kernels.uploads import kept_by_stream, sent_to

SAMPLE = 16384
_TILE = 4096
_WARPS = 16
"""For 8 elements a thread. Larger tiles than elsewhere: three launches have a program for each."""
_SPARE = 1 << 16
"""Room for candidates beyond 2k."""
_DIGITS = 2048
_SLOTS = 512
"""Candidates of a tile that are looked at together: at 1 % there are 41 of them."""
_PROGRAMS = 264
"""That count digits, two for each multiprocessor of an H200: each adds its bins to the others'."""
_FIRST = 16
"""Where histograms begin: after the count of candidates (0), and what is known by round (2 … 9)."""


def topk_indices(x: Tensor, k: int) -> Tensor | Declined:
    """4 bytes an element, and some 40 a candidate."""
    found = _topk(x, k, None)
    return found[0] if isinstance(found, tuple) else found


def take_topk(x: Tensor, k: int, weight: float = 1.0) -> tuple[Tensor, Tensor] | Declined:
    """As `topk_indices`; values are candidates, and zeros are written where they were."""
    return _topk(x, k, weight)


def feedback_topk(memory: Tensor, grad: Tensor, k: int) -> tuple[Tensor, Tensor] | Declined:
    """The sum first, in a pass of its own: under DDP it is a fold, long before."""
    if not is_taken(memory, grad):
        return DECLINED
    memory.add_(grad)
    return _topk(memory, k, 1.0)


def _topk(x: Tensor, k: int, weight: float | None) -> tuple[Tensor, Tensor] | Declined:
    if not is_taken(x) or x.ndim != 1 or x.numel() >= 2**31:
        return DECLINED
    numel, tiles = x.numel(), -(-x.numel() // _TILE)
    indices = torch.empty(k, dtype=torch.int64, device=x.device)
    taken = torch.empty(0 if weight is None else k, device=x.device)
    if k == 0:
        return indices, taken
    state = torch.zeros(_FIRST + 3 * _DIGITS, dtype=torch.int32, device=x.device)
    passed, states, bins = state, state[2:], state[_FIRST:]
    guess = _guess(x, k)
    room = 0 if guess is None else min(numel, 2 * k + _SPARE)
    spans = torch.empty(2 * tiles, dtype=torch.int32, device=x.device)
    places = torch.empty(room, dtype=torch.int16, device=x.device)
    values = torch.empty(room, device=x.device)
    if guess is not None:
        launch(
            bodies.sift,
            tiles,
            x,
            numel,
            guess,
            passed,
            room,
            spans,
            places,
            values,
            TILE=_TILE,
            num_warps=_WARPS,
        )
    for number in range(3):
        launch(
            bodies.count_digits, min(tiles, _PROGRAMS), x, numel, k, passed, room, values, bins, states,
            ROUND=number, TILE=TILE,
        )  # fmt: skip
    launch(bodies.settle, 1, bins, states, ROUND=3)
    source = x, numel, k, passed, room, spans, places, values, states[6:]
    few = {"TILE": _TILE, "SLOTS": _SLOTS, "num_warps": _SLOTS // 32 // 4}
    counts = torch.empty(2, tiles, dtype=torch.int32, device=x.device)
    launch(bodies.count_kept, tiles, *source, counts, **few)
    before = counts.cumsum(1, dtype=torch.int32)
    launch(
        bodies.take_kept, tiles, *source, before, indices, taken, 1.0 if weight is None else weight,
        TAKE=weight is not None, **few,
    )  # fmt: skip
    return indices, taken


def _guess(x: Tensor, k: int) -> Tensor | None:
    """A threshold that the k-th largest magnitude very likely reaches, as on the CPU; none if k is large."""
    size = min(SAMPLE, x.numel() // 32)
    if size == 0:
        return None
    expected = k / x.numel() * size
    rank = int(expected + 4 * expected**0.5) + 4
    if rank > size // 2:
        return None
    sample = x[_sampled(x.numel(), size, x.device)].view(torch.int32) & 0x7FFFFFFF
    return sample.clamp_(max=0x7F800000).topk(rank).values[-1:]


@kept_by_stream(maxsize=64)  # 128 KiB each
def _sampled(numel: int, size: int, device: torch.device) -> Tensor:
    """One place of each of `size` equal stretches: a fixed stride could fall on one column of a matrix."""
    stretch = numel // size
    random = torch.Generator("cpu").manual_seed(numel)
    offsets = torch.randint(stretch, (size,), generator=random, device="cpu")
    return sent_to(torch.arange(size, device="cpu") * stretch + offsets, device)
