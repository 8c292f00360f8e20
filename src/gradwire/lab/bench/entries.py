"""The lists that the command line takes: `dense;topk(ratio=0.01);covap(interval=4)`."""

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["recipe", "peer", "bound", "policy"]
Option = int | float | str | bool | tuple[Any, ...] | dict[str, Any] | None
"""Tuples and dictionaries hold the others: shares at which segments end, rates by name."""

_ENTRY = re.compile(r"^(?P<stem>[A-Za-z_]\w*)(?:\((?P<options>.*)\))?$", re.DOTALL)


@dataclass(frozen=True)
class Entry:
    """One setting to measure; `name` is the text as typed, and identifies the row."""

    name: str
    kind: Kind
    stem: str
    options: Mapping[str, Option] = field(default_factory=lambda: MappingProxyType({}))


def parse_entry(text: str, kind: Kind) -> Entry:
    """Read `name` or `name(key=value, …)`.

    >>> parse_entry("powersgd_hook(rank=2)", "peer").options["rank"]
    2
    """
    name = text.strip()
    match = _ENTRY.match(name)
    if match is None:
        raise ValueError(f"{kind} {name!r}: expected `name` or `name(key=value, …)`")
    return Entry(name, kind, match["stem"], MappingProxyType(_options(name, match["options"])))


def parse_entries(text: str, kind: Kind) -> tuple[Entry, ...]:
    """Split at semicolons; empty pieces are dropped, a name that occurs twice is refused.

    >>> [entry.stem for entry in parse_entries("dense; covap(interval=4)", "recipe")]
    ['dense', 'covap']
    """
    entries = tuple(parse_entry(piece, kind) for piece in text.split(";") if piece.strip())
    names = [entry.name for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{kind} listed twice: {', '.join(twice)}")
    return entries


def _options(name: str, text: str | None) -> dict[str, Option]:
    if not text or not text.strip():
        return {}
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"{name!r}: cannot read the options: {error.msg}") from error
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError(f"{name!r}: options are written as key=value")
    keys = [str(pair.arg) for pair in call.keywords]
    if len(set(keys)) < len(keys):
        raise ValueError(f"{name!r}: an option is given twice")
    return {str(pair.arg): _value(name, pair.value) for pair in call.keywords}


def _is_option(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_option, value))
    if isinstance(value, dict):
        return all(map(_is_option, value.values()))
    return value is None or isinstance(value, int | float | str | bool)


def _value(name: str, node: ast.expr) -> Option:
    """A literal, or a bare word taken as text: `elect=norm` means `elect="norm"`."""
    if isinstance(node, ast.Name):
        return node.id
    try:
        value = ast.literal_eval(node)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name!r}: {ast.unparse(node)} is not a number, a word or a string") from error
    if _is_option(value):
        option: Option = value
        return option
    raise ValueError(f"{name!r}: {ast.unparse(node)} is not a number, a word or a string")
