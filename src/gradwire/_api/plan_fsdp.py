"""Predictions of FSDP2's own traffic: bytes, memory and steps, for gathers and scatters in few bits.

Beside the assumptions of `gradwire.plan`:

- Each layer of the profile is sharded by itself, and gathered in the forward and in the backward pass.
- On a CPU, a gather of the forward pass and a scatter are waited for, and a gather of the backward pass is
  begun one layer ahead. On GPUs all gathers are but the first of either pass. There nothing waits for a
  scatter but the step's end, and what travels takes turns. An exact gather is read on the host: in the
  backward pass, the layer before it computes once it has come.
- Exact gathers send heads, and once a step, with them, 2 bits a parameter, as AdamW at 0.001 made a small
  transformer change (`benchmarks/results/2026-11-28-exact-steps.md`).
- What torch scatters itself goes on a CPU as gloo does it, as an all-reduce, and on GPUs as a ring, which
  is half of one.
- Where ranks share nodes, what is coded goes by two levels, and the rest among all ranks.
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
from gradwire.sources.fsdp.coding import GATHERS, Coding, Scattering, scattering
from gradwire.sources.fsdp.held import HEAD_BYTES

CANDIDATES = ("dense", "dense+bf16", "bf16+bf16", "int8+int8", "int4(feedback=False)+int8", "int4+int8")
"""Scatter, and after a plus the bits of gathers."""

EXACT_BITS = 2.0
"""Bits of a parameter in the exact gather after a step."""


def parsed(text: str) -> tuple[Scattering, str | None]:
    """The coding of scatters, and the bits of gathers as `attach` takes them. Raises `ValueError`.

    >>> chosen, gather = parsed("int4 + int8")
    >>> chosen.text, gather
    ('int4', 'int8')
    """
    asked, _, bits = text.replace(" ", "").partition("+")
    gather = bits or None
    if gather not in GATHERS:
        raise ValueError(f"{text!r}: after the plus stands bf16, int8 or exact")
    return scattering(recipe(asked)), gather


@dataclass(frozen=True)
class FSDPForecast:
    """A step of `step_s`. A rank sends `wire_bytes` in it, inside its node and between nodes.

    `node_bytes` are those over the busiest node's link, 0 with a single node. A rank needs `memory_bytes` for
    what is unsent, and for what exact gathers hold. With `two_levels`, ranks of a node add up first, and pass
    on what came from other nodes.
    """

    step_s: float
    wire_bytes: float
    node_bytes: float
    memory_bytes: float
    two_levels: bool


@dataclass(frozen=True)
class _Sent:
    """A collective of a layer: its time, the bytes that a rank sends, and those over a node's link."""

    seconds: float
    wire_bytes: float
    node_bytes: float


