"""Cheap pseudo-random gradients: windows of one heavy-tailed buffer, at places that a key decides."""

import math

import torch
from torch import Tensor

_LENGTH = 1 << 22
_WINDOW = 1 << 18
_SCALE = 1e-2
_MIX = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = (1 << 64) - 1


class Draws:
    """A buffer of products of two normal numbers (kurtosis 9, where a normal number has 3).

    It is drawn from torch's global generator, so build it inside `seeded`.
    """

    def __init__(self) -> None:
        self._buffer = torch.randn(_LENGTH).mul_(torch.randn(_LENGTH))

    def gradient(self, shape: torch.Size, key: tuple[int, ...]) -> Tensor:
        """Fresh memory of `shape`, a function of `key` alone; small where many weights share an output."""
        out = torch.empty(shape)
        flat, scale = out.view(-1), _SCALE / math.sqrt(max(out[0].numel(), 1) if out.dim() > 1 else 1)
        state = 0
        for part in key:
            state = mixed(state ^ (part & _WORD))
        for start in range(0, flat.numel(), _WINDOW):
            length = min(_WINDOW, flat.numel() - start)
            state = mixed(state)
            place = state % (_LENGTH - length)
            torch.mul(self._buffer[place : place + length], scale, out=flat[start : start + length])
        return out


def mixed(state: int) -> int:
    """One step of splitmix64 (Steele, Lea, Flood 2014): every bit in moves every bit out."""
    state = (state + _MIX[0]) & _WORD
    state = ((state ^ (state >> 30)) * _MIX[1]) & _WORD
    state = ((state ^ (state >> 27)) * _MIX[2]) & _WORD
    return state ^ (state >> 31)
