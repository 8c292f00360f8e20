"""A tensor says where it is made: otherwise `torch.set_default_device` does, which is the user's."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.support.source import MODULES

pytestmark = pytest.mark.rest

MAKERS = {
    "arange", "as_tensor", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm",
    "scalar_tensor", "tensor", "zeros",
}  # fmt: skip


def unplaced(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every call of torch's that makes a tensor and does not say where."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), keywords=keywords) if (
                name in MAKERS and not any(each.arg in ("device", "out", None) for each in keywords)
            ):
                yield node.lineno, name


def test_a_maker_without_a_device_is_found() -> None:
    for call in ("torch.zeros(3)", "f(torch.tensor([1], dtype=torch.int64))"):
        assert len(list(unplaced(ast.parse(call)))) == 1
    assert not list(unplaced(ast.parse("torch.zeros(3, device=x.device); torch.zeros_like(x)")))


def test_every_tensor_is_made_at_a_place() -> None:
    # The laboratory trains models of its own and may leave the choice to the user.
    ours = [module for module in MODULES if not module.name.startswith("gradwire.lab")]
    assert [f"{module}: {call}" for module in ours for call in unplaced(module.tree)] == []