def forecast_fsdp(
    text: str,
    profile: Profile,
    cluster: Cluster,
    forward_s: float,
    backward_s: float,
    *,
    gpu: bool = False,
) -> FSDPForecast:
    """Predict a step of `text`, such as "int4+int8", on a `cluster`; with `gpu`, over NCCL.

    `forward_s` and `backward_s` are times without communication. The backward pass goes through the layers in
    reverse.

    >>> from gradwire.planning.costs import Link
    >>> from gradwire.planning.shapes import Layer
    >>> profile = Profile("two", "", (Layer("a", 1, ((256, 256),)), Layer("b", 1, ((256, 256),))))
    >>> cluster = Cluster(4, Link(0.0, 1e-7))
    >>> [round(forecast_fsdp(text, profile, cluster, 0.01, 0.02).wire_bytes) for text in CANDIDATES[::3]]
    [1572864, 302592]
    """
    chosen, gather = parsed(text)
    is_coded = gather is not None
    gathers, again, scatters = [], [], []
    for layer in profile.layers:
        # Shards are of rows, and filled up where these do not come out even.
        parts = tuple(
            -(-shape[0] // cluster.workers) * math.prod(shape[1:]) if shape else 1 for shape in layer.shapes
        )
        first, second = _gathered_bytes(gather, parts)
        held = 2.0 * sum(parts) if gather == "exact" else None
        gathers.append(_gathered(first, cluster, is_coded=is_coded, inside_bytes=held))
        again.append(_gathered(second, cluster, is_coded=is_coded, inside_bytes=held))
        scatters.append(_scattered(chosen.coding, parts, cluster, gpu=gpu))
    total = sum(layer.macs for layer in profile.layers)
    shares = [layer.macs / total if total else 1 / len(gathers) for layer in profile.layers]
    comes_s = [each.seconds for each in (*gathers, *reversed(again))]
    takes_s = [*(each * forward_s for each in shares), *(each * backward_s for each in reversed(shares))]
    layers = len(shares)
    begins_ahead = [gpu and place > 0 for place in range(layers)] + [place > 0 for place in range(layers)]
    at_s = link_s = arrives_s = 0.0
    for place, compute_s in enumerate(takes_s):
        if not begins_ahead[place]:
            arrives_s = link_s = max(at_s, link_s) + comes_s[place]
        at_s = max(at_s, arrives_s)
        if any(begins_ahead[place + 1 : place + 2]):
            arrives_s = link_s = max(at_s, link_s) + comes_s[place + 1]
            at_s = max(at_s, arrives_s) if gpu and gather == "exact" and place >= layers else at_s
        at_s += compute_s
        if place >= layers:
            link_s = max(at_s, link_s) + scatters[2 * layers - 1 - place].seconds
            at_s = at_s if gpu else link_s
    sent = (*gathers, *again, *scatters)
    two_levels = cluster.shares_links and (is_coded or chosen.coding is not None)
    elements = sum(math.prod(shape) for layer in profile.layers for shape in layer.shapes)
    shares_of = cluster.per_node if two_levels else 1
    per_parameter = 8.0 * chosen.feedback + 2.0 * (gather == "exact")
    return FSDPForecast(
        max(at_s, link_s),
        sum(each.wire_bytes for each in sent),
        sum(each.node_bytes for each in sent),
        per_parameter * elements / shares_of,
        two_levels,
    )


def _gathered_bytes(gather: str | None, parts: tuple[int, ...]) -> tuple[float, float]:
    """Bytes of a rank in the first gather of a step, and in the second one."""
    if gather == "exact":
        return HEAD_BYTES + EXACT_BITS * sum(parts) / 8, HEAD_BYTES
    row = _row_bytes(GATHERS[gather], parts)
    return row, row


def _gathered(
    row_bytes: float, cluster: Cluster, *, is_coded: bool, inside_bytes: float | None = None
) -> _Sent:
    """Predicted time and bytes of a gather on `cluster`, of `row_bytes` from each rank. Inside a node, shards
    have `inside_bytes`, or as many.
    """
    rows = Transfer("all_gather", row_bytes)
    if not is_coded or not cluster.shares_links:
        return _Sent(cluster.seconds(rows), (cluster.workers - 1) * row_bytes, cluster.node_bytes(rows))
    within = cluster.nodes * (row_bytes if inside_bytes is None else inside_bytes)
    return _Sent(
        cluster.between_s(rows) + cluster.inside_s(within),
        (cluster.nodes - 1) * row_bytes + (cluster.per_node - 1) * within,
        cluster.between_bytes(rows),
    )


def _scattered(coding: Coding | None, parts: tuple[int, ...], cluster: Cluster, *, gpu: bool) -> _Sent:
    """Predicted time and bytes of a scatter to shards, whose `parts` have these numbers of elements, on
    `cluster`; `coding` is `None` for torch's own, over NCCL with `gpu`.
    """
    world, nodes = cluster.workers, cluster.nodes
    if coding is None or not cluster.shares_links:
        verb, times = ("all_reduce", 2) if coding is None else ("all_to_all", 1)
        rows, of = Transfer(verb, world * _row_bytes(coding, parts)), 0.5 if coding is None and gpu else 1.0
        sent = times * (world - 1) / world * rows.payload_bytes
        return _Sent(of * cluster.seconds(rows), of * sent, of * cluster.node_bytes(rows))
    # The ranks of a node send each other uncoded rows for one rank in each node.
    share, row = nodes * _row_bytes(None, parts), _row_bytes(coding, parts)
    rows = Transfer("all_to_all", nodes * row)
    return _Sent(
        cluster.inside_s(share) + cluster.between_s(rows),
        (cluster.per_node - 1) * share + (nodes - 1) * row,
        cluster.between_bytes(rows),
    )


def _row_bytes(coding: Coding | None, parts: Sequence[int]) -> float:
    """Bytes of a shard of these parts."""
    return 4.0 * sum(parts) if coding is None else float(coding.row_bytes(tuple(parts), torch.float32))
