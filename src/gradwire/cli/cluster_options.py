"""The arguments of commands that predict: a model, links, times, and the costs of codecs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from gradwire._api.study import candidates_of
from gradwire.cli.prerequisites import FORMAT, STDOUT, write_json
from gradwire.cli.user_code import made
from gradwire.measure.codec import codec_cost, remembered
from gradwire.planning.costs import CodecCost, Line
from gradwire.planning.decoders import of_config, of_size
from gradwire.planning.shapes import Profile, load, read
from gradwire.quantities import columns, count_of, counted, rate_bit_per_s, time_s, wrapped
from gradwire.recipes.parse import recipe, steady


def model_of(
    model: str | None, shapes: Path | None, params: str | None = None, hf_config: Path | None = None
) -> Profile | nn.Module:
    """A published network, a file of shapes, or what `package.module:make` returns, built without memory.

    `params` is a size such as 350M, `hf_config` a `config.json`. `make` returns a module, or as for
    `gradwire bench` a tuple that begins with one.
    """
    if sum(each is not None for each in (model, shapes, params, hf_config)) != 1:
        raise ValueError("give one of --model, --shapes, --params and --hf-config")
    if shapes is not None:
        return read(shapes)
    if params is not None:
        return of_size(count_of(params))
    if hf_config is not None:
        return of_config(hf_config)
    assert model is not None
    if ":" not in model:
        return load(model)
    with torch.device("meta"):
        found = made(model)
    network = found[0] if isinstance(found, tuple) and found else found
    if not isinstance(network, nn.Module):
        raise ValueError(f"{model} returned {type(network).__name__}, which is not a module")
    return network


def places(workers: int | None, nodes: int | None, per_node: int | None) -> tuple[int, int]:
    """Ranks in all, and on each node: two of three numbers give the third.

    >>> places(32, 4, None), places(None, 4, 8), places(4, None, None)
    ((32, 8), (32, 8), (4, 1))
    """
    if workers is None:
        if nodes is None:
            raise ValueError("give --workers, or --nodes with --per-node")
        workers = nodes * (per_node or 1)
    if nodes is not None and nodes < 1:
        raise ValueError(f"nodes={nodes} must be at least 1")
    per_node = per_node or (1 if nodes is None else workers // nodes)
    if nodes is not None and nodes * per_node != workers:
        raise ValueError(f"nodes={nodes} with per_node={per_node} ranks are not workers={workers}")
    return workers, per_node


def links(rate: str, delay: str, inside: str | None, inside_delay: str) -> dict[str, Any]:
    """Read the texts of rates and delays, such as "10gbit" and "5ms", as arguments of `gradwire.plan` and
    `gradwire.simulate`, in bit/s and seconds. Without `inside` the rate inside nodes is `None`.
    """
    return {
        "rate_bit_per_s": rate_bit_per_s(rate),
        "delay_s": time_s(delay),
        "inside_bit_per_s": None if inside is None else rate_bit_per_s(inside),
        "inside_delay_s": time_s(inside_delay),
    }


_OPTIONS = re.compile(
    r"\b(workers|nodes|per_node|every|target|stragglers|seed|codec|(?:backward|step|delay|inside_delay)(?=_s=)"
    r"|(?:rate|inside)(?=_bit_per_s=)|memory(?=_bytes=)|sharded)(_s|_bit_per_s|_bytes)?=(None|[^\s,;:]+)"
)
_UNITS = {"_s": " s", "_bit_per_s": " bit/s", "_bytes": " bytes"}


def of_options(error: str) -> str:
    """An error of `gradwire.plan` or `gradwire.simulate`, with the command's options instead of arguments.

    >>> of_options("backward_s=0.3 must be positive and within step_s=0.18")
    '--backward 0.3 s must be positive and within --step 0.18 s'
    >>> of_options("per_node=8 ranks share a node: say what the link inside is like")
    '--per-node 8 ranks share a node: say what the link inside is like (--inside)'
    """
    said = _OPTIONS.sub(
        lambda found: (
            f"--{found[1].replace('_', '-')}"
            + ("" if found[3] == "True" else f" {found[3]}{_UNITS.get(found[2], '')}")
        ),
        error,
    )
    return f"{said} (--inside)" if said.endswith("the link inside is like") else said


@contextmanager
def named_as_options() -> Iterator[None]:
    """End the command where a value does not fit, with a sentence that names options."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(of_options(str(error))) from None


def texts_of(
    recipes: str | None, usual: Sequence[str], every: int = 1, *, sharded: bool = False
) -> tuple[str, ...]:
    """Recipes named in `recipes`, separated by semicolons, in their normal form. Without any, those that are
    compared by themselves, which are `usual` for an exchange in each step. Raises `ValueError` for an unknown
    one.
    """
    asked = None if recipes is None else recipes.split(";")
    if asked is not None and not sharded:
        asked = [str(recipe(text)) for text in asked]
    return candidates_of(asked, usual, every, sharded)


def hidden(number: int) -> str:
    """Sentence on recipes that are left out of a table."""
    said = (
        f"not shown: {counted(number, 'recipe')} that auto does not try by default. They leave more of the "
        "gradient unsent, which costs quality on most models, or it is not known how much: --all shows them"
    )
    return wrapped(said, columns())


def codecs_of(source: str, texts: Sequence[str]) -> dict[str, CodecCost]:
    """The costs of codecs: "free", "cached" or "measured" here, or a file of `gradwire probe --codecs`.

    Recipes of which nothing is known are left out.
    """
    if source == "free":
        return {}
    if source in ("cached", "measured"):
        found: dict[str, CodecCost] = {}
        for text in texts:
            built = steady(text, "candidate")
            exact = codec_cost(built.exchange, built.text) if source == "measured" else remembered(built.text)
            if exact is not None:
                found[text] = exact
        return found
    try:
        stated = json.loads(Path(source).read_text(encoding="utf-8"))["codecs"]
        return {name: CodecCost(_line(of["encode"]), _line(of["decode"])) for name, of in stated.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(
            f"codec={source!r}: expected free, cached, measured, or a file that "
            "`gradwire probe --codecs … --json` has written"
        ) from error


def _line(stated: dict[str, Any]) -> Line:
    line = Line(float(stated["base_s"]), float(stated["slope_s"]))
    if not (isfinite(line(1.0)) and min(line.base_s, line.slope_s) >= 0.0):
        raise ValueError(f"{line} is not a time")
    return line


def show(text: str, document: dict[str, Any], json_path: Path | None) -> None:
    """Print the text and write the document, or only the document, to the standard output, for "-"."""
    if str(json_path) != STDOUT:
        print(text)
    write_json({"format": FORMAT, **document}, json_path)
