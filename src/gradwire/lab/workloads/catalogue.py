"""The list of workloads, and how a string becomes one of them."""

import ast
import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gradwire.lab.data import load_images, load_text
from gradwire.lab.workloads.base import Shards, Workload, check_shards
from gradwire.lab.workloads.emulated import EmulatedWorkload
from gradwire.lab.workloads.images import ImageWorkload, Recipe
from gradwire.lab.workloads.models import ConvNet, resnet18, resnet_demo
from gradwire.lab.workloads.profile import timing
from gradwire.lab.workloads.text import Size, TextWorkload
from gradwire.planning.shapes import load, models


def parse(spec: str) -> tuple[str, list[Any], dict[str, Any]]:
    """Name, positional and keyword arguments of `spec`; bare words and Python literals are values.

    >>> parse("emulated(vgg19, shrink=16)")
    ('emulated', ['vgg19'], {'shrink': 16})
    """
    try:
        tree = ast.parse(spec.strip(), mode="eval").body
        if isinstance(tree, ast.Name):
            return tree.id, [], {}
        if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name):
            named = {str(keyword.arg): _value(keyword.value) for keyword in tree.keywords}
            return tree.func.id, [_value(argument) for argument in tree.args], named
    except (SyntaxError, ValueError):
        pass
    raise ValueError(f"workload={spec!r} must look like `name` or `name(model, key=value)`")


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the nearest known word if any is near, and the list of all of them."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.4)
    return (f"did you mean {close[0]!r}? " if close else "") + f"known: {', '.join(words)}"


def _value(node: ast.expr) -> Any:
    return node.id if isinstance(node, ast.Name) else ast.literal_eval(node)


_IMAGES = {
    "resnet18": Recipe(resnet18, batch_size=16, learning_rate=0.02),
    "resnet_demo": Recipe(resnet_demo, batch_size=32, learning_rate=0.05),
    "convnet": Recipe(ConvNet, batch_size=16, learning_rate=0.02),
}
_EMULATED = ("shrink", "time_scale")
_TEXT = {"chargpt": (Size(), 6)}


def names() -> list[str]:
    """Every workload; those of the form emulated(model) stand for one model each."""
    return [*_IMAGES, *_TEXT, *(f"emulated({model})" for model in models())]


def workload(
    spec: str,
    *,
    data: Path | None = None,
    shards: Shards = "iid",
    batch_size: int | None = None,
    full: bool = True,
) -> Workload:
    """The workload that `spec` names, for instance "resnet18" or "emulated(vgg19, shrink=16)".

    Args:
        data: the user's own data instead of Fashion-MNIST or Shakespeare (see `gradwire.lab.data`).
        shards: "iid", or "skewed" for shards that differ between ranks: sorted by label for images,
            consecutive stretches for text.
        batch_size: samples per rank and step instead of the workload's own.
        full: use full data sets where they are installed, not the vendored slices.
    """
    check_shards(shards)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    name, arguments, options = parse(spec)
    if name == "emulated":
        return _emulated(arguments, options)
    if name not in (*_IMAGES, *_TEXT):
        raise ValueError(f"workload={name!r} is unknown; {nearest(name, names())}")
    if arguments or options:
        raise ValueError(f"workload={spec!r}: {name} takes no arguments")
    return _trained(name, data, shards, batch_size, full)


def _trained(name: str, data: Path | None, shards: Shards, batch_size: int | None, full: bool) -> Workload:
    options: dict[str, Any] = {"shards": shards}
    if name in _TEXT:
        size, default = _TEXT[name]
        return TextWorkload(
            name, size, load_text(data, full=full), batch_size=batch_size or default, **options
        )
    recipe = _IMAGES[name]
    images = load_images(data, full=full)
    return ImageWorkload(name, recipe, images, batch_size=batch_size or recipe.batch_size, **options)


def _emulated(arguments: list[Any], options: dict[str, Any]) -> EmulatedWorkload:
    """`emulated(model, shrink=1, time_scale=1)`; data, shards and batch size mean nothing to it."""
    if len(arguments) != 1 or arguments[0] not in models():
        given = ", ".join(map(str, arguments))
        raise ValueError(f"emulated({given}) names no single known network; {nearest(given, models())}")
    for key, value in options.items():
        if key not in _EMULATED:
            raise ValueError(f"emulated({arguments[0]}, {key}=…) is unknown; {nearest(key, _EMULATED)}")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"emulated: {key}={value!r} must be a number")
    profile = load(arguments[0])
    shrink, time_scale = (float(options.get(key, 1)) for key in _EMULATED)
    return EmulatedWorkload(profile, timing(profile), shrink, time_scale)
