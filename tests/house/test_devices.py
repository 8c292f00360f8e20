"""A tensor says where it is made, and of which type: otherwise `torch.set_default_device` and
`torch.set_default_dtype` do, which are the user's.
"""

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

OF_THE_DEFAULT_TYPE = {"empty", "eye", "linspace", "ones", "rand", "randn", "zeros"}
"""Of these, the others go by the type of what they are given, if that is of whole numbers or flags."""


def unplaced(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every call of torch's that makes a tensor and does not say where."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), keywords=keywords) if (
                name in MAKERS and not any(each.arg in ("device", "out", None) for each in keywords)
            ):
                yield node.lineno, name


def untyped(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of every call of torch's whose tensor is of the default type, or may be."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr=name), keywords=keywords, args=args
            ) if (
                not any(each.arg in ("dtype", "out", None) for each in keywords)
                and (name in OF_THE_DEFAULT_TYPE or any(map(_is_of_floats, args)))
                and name in MAKERS
            ):
                yield node.lineno, name


def _is_of_floats(argument: ast.AST) -> bool:
    """Whether `argument` is made of a number that is called a float, or written as one."""
    return any(
        (isinstance(each, ast.Constant) and isinstance(each.value, float))
        or (isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "float")
        for each in ast.walk(argument)
    )


def test_a_maker_without_a_device_is_found() -> None:
    for call in ("torch.zeros(3)", "f(torch.tensor([1], dtype=torch.int64))"):
        assert len(list(unplaced(ast.parse(call)))) == 1
    assert not list(unplaced(ast.parse("torch.zeros(3, device=x.device); torch.zeros_like(x)")))


def test_every_tensor_is_made_at_a_place() -> None:
    # The laboratory trains models of its own and may leave the choice to the user.
    ours = [module for module in MODULES if not module.name.startswith("gradwire_lab")]
    assert [f"{module}: {call}" for module in ours for call in unplaced(module.tree)] == []


def test_a_maker_of_the_default_type_is_found() -> None:
    for call in ("torch.zeros(3)", "f(torch.tensor([1.0]))", "torch.tensor(float(x))", "torch.full((), 2.0)"):
        assert len(list(untyped(ast.parse(call)))) == 1
    sound = "torch.zeros(3, dtype=torch.int32); torch.zeros_like(x); torch.tensor([1]); torch.arange(3)"
    assert not list(untyped(ast.parse(sound)))


def test_every_tensor_is_made_of_a_type() -> None:
    ours = [module for module in MODULES if not module.name.startswith("gradwire_lab")]
    assert [f"{module}: {call}" for module in ours for call in untyped(module.tree)] == []
