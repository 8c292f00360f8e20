"""One call of every function of `kernels/device`, in a form that recipes use; on the CPU, for compiling."""

from __future__ import annotations

import torch

from gradwire.kernels import Pieces, device

N = 1 << 14


def fold() -> None:
    x = torch.zeros(N)
    device.fold(x, torch.zeros(N), torch.zeros(N), 1.0)


def fold_narrow_without_a_memory() -> None:
    device.fold(torch.zeros(N), None, torch.zeros(N, dtype=torch.bfloat16), 1.0)


def fold_unaligned() -> None:
    device.fold(torch.zeros(N), torch.zeros(N), torch.zeros(N), 1.0, 1.0, Pieces([(1, 3, 5)]))


def fold_momentum() -> None:
    planes = torch.zeros(4, N)
    device.fold_momentum((planes[0], planes[1]), (planes[2], planes[3]), torch.zeros(N), 0.9)


def fold_momentum_ahead() -> None:
    planes = torch.zeros(4, N)
    device.fold_momentum((planes[0], planes[1]), (planes[2], planes[3]), torch.zeros(N), 0.9, nesterov=True)


def poison() -> None:
    device.poison([torch.zeros(N)], torch.zeros(1))


def zero_idle() -> None:
    device.zero_idle(torch.zeros(N), Pieces([(0, 0, N)]), torch.zeros(1, dtype=torch.bool))


def rescale() -> None:
    device.rescale(torch.zeros(N), torch.zeros(1))


CALLS = (
    fold,
    fold_narrow_without_a_memory,
    fold_unaligned,
    fold_momentum,
    fold_momentum_ahead,
    poison,
    zero_idle,
    rescale,
)
