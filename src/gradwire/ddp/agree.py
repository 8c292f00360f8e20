"""Do all ranks mean the same? Asked at attach and when a state is loaded, with messages of fixed size."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

from gradwire.comm import Comm
from gradwire.errors import RanksDisagree

_TEXT_BYTES = 120
_HASH_BYTES = 8
_FIELD_BYTES = _TEXT_BYTES + _HASH_BYTES


def require_agreement(fields: Mapping[str, str], comm: Comm) -> None:
    """Compare `fields` over all ranks; raise `RanksDisagree` on all of them, naming field and values.

    One all-gather of 128 bytes per field and rank: a data-dependent length would abort gloo. What
    differs beyond the first 120 bytes is found by its hash.
    """
    mine = torch.cat([_pack(text) for text in fields.values()])
    everybody = torch.empty(comm.world, mine.numel(), dtype=torch.uint8)
    comm.all_gather(everybody, mine).wait()
    columns = everybody.view(comm.world, len(fields), _FIELD_BYTES).unbind(1)
    for name, column in zip(fields, columns, strict=True):
        if bool((column != column[0]).any()):
            values = "; ".join(f"rank {rank}: {_unpack(row)}" for rank, row in enumerate(column))
            raise RanksDisagree(f"ranks disagree on {name}: {values}")


def _pack(text: str) -> torch.Tensor:
    data = text.encode()
    digest = hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()
    return torch.frombuffer(
        bytearray(data[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0") + digest), dtype=torch.uint8
    )


def _unpack(row: torch.Tensor) -> str:
    data = bytes(row.tolist())
    text = data[:_TEXT_BYTES].rstrip(b"\0").decode(errors="replace")
    return f"{text} (fingerprint {data[_TEXT_BYTES:].hex()})"
