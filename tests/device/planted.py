"""Kernels that each break one rule, to show that it is checked."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

N = 1 << 14


@triton.jit
def scaled_sum(x, y, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(x + place, tl.load(x + place) * 0.3 + tl.load(y + place))


@triton.jit
def quotient(x, y, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(x + place, tl.load(x + place) / tl.load(y + place))


@triton.jit
def root(x, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(x + place, tl.sqrt(tl.load(x + place)))


@triton.jit(do_not_specialize=["numel"])
def copied(x, y, numel, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(y + place, tl.load(x + place, place < numel), place < numel)


def sound() -> None:
    scaled_sum[(1,)](torch.zeros(N), torch.zeros(N), SIZE=1024, enable_fp_fusion=False)


def fused() -> None:
    scaled_sum[(1,)](torch.zeros(N), torch.zeros(N), SIZE=1024)


def divided() -> None:
    quotient[(1,)](torch.zeros(N), torch.zeros(N), SIZE=1024)


def rooted() -> None:
    root[(1,)](torch.zeros(N), SIZE=1024)


def spilled() -> None:
    scaled_sum[(1,)](torch.zeros(N), torch.zeros(N), SIZE=1024, maxnreg=16, num_warps=1)


def masked() -> None:
    copied[(1,)](torch.zeros(N), torch.zeros(N), N - 1, SIZE=1024)


CALLS = (sound, fused, divided, rooted, spilled, masked)
