"""A state as flat tensors and one text, as safetensors needs it. safetensors itself is not imported here.

Example::

    tensors, metadata = flat(wire.state_dict())
    save_file(tensors, f"wire-{rank}.safetensors", metadata)

    with safe_open(f"wire-{rank}.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        wire.load_state_dict(nested(tensors, file.metadata()))
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

_KEY = "gradwire"
_Path = tuple[str, ...]


def flat(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of `state` by name, contiguous, and everything else as JSON text under the key "gradwire".

    >>> import torch
    >>> tensors, metadata = flat({"rank0": {"step": 3, "memory": {"w": torch.zeros(2)}, "kept": {}}})
    >>> tensors, metadata
    ({'rank0/memory/w': tensor([0., 0.])}, {'gradwire': '[["rank0/memory/w", ["rank0", "memory", "w"]], \
["", ["rank0", "step"], 3], ["", ["rank0", "kept"], {}]]'})
    """
    tensors: dict[str, Tensor] = {}
    named, rest = [], []
    for path, value in _leaves(state):
        if isinstance(value, Tensor):
            name = "/".join(path)
            name += f"#{len(tensors)}" if name in tensors else ""  # a name of a parameter may have slashes
            tensors[name] = value.detach().contiguous()
            named.append([name, path])
        else:
            rest.append(["", path, value])
    return tensors, {_KEY: json.dumps([*named, *rest])}


def nested(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Any]:
    """The inverse of `flat`. Raises `ValueError` if the tensors and the text are not a state's."""
    state: dict[str, Any] = {}
    try:
        for name, (*inner, last), *value in json.loads(metadata[_KEY]):
            place = state
            for key in inner:
                place = place.setdefault(key, {})
            place[last] = tensors[name] if name else value[0]
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"these are not the tensors and the metadata of a state: {error!r}") from error
    return state


def _leaves(state: Mapping[str, Any], path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    for key, value in state.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value
