"""The texts that name workloads: read without torch, which takes seconds to import."""

import ast
import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple

from gradwire.planning.shapes import models

IMAGES = ("resnet18", "resnet_demo", "convnet")
TEXTS = ("chargpt",)
EMULATED = ("shrink", "time_scale")
"""The options of `emulated(model)`."""


class WorkloadSpec(NamedTuple):
    """`name`, or `emulated(model, option=number)`; the user's own is a name with a colon."""

    name: str
    model: str | None
    options: dict[str, float]


def names() -> list[str]:
    """Every workload; those of the form emulated(model) stand for one model each."""
    return [*IMAGES, *TEXTS, *(f"emulated({model})" for model in models())]


def read(text: str) -> WorkloadSpec:
    """The workload that `text` names. Raises `ValueError`, with the nearest name, if there is none.

    >>> read("emulated(vgg19, shrink=16)")
    WorkloadSpec(name='emulated', model='vgg19', options={'shrink': 16.0})
    """
    if ":" in text:
        return WorkloadSpec(text.strip(), None, {})
    name, arguments, options = _parsed(text)
    if name == "emulated":
        return _emulated(arguments, options)
    if name not in (*IMAGES, *TEXTS):
        raise ValueError(f"workload={name!r} is unknown; {nearest(name, names())}")
    if arguments or options:
        raise ValueError(f"workload={text!r}: {name} takes no arguments")
    return WorkloadSpec(name, None, {})


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest known word if any is near, and the list of all of them."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.4)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(words)}"


def _emulated(arguments: list[Any], options: dict[str, Any]) -> WorkloadSpec:
    if len(arguments) != 1 or arguments[0] not in models():
        given = ", ".join(map(str, arguments))
        raise ValueError(f"emulated({given}) names no single known network; {nearest(given, models())}")
    for key, value in options.items():
        if key not in EMULATED:
            raise ValueError(f"emulated({arguments[0]}, {key}=…) is unknown; {nearest(key, EMULATED)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"emulated: {key}={value!r} must be a number")
    return WorkloadSpec("emulated", arguments[0], {key: float(value) for key, value in options.items()})


def _parsed(text: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Name, positional and keyword arguments; bare words and Python literals are values."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        if isinstance(tree, ast.Name):
            return tree.id, [], {}
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            named = {str(keyword.arg): _value(keyword.value) for keyword in tree.keywords}
            return tree.func.id, [_value(argument) for argument in tree.args], named
    except (SyntaxError, ValueError):
        pass
    raise ValueError(f"workload={text!r} must look like `name` or `name(model, key=value)`")


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)
