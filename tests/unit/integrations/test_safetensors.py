"""States as flat tensors and a text."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import torch

from gradwire.checkpoint import state
from gradwire.comm import Comm, run_ranks
from gradwire.integrations.safetensors import flat, nested
from tests.support.rig import Rig, gradients


def _states(recipe: str) -> list[dict[str, Any]]:
    def rank(comm: Comm) -> dict[str, Any]:
        rig = Rig(comm, recipe)
        rig.step(gradients(comm.rank, 0))
        return state.keyed(state.save(rig.reducer))

    return run_ranks(2, rank)


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else bool(left == right)


@pytest.mark.parametrize("recipe", ["dgc(ratio=0.1, warmup_steps=0)", "powersgd(rank=2)", "dense", "covap"])
def test_what_was_made_flat_is_the_same_state_again(recipe: str) -> None:
    for saved in _states(recipe):
        tensors, metadata = flat(saved)
        assert all(isinstance(text, str) for text in metadata.values())
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        file = io.BytesIO()
        torch.save(tensors, file)
        file.seek(0)
        assert _same(nested(torch.load(file, weights_only=True), json.loads(json.dumps(metadata))), saved)


def test_names_with_slashes_do_not_collide() -> None:
    saved = {"rank0": {"a": {"b/c": torch.ones(1)}, "a/b": {"c": torch.zeros(1)}}}
    assert _same(nested(*flat(saved)), saved)


@pytest.mark.parametrize("text", ["", "[[", "{}", "5", '[["gone", ["a"]]]', '[["", []]]', '[["", ["a"]]]'])
def test_another_text_is_no_state(text: str) -> None:
    if text == "{}":
        assert nested({}, {"gradwire": text}) == {}
        return
    with pytest.raises(ValueError, match="not the tensors and the metadata of a state"):
        nested({}, {"gradwire": text})
    with pytest.raises(ValueError, match="not the tensors and the metadata of a state"):
        nested({}, {})
