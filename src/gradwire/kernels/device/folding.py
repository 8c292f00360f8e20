"""Memory plus gradient in one pass; flags are written, not read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.device.bodies import folding as bodies
from gradwire.kernels.device.launch import TILE, is_taken, launch
from gradwire.kernels.device.tables import piece_tiles
from gradwire.kernels.dispatch import DECLINED, Declined
from gradwire.kernels.pieces import Pieces, whole
from gradwire.kernels.range import LARGEST_GRADIENT, LARGEST_SUM
from gradwire.kernels.reference.folding import Folded
from gradwire.kernels.uploads import sent_to

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What is widened on the way; sums are float32."""


def _bits(number: float) -> int:
    return int(torch.tensor(number, device="cpu").view(torch.int32))


_INFINITY = _bits(torch.inf)
_BOUNDS = (_bits(LARGEST_GRADIENT), _bits(LARGEST_SUM))


def fold(
    working: Tensor,
    committed: Tensor | None,
    grad: Tensor,
    coefficient: float,
    scale: float = 1.0,
    pieces: Pieces | None = None,
) -> Folded | Declined:
    """12 bytes an element, in one launch after one that sets the flags."""
    old = working if committed is None else committed
    if not is_taken(working) or not is_taken(working, old, grad, dtypes=_FLOATS):
        return DECLINED
    pieces = whole(grad.numel()) if pieces is None else pieces
    tiles, flags = piece_tiles(pieces, working.device), _flags(pieces, working)
    bounds = (_INFINITY, _INFINITY) if committed is None else _BOUNDS
    launch(
        bodies.fold, len(tiles.rows), working, old, grad, tiles.rows, flags.view(torch.uint8),
        len(pieces), coefficient, scale, *bounds,
        REMEMBERS=committed is not None, ALIGNED=tiles.aligned, TILE=TILE,
    )  # fmt: skip
    return Folded(flags[:-1], flags[-1])


def fold_momentum(
    working: tuple[Tensor, Tensor],
    committed: tuple[Tensor, Tensor],
    grad: Tensor,
    momentum: float,
    scale: float | Sequence[float] = 1.0,
    pieces: Pieces | None = None,
    *,
    nesterov: bool = False,
) -> Folded | Declined:
    """20 bytes an element, as `fold`; scales of pieces that differ are uploaded."""
    if not is_taken(*working) or not is_taken(*working, *committed, grad, dtypes=_FLOATS):
        return DECLINED
    pieces = whole(grad.numel()) if pieces is None else pieces
    device = grad.device
    tiles, flags = piece_tiles(pieces, device), _flags(pieces, working[0])
    if isinstance(scale, Sequence):
        scales = sent_to(torch.tensor(scale, dtype=torch.float32, device="cpu"), device)
    else:
        scales = torch.full((len(pieces),), scale, dtype=torch.float32, device=device)
    launch(
        bodies.fold_momentum, len(tiles.rows), *working, *committed, grad, tiles.rows,
        flags.view(torch.uint8), len(pieces), momentum, scales, *_BOUNDS,
        AHEAD=nesterov, ALIGNED=tiles.aligned, TILE=TILE,
    )  # fmt: skip
    return Folded(flags[:-1], flags[-1])


def _flags(pieces: Pieces, like: Tensor) -> Tensor:
    """Of each piece that it is idle, and of all that they are finite, until a program sees otherwise."""
    return torch.ones(len(pieces) + 1, dtype=torch.bool, device=like.device)
