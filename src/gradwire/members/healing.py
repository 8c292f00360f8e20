"""Healing: one member sends another one the shared parameters and everything that belongs to them.

The state goes from rank to rank over the meeting's own group: a description in JSON, then plain tensors.
Nothing received is ever executed, and it is only turned into numbers and texts.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from gradwire.comm.process_group import GroupPeers
from gradwire.errors import GradwireError

DTYPES = {
    str(each).removeprefix("torch."): each
    for each in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


def give(peers: GroupPeers, to: int, state: Any) -> int:
    """Send `state` (dictionaries, lists, tensors, numbers and texts) to rank `to`. Returns the number of
    bytes.

    Raises `TransportError`, and `ValueError` for values of other types.
    """
    described, tensors = describe(state)
    text = torch.frombuffer(bytearray(described.encode()), dtype=torch.uint8)
    length = torch.tensor([len(text)], device="cpu").view(torch.uint8)
    # All are under way at once: each alone takes a round trip, in which the other side says that it waits.
    sent = [(each, peers.send(each, to)) for each in (length, text, *map(as_bytes, tensors))]
    for _each, pending in sent:
        pending.wait()
    return len(text) + sum(each.nbytes for each in tensors)


def take(peers: GroupPeers, source: int) -> tuple[Any, int]:
    """Receive a state from rank `source`, with tensors on the CPU. Returns (state, number of bytes).

    Raises `TransportError`, and `GradwireError` if no member of gradwire would send that.
    """
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    peers.receive(length.view(torch.uint8), source).wait()
    text = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
    peers.receive(text, source).wait()
    found, tensors = room_for(bytes(text.tolist()).decode(errors="replace"))
    for pending in [peers.receive(as_bytes(each), source) for each in tensors]:
        pending.wait()
    return found, len(text) + sum(each.nbytes for each in tensors)


def describe(state: Any) -> tuple[str, list[Tensor]]:
    """Describe `state` in a text, and return it with the tensors in it, in their order. Raises `ValueError`
    for types other than dictionaries, lists, tensors, numbers and texts.

    >>> describe({"step": 3, 0: torch.zeros(2)})
    ('{"of": [["step", 3], [0, {"tensor": ["float32", [2]]}]]}', [tensor([0., 0.])])
    """
    tensors: list[Tensor] = []
    return json.dumps(_described(state, tensors)), tensors


def room_for(text: str) -> tuple[Any, list[Tensor]]:
    """Build the state that the description `text` describes, with tensors still to be filled. Returns (state,
    its tensors).

    Raises `GradwireError` if the text is no such description.
    """
    tensors: list[Tensor] = []
    try:
        return _read(json.loads(text), tensors), tensors
    except (ValueError, TypeError, KeyError, RuntimeError, RecursionError) as error:
        raise GradwireError(f"what another member gave cannot be read: {error!r}") from error


def as_bytes(tensor: Tensor) -> Tensor:
    """Bytes of a tensor; a view, if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _described(state: Any, tensors: list[Tensor]) -> Any:
    if isinstance(state, Tensor):
        tensors.append(state)
        return {"tensor": [str(state.dtype).removeprefix("torch."), list(state.shape)]}
    if isinstance(state, dict):
        return {"of": [[_described(key, tensors), _described(each, tensors)] for key, each in state.items()]}
    if isinstance(state, list | tuple):
        return {type(state).__name__: [_described(each, tensors) for each in state]}
    if state is None or isinstance(state, bool | int | float | str):
        return state
    raise ValueError(f"a {type(state).__name__} cannot be given to another member: keep it out of the state")


def _read(described: Any, tensors: list[Tensor]) -> Any:
    if not isinstance(described, dict):
        return described
    [(kind, each)] = described.items()
    match kind:
        case "tensor":
            name, shape = each
            tensors.append(torch.empty(shape, dtype=DTYPES[name], device="cpu"))
            return tensors[-1]
        case "of":
            return {_read(key, tensors): _read(value, tensors) for key, value in each}
        case "list" | "tuple":
            found = [_read(value, tensors) for value in each]
            return found if kind == "list" else tuple(found)
    raise ValueError(f"{kind!r} is none of its words")
