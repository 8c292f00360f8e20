"""Models in bfloat16 and float16: no recipe sends more than plain DDP; lossless sums have its bits."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from gradwire.comm import Comm, Round, run_ranks
from gradwire.comm.base import shortest_sum
from gradwire.control.controller import TOLD
from gradwire.unit.context import Replicas, Replicated
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE, kind_of_text
from tests.support.rig import Rig

BF16, F16 = torch.bfloat16, torch.float16
SHAPES = {
    "first.weight": (160, 128),
    "first.bias": (128,),
    "middle.weight": (128, 192),
    "middle.bias": (192,),
    "last.weight": (192, 160),
    "scalar": (),
}
"""Units of 10 000 elements and more: tables of exponents, 2 kB each, have something to save."""
SMALL = 128 + 192 + 1
BUCKETS = (("scalar", "last.weight"), ("middle.bias", "middle.weight"), ("first.bias", "first.weight"))
STEPS = 2

RECIPES = {
    **EVERY_RECIPE,
    "covap, every other step": "covap(interval=2)",
    "dgc, warming up": "dgc",
    "gcomp, levels": "gcomp(mode='levels')",
    "gcomp, truncate": "gcomp(mode='truncate')",
    "gcomp, few bits": "gcomp(mode='truncate', bits=2, tables='static')",
    "powersgd, warming up": "powersgd(warmup_steps=2)",
    "scalecom, warming up": "scalecom",
    "topk, three in ten": "topk(ratio=0.3)",
    "truncate, few bits": "truncate(bits=10)",
}

MORE = {
    "dgc, warming up": (4,),
    "qsgd": (4,),
    "qsgd, feedback": (4,),
    "sketchsgd": (2, 4),
    "truncate, few bits": (2, 4),
}
"""Those that send more, and on how many ranks: see `docs/engineering/laws.md`."""


def drawn(rank: int, step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Normal numbers, whose exponents float16 has."""
    random = torch.Generator().manual_seed(100 * rank + step)
    return {
        name: (torch.randn(torch.Size(shape).numel(), generator=random) / 8.0).to(dtype)
        for name, shape in SHAPES.items()
    }


def replicas(dtype: torch.dtype) -> Replicas:
    """Parameters and an optimizer that do not see all of such gradients."""
    group = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
    random = torch.Generator().manual_seed(5)
    values = {name: torch.randn(shape, generator=random) / 16.0 for name, shape in SHAPES.items()}
    known = {name: Replicated(each.to(dtype), group, {}, torch.optim.SGD) for name, each in values.items()}
    return known.get


@cache
def sent(text: str, world: int, dtype: torch.dtype) -> tuple[float, int]:
    """Metered bytes of the rank that sends most, and units, of some steps together."""

    def rank(comm: Comm) -> tuple[float, int]:
        rig = Rig(comm, text, dtype=dtype, shapes=SHAPES, replicas=replicas(dtype))
        total = 0.0
        for step in range(STEPS):
            outcome = rig.step(drawn(comm.rank, step, dtype), BUCKETS)
            assert outcome.error is None
            assert outcome.step.committed
            total += outcome.step.sent.metered_bytes
        return total, STEPS * sum(len(flat_buffer.units) for flat_buffer in rig.reducer.layout.flat_buffers)

    found = run_ranks(world, rank)
    return max(total for total, _units in found), found[0][1]


@looped("name", RECIPES, by=lambda name: kind_of_text(RECIPES[name]), few=1)
@looped(("dtype", "world"), [(BF16, 2), (F16, 4)])
def test_no_recipe_sends_more_than_plain_ddp(name: str, dtype: torch.dtype, world: int) -> None:
    plain, _ = sent("dense", world, dtype)
    total, units = sent(RECIPES[name], world, dtype)
    # Small gradients travel in float32, and few of them from each rank to all others.
    small = Round("all_reduce", SMALL, torch.float32, algorithm=shortest_sum(world, 4 * SMALL))
    beside = STEPS * (small.wire_bytes(world) - Round("all_reduce", SMALL, dtype).wire_bytes(world))
    # Where something is remembered, a status vote says more; among three ranks and more it goes direct.
    said = 4 * world * (4 + TOLD)  # 4 of the link
    beside += STEPS * Round("all_reduce", said, torch.uint8, algorithm=shortest_sum(world)).wire_bytes(world)
    assert (total > plain + beside + 64 * units) == (world in MORE.get(name, ()))


def test_near_lossless_sends_far_less_than_lossless_and_that_less_than_ddp() -> None:
    for dtype, near, lossless in ((BF16, 0.6, 0.8), (F16, 0.6, 0.98)):
        plain, _ = sent("dense", 2, dtype)
        # In float32, for comparison, near-lossless saves about 40 %.
        assert sent("gcomp(refresh=3)", 2, dtype)[0] < near * plain
        assert sent("gcomp(mode='lossless', refresh=2)", 2, dtype)[0] < lossless * plain


@looped("scale", [1.0, 2.0**14])
@looped("dtype", [BF16, F16])
def test_lossless_on_two_ranks_has_the_bits_of_plain_ddp(dtype: torch.dtype, scale: float) -> None:
    # Of gradients that float16 holds only with the loss scale in them.
    def rank(comm: Comm) -> None:
        lossless, plain = (
            Rig(comm, f"{text}", dtype=dtype, shapes=SHAPES, loss_scale=lambda: scale)
            for text in ("gcomp(mode='lossless')", "dense")
        )
        for step in range(2):
            grads = {name: each * 2.0**-4 for name, each in drawn(comm.rank, step, dtype).items()}
            found, expected = (rig.step(grads, BUCKETS).mean for rig in (lossless, plain))
            for name in ("first.weight", "middle.weight", "last.weight"):
                assert torch.equal(found[name].view(torch.int16), expected[name].view(torch.int16))

    run_ranks(2, rank)
