"""Members that neither come nor go: the ranks of a process group."""

from __future__ import annotations

import json

import torch
import torch.distributed as dist

from gradwire.errors import TransportError
from gradwire.members.address import address_towards, own_address
from gradwire.members.base import Card, Entry, Roster
from gradwire.sources.plain import group_in


class Fixed:
    """`Members` over a process group, whose ranks tell each other their cards."""

    def __init__(self, replicas: object, address: str | None = None) -> None:
        """`replicas` as for `gradwire.outer`. Raises `ValueError` for an `address` that is not here."""
        self.group = group_in(replicas)
        self.name = self.id = f"{self.group.rank():06d}"
        self.address = address_towards(None) if address is None else own_address(address)
        self.alone_s: float | None = None
        self._asked = 0

    def ask(self, card: Card) -> Roster:
        """Gather all cards into a roster. A collective: two all-gathers. Raises `TransportError`."""
        mine = json.dumps([self.name, card.as_dict()]).encode()
        self._asked += 1
        where = torch.device("cpu" if dist.get_backend(self.group) == "gloo" else "cuda")
        try:
            lengths = [torch.zeros(1, dtype=torch.int64, device=where) for _ in range(self.group.size())]
            dist.all_gather(lengths, torch.tensor([len(mine)], device=where), group=self.group)
            longest = max(int(each) for each in lengths)
            row = torch.zeros(longest, dtype=torch.uint8, device=where)
            row[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
            rows = [torch.zeros_like(row) for _ in lengths]
            dist.all_gather(rows, row, group=self.group)
        except RuntimeError as error:
            raise TransportError(f"a replica is gone: {error}") from error
        entries = []
        for length, row in zip(lengths, rows, strict=True):
            name, told = json.loads(bytes(row[: int(length)].tolist()))
            entries.append(Entry(name, name, Card.of(told)))
        return Roster(self._asked, tuple(entries))

    def close(self) -> None:
        """Do nothing: the process group belongs to the user."""


def fixed(replicas: object, *, address: str | None = None) -> Fixed:
    """Replicas that stay: the ranks of `replicas`, as `gradwire.outer(replicas=…)` takes them.

    Rounds are those of `replicas=`, bit for bit. The members say so to the same code as those of `torchft`,
    so it is a way to try that out. `address` is this machine's, at which the others reach it.

    Raises `ValueError` for what is no process group, and for an address that this machine does not have.

    Example::

        members = gradwire.members.fixed(torch.distributed.group.WORLD)
        wire = gradwire.outer(model, optimizer, "int4", every=30, members=members)
    """
    return Fixed(replicas, address)
