"""Shards: the ranks of a node hold a part of every parameter's memory each, and of its mean.

A parameter is cut into as many equal shards as ranks share it, in the order of memory, and filled up with
zeros. So the shards of a model are alike on all ranks: same sizes, same units, same rounds, one fingerprint.
Cuts fall between rows where that adds little, because some exchanges factorise matrices; a shard then is a
matrix, too. Else they fall between elements. A bucket has nothing to do with it: DDP rebuilds buckets, and
what is remembered has to stay where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from gradwire.agreement.agree import damage
from gradwire.comm import Comm
from gradwire.unit.context import Replicas, Replicated
from gradwire.unit.parameters import ParameterSpec

_SPARE = 1 / 32
"""The share of rows that may be added to cut between rows: as many elements more travel and are kept."""


def shards_of(
    specs: Sequence[ParameterSpec], parts: int, *, by_rows: bool = False
) -> tuple[ParameterSpec, ...]:
    """Every rank's shard of whole parameters `specs` when `parts` ranks share them.

    With `by_rows` all cuts fall between rows, whatever that adds, as FSDP cuts parameters.

    >>> linear = ParameterSpec("w", (64, 3), torch.float32, 192)
    >>> [(shard.shape, shard.numel) for shard in shards_of([linear], 2)]
    [((32, 3), 96)]
    >>> shards_of([linear], 1) == (linear,)
    True
    """
    return tuple(spec if parts == 1 else _shard_of(spec, parts, by_rows) for spec in specs)


def _shard_of(spec: ParameterSpec, parts: int, by_rows: bool) -> ParameterSpec:
    """Spec of a shard of the parameter `spec`, of equal shape for all of the `parts` shards: rows, or
    elements of the flat parameter. `by_rows` asks for rows whatever that adds.
    """
    numel = -(-spec.numel // parts)
    if len(spec.shape) > 1 and spec.numel:
        rows, row_numel = -(-spec.shape[0] // parts), spec.numel // spec.shape[0]
        in_rows = spec.stride is None or spec.stride[0] == row_numel
        if in_rows and (by_rows or rows * parts <= (1 + _SPARE) * spec.shape[0]):
            shape = (rows, *spec.shape[1:])
            return replace(spec, shape=shape, numel=rows * row_numel, shard_of=spec)
    return ParameterSpec(spec.name, (numel,), spec.dtype, numel, shard_of=spec)


def cut(spec: ParameterSpec, number: int, whole: Tensor) -> Tensor:
    """Shard `number` (spec.numel,) of the flat parameter `whole`: a view, or a copy with zeros at its end."""
    part = whole[number * spec.numel : (number + 1) * spec.numel]
    if part.numel() == spec.numel:
        return part
    return torch.cat([part, part.new_zeros(spec.numel - part.numel())])


def joined(spec: ParameterSpec, shards: Sequence[Tensor]) -> Tensor:
    """Join the flat shards, in order, to the flat parameter (spec.whole.numel,). `spec` is a shard's; its
    padding is dropped.
    """
    return torch.cat([*shards])[: spec.whole.numel]


@dataclass(frozen=True)
class Shard:
    """Number of this rank's shard, and the ranks that hold the others, in order."""

    inside: Comm
    group: dist.ProcessGroup | None = None
    """The group of `inside`, where ranks are processes."""

    @property
    def number(self) -> int:
        """The index of this rank's shard, from 0."""
        return self.inside.rank

    @property
    def parts(self) -> int:
        """The number of shards that make up a parameter."""
        return self.inside.world

    def room(self, flat: Tensor) -> Tensor:
        """Memory for `gathered`. It is allocated before, so that no rank lacks memory while others are in a
        collective.
        """
        return flat.new_empty(self.parts, flat.numel())

    def gathered(
        self, spec: ParameterSpec, flat: Tensor, room: Tensor, found: list[Exception | None]
    ) -> Tensor:
        """Gather the flat whole parameter into `room`, from the flat shards of the node's ranks. A collective
        inside the node.

        Appends to `found` the error, or `None`, that `damage` returns for it.
        """
        found.append(damage(self.inside.all_gather(room, flat.contiguous())))
        return room.view(-1)[: spec.whole.numel]

    def any(self, flag: Tensor) -> Tensor:
        """True if `flag`, a bool (), is True for some shard. A collective; nothing is read on the host.

        >>> from gradwire.comm import run_ranks
        >>> run_ranks(2, lambda comm: bool(Shard(comm).any(torch.tensor(comm.rank == 0))))
        [True, True]
        """
        said = flag.new_empty(self.parts, 1)
        self.inside.all_gather(said, flag.view(1)).wait()
        return said.any()

    def replicas(self, whole: Replicas, specs: Sequence[ParameterSpec]) -> Replicas:
        """Restrict `whole` to this rank's shards of the parameters `specs`: the returned function gives a
        parameter's shard, and those of the optimizer's state.
        """
        shards = {shard.name: shard for shard in shards_of(specs, self.parts)}

        def of(name: str) -> Replicated | None:
            seen = whole(name)
            return None if seen is None else self._shard_of(shards[name], seen)

        return of

    def _shard_of(self, shard: ParameterSpec, seen: Replicated) -> Replicated:
        def mine(tensor: Tensor) -> Tensor:
            return shard.shaped(cut(shard, self.number, shard.whole.flat(tensor)))

        state = {
            key: mine(value) if isinstance(value, Tensor) and value.shape == seen.parameter.shape else value
            for key, value in seen.state.items()
        }
        return replace(seen, parameter=mine(seen.parameter), state=state)
