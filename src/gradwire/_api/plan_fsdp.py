"""Predictions of FSDP2's own traffic: bytes, memory and steps, for gathers and scatters in few bits.

Beside the assumptions of `gradwire.plan`:

- Each layer of the profile is sharded by itself, and gathered in the forward and in the backward pass.
- As on a CPU, a gather of the forward pass and a scatter are waited for. A gather of the backward pass is
  begun one layer ahead.
- What torch scatters itself goes as gloo does it, as an all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gradwire.planning.cluster import Cluster
from gradwire.planning.collectives import Transfer
from gradwire.planning.shapes import Profile
from gradwire.recipes import recipe
from gradwire.sources.fsdp.coding import GATHERS, Coding, scattering

CANDIDATES = ("dense", "dense+bf16", "bf16+bf16", "int8+int8", "int4(feedback=False)+int8", "int4+int8")
"""Scatter, and after a plus the bits of gathers."""


@dataclass(frozen=True)
class FSDPForecast:
    """A step of `step_s`; a rank sends `wire_bytes` in it, and needs `memory_bytes` for what is unsent."""

    step_s: float
    wire_bytes: float
    memory_bytes: float


def forecast_fsdp(
    text: str, profile: Profile, cluster: Cluster, forward_s: float, backward_s: float
) -> FSDPForecast:
    """Predict a step of `text`, such as "int4+int8", on ranks that each have a link of their own.

    `forward_s` and `backward_s` are times without communication. The backward pass goes through the layers in
    reverse; the next layer's gather travels while one computes.

    >>> from gradwire.planning.costs import Link
    >>> from gradwire.planning.shapes import Layer
    >>> profile = Profile("two", "", (Layer("a", 1, ((256, 256),)), Layer("b", 1, ((256, 256),))))
    >>> cluster = Cluster(4, Link(0.0, 1e-7))
    >>> [round(forecast_fsdp(text, profile, cluster, 0.01, 0.02).wire_bytes) for text in CANDIDATES[::3]]
    [1572864, 302592]
    """
    asked, _, gather = text.replace(" ", "").partition("+")
    chosen = scattering(recipe(asked))
    if (gather or None) not in GATHERS:
        raise ValueError(f"{text!r}: after the plus stands bf16 or int8")
    world, coding = cluster.workers, GATHERS[gather or None]
    gathers, scatters = [], []
    for layer in profile.layers:
        # Shards are of rows, and filled up where these do not come out even.
        parts = tuple(-(-shape[0] // world) * math.prod(shape[1:]) if shape else 1 for shape in layer.shapes)
        gathers.append(Transfer("all_gather", _row_bytes(coding, parts)))
        scattered = world * _row_bytes(chosen.coding, parts)
        scatters.append(Transfer("all_reduce" if chosen.coding is None else "all_to_all", scattered))
    gather_s, scatter_s = ([cluster.seconds(each) for each in of] for of in (gathers, scatters))
    total = sum(layer.macs for layer in profile.layers)
    shares = [layer.macs / total if total else 1 / len(gathers) for layer in profile.layers]
    at_s = sum(gather_s) + forward_s
    arrives_s = at_s + gather_s[-1]
    for place in reversed(range(len(shares))):
        at_s = free_s = max(at_s, arrives_s)
        if place:
            arrives_s = free_s = at_s + gather_s[place - 1]
        at_s = max(at_s + shares[place] * backward_s, free_s) + scatter_s[place]
    elements = sum(math.prod(shape) for layer in profile.layers for shape in layer.shapes)
    sent = sum(2 * (world - 1) * each.payload_bytes for each in gathers)
    for each in scatters:
        sent += (2 if chosen.coding is None else 1) * (world - 1) / world * each.payload_bytes
    return FSDPForecast(at_s, sent, 8.0 * elements if chosen.feedback else 0.0)


def _row_bytes(coding: Coding | None, parts: Sequence[int]) -> float:
    """Bytes of a shard of these parts."""
    return 4.0 * sum(parts) if coding is None else float(coding.row_bytes(tuple(parts), torch.float32))
