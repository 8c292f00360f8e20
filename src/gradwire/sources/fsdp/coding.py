"""Codings of the shards that FSDP2 gathers and scatters: one row of bytes for the shard of each rank.

A shard consists of parts of several parameters, one after another, of equal sizes on all ranks. Blocks never
lie in two parts, because a scale fits the numbers of one parameter.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from gradwire.codec.scales import ScaledPayload
from gradwire.kernels.blocks import decode_shards, encode_shards, sum_shard
from gradwire.kernels.layouts import BlockKind, Grid, ScaledBlocks, ShardedBlocks, step_type
from gradwire.kernels.stochastic import add_quantized, quantize
from gradwire.recipes.parse import Recipe


class Coding(Protocol):
    """Codes the shards of x (shards · elements,), float32 or float64, as rows (shards, bytes) uint8.

    `parts` are the elements of a shard's parts. Coding is deterministic: the same x, and the same `key` where
    rounding is stochastic, make the same bytes.
    """

    def row_bytes(self, parts: tuple[int, ...], dtype: torch.dtype) -> int:
        """Bytes of a row."""
        ...

    def encode(self, x: Tensor, rows: Tensor, parts: tuple[int, ...], key: int) -> None:
        """Encode x into `rows`, in the parts and with the key that the class describes. x either stays as it
        is or keeps its rounding errors.
        """
        ...

    def decode(self, rows: Tensor, out: Tensor, parts: tuple[int, ...]) -> None:
        """Decode `rows` into out (shards · elements,)."""
        ...

    def sum(self, rows: Tensor, out: Tensor, parts: tuple[int, ...]) -> None:
        """out (elements,) = the sum of all decoded `rows`, which encode the same shard, in their order."""
        ...


@dataclass(frozen=True)
class Short:
    """bfloat16: 2 bytes an element, rounded to nearest."""

    def row_bytes(self, parts: tuple[int, ...], _dtype: torch.dtype) -> int:
        return 2 * sum(parts)

    def encode(self, x: Tensor, rows: Tensor, _parts: tuple[int, ...], _key: int) -> None:
        rows.view(torch.bfloat16).copy_(x.view(rows.shape[0], -1))

    def decode(self, rows: Tensor, out: Tensor, _parts: tuple[int, ...]) -> None:
        out.view(rows.shape[0], -1).copy_(rows.view(torch.bfloat16))

    def sum(self, rows: Tensor, out: Tensor, _parts: tuple[int, ...]) -> None:
        out.zero_()
        for row in rows.view(torch.bfloat16):
            out.add_(row)


@dataclass(frozen=True)
class RoundedBlocks:
    """Coding as integers or floats of `kind`, rounded to nearest, with a scale for each `block` elements of a
    part. `encode` leaves the rounding errors in its input.
    """

    kind: BlockKind
    block: int

    def row_bytes(self, parts: tuple[int, ...], dtype: torch.dtype) -> int:
        return self._table(parts, 1, dtype).row_bytes

    def encode(self, x: Tensor, rows: Tensor, parts: tuple[int, ...], _key: int) -> None:
        encode_shards(x, self._table(parts, rows.shape[0], x.dtype), rows)

    def decode(self, rows: Tensor, out: Tensor, parts: tuple[int, ...]) -> None:
        decode_shards(rows, self._table(parts, rows.shape[0], out.dtype), out)

    def sum(self, rows: Tensor, out: Tensor, parts: tuple[int, ...]) -> None:
        sum_shard(rows, self._table(parts, 1, out.dtype), 0, out.zero_(), 1.0)

    def _table(self, parts: tuple[int, ...], shards: int, dtype: torch.dtype) -> ShardedBlocks:
        return _table(ScaledBlocks(parts, self.block, self.kind), shards, step_type(dtype))


@lru_cache(maxsize=4096)  # the modules of a model gather and scatter the same in every step
def _table(blocks: ScaledBlocks, shards: int, dtype: torch.dtype) -> ShardedBlocks:
    return ShardedBlocks((blocks,) * shards, dtype)


@dataclass(frozen=True)
class Drawn:
    """Codes of `bits` bits with a step for each `block` elements of a part, rounded at random, right in the
    mean. x stays as it is."""

    bits: int
    block: int

    def row_bytes(self, parts: tuple[int, ...], dtype: torch.dtype) -> int:
        return self._row(parts, dtype).bytes

    def encode(self, x: Tensor, rows: Tensor, parts: tuple[int, ...], key: int) -> None:
        grid, row = _grid(parts * rows.shape[0], self.block, self.bits), self._row(parts, x.dtype)
        steps = torch.empty(grid.buckets, dtype=step_type(x.dtype), device=x.device)
        codes = torch.empty(grid.code_bytes, dtype=torch.uint8, device=x.device)
        quantize(x, grid, key, steps, codes)
        rows.zero_()
        # All shards have the same parts, so each has as many steps and bytes.
        of_shards = zip(rows, steps.view(len(rows), -1), codes.view(len(rows), -1), strict=True)
        for each, own_steps, own_codes in of_shards:
            into_steps, into_codes = row.split(each)
            into_steps.copy_(own_steps)
            into_codes.copy_(own_codes)

    def decode(self, rows: Tensor, out: Tensor, parts: tuple[int, ...]) -> None:
        for row, shard in zip(rows, out.zero_().view(rows.shape[0], -1), strict=True):
            self._add(row, shard, parts)

    def sum(self, rows: Tensor, out: Tensor, parts: tuple[int, ...]) -> None:
        out.zero_()
        for row in rows:
            self._add(row, out, parts)

    def _add(self, row: Tensor, out: Tensor, parts: tuple[int, ...]) -> None:
        add_quantized(*self._row(parts, out.dtype).split(row), _grid(parts, self.block, self.bits), out, 1.0)

    def _row(self, parts: tuple[int, ...], dtype: torch.dtype) -> ScaledPayload:
        grid = _grid(parts, self.block, self.bits)
        return ScaledPayload(grid.buckets, grid.code_bytes, step_type(dtype))


@lru_cache(maxsize=4096)
def _grid(parts: tuple[int, ...], block: int, bits: int) -> Grid:
    return Grid(parts, block, bits, "max")


_BLOCK = {"int8": 256, "fp8": 256, "int4": 128}
"""Elements of a block, as in the recipes of these names."""

GATHERS: dict[str | None, Coding | None] = {
    None: None,
    "bf16": Short(),
    "int8": RoundedBlocks("int8", 128),
    "exact": None,
}
"""Coding by the value of `gather=`. A weight errs by at most 1/254 of its block's largest: small blocks err
less. "exact" codes no shard by itself: it sends what has changed (`gradwire.sources.fsdp.held`)."""


@dataclass(frozen=True)
class Scattering:
    """Coding of scattered gradients; `text` parses back to it.

    `coding` is `None` if torch's own bits are sent. With `feedback`, rounding errors are remembered;
    `unremembered` is the coding of calls to which no memory applies.
    """

    text: str
    coding: Coding | None = None
    unremembered: Coding | None = None
    feedback: bool = False


def scattering(asked: Recipe) -> Scattering:
    """Interpret a recipe as a coding of scatters. Raises `ValueError` for a recipe without such a meaning.

    >>> from gradwire.recipes import recipe
    >>> scattering(recipe("int4")).feedback, scattering(recipe("int8")).feedback
    (True, False)
    >>> scattering(recipe("int4(feedback=False)")).coding
    Drawn(bits=4, block=128)
    """
    options = dict(asked.options)
    if asked.name == "dense":
        return Scattering("dense")
    if asked.name == "bf16" and options.pop("sum", "fp32") == "fp32" and not options:
        return Scattering("bf16", Short(), Short())
    if asked.made is not None or asked.name not in _BLOCK or "collective" in options:
        raise ValueError(
            f"{asked} is not for FSDP2's own scatters: choose dense, bf16, fp8, int8 or int4, with block= "
            "and feedback= where wanted; auto does not choose among them yet. Or pass replicas= the group or "
            "mesh dimension between nodes, over which shards are averaged by any recipe"
        )
    block, feedback = options.get("block", _BLOCK[asked.name]), options.get("feedback", asked.name == "int4")
    nearest = RoundedBlocks(asked.name, block)  # type: ignore[arg-type]  # one of the three
    drawn = Drawn(4, block) if asked.name == "int4" else nearest
    return Scattering(str(asked), nearest if feedback else drawn, drawn, feedback)
