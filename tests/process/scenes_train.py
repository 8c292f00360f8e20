"""Scenes of plain training: dense is DDP, every recipe learns, replicas stay equal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.process.models import digest, optimizer_of, perceptron, train

RECIPES = (
    "acpsgd(warmup_steps=0)",
    "adacomp",
    "allreduce(algorithm='ring')",
    "allreduce(algorithm='tree')",
    "allreduce(algorithm='star')",
    "ar_topk",
    "auto",
    "bf16",
    "covap(interval=4)",
    "covap",
    "dense",
    "dgc(ratio=0.05, warmup_steps=40)",
    "efsignsgd",
    "efsignsgd(block=64)",
    "flexible",
    "fp16",
    "fp8",
    "gcomp",
    "gcomp(mode='levels')",
    "gcomp(mode='lossless')",
    "gcomp(mode='truncate')",
    "gtopk(ratio=0.05)",
    "int4",
    "int4(collective='all_gather')",
    "int8",
    "int8(feedback=False)",
    "leader_topk(ratio=0.05)",
    "leader_topk(ratio=0.05, elect='norm')",
    "local_every(interval=2)",
    "lwtopk(ratio=0.05)",
    "mergecomp(inner='topk(ratio=0.05)')",
    "mergecomp(inner='leader_topk(ratio=0.05)', split='timed')",
    "mstopk(ratio=0.05)",
    "onebit",
    "oktopk(ratio=0.05)",
    "powersgd(warmup_steps=0)",
    "qsgd",
    "qsgd(bits=4)",
    "randomk(ratio=0.1)",
    "scalecom(rate=20, warmup_steps=10)",
    "scalecom(rate=40, rates={'*': 10}, beta=0.3, warmup_steps=0)",
    "sidco(ratio=0.05)",
    "signsgd",
    "signum",
    "sketchsgd(ratio=0.05)",
    "star_topk(ratio=0.05)",
    "star_topk(ratio=0.05, fused=False, algorithm='tree')",
    "terngrad",
    "threshold(threshold=0.05)",
    "topk(ratio=0.05)",
    "topk(ratio=0.1, values='int8')",
    "topk(ratio=0.05, reuse=True)",
    "truncate",
    "var_topk(ratio=0.05)",
    "var_topk(ratio=0.05, fused=False, algorithm='ring')",
)


def dense_is_ddp(**options: Any) -> dict[str, str]:
    """Fingerprints after ten steps without and with gradwire."""
    found = {}
    for kind in ("ddp", "gradwire"):
        ddp = DistributedDataParallel(perceptron(), **options)
        optimizer = optimizer_of(ddp)
        if kind == "gradwire":
            gradwire.attach(ddp, optimizer, "dense")
        train(ddp, optimizer, range(10))
        found[kind] = digest(ddp)
    return found


def learns(recipe: str) -> dict[str, Any]:
    """A hundred steps."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    optimizer = optimizer_of(ddp, lr=0.2)
    wire = gradwire.attach(ddp, optimizer, recipe)
    losses = train(ddp, optimizer, range(100))
    report = wire.report()
    return {
        "first": sum(losses[:10]) / 10,
        "last": sum(losses[-10:]) / 10,
        "digest": digest(ddp),
        "step": report.step,
        "recipe": report.recipe,
        "settled": wire.settled,
        "predicted": report.wire_bytes_per_step,
        "metered": report.metered_bytes_per_step,
        "ratio": report.ratio,
        "led": report.times_led,
        "text": str(report),
        "facts": report.facts,
        "link": report.as_dict()["link"],
        "link_changes": report.as_dict()["link_changes"],
        "parameters": [p.numel() for p in ddp.parameters()],
    }


DENSE = ("plain", "bucket views", "small buckets")

SCENES: dict[str, Callable[[], Any]] = {
    "plain": dense_is_ddp,
    "bucket views": partial(dense_is_ddp, gradient_as_bucket_view=True),
    "small buckets": partial(dense_is_ddp, bucket_cap_mb=0.01),
    **{recipe: partial(learns, recipe) for recipe in RECIPES},
}
