"""Horizontal bars: where a step's time went, and bytes predicted beside bytes counted."""

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.lab.bench.units import bytes_text, seconds_text
from gradwire.lab.report import svg

WIDTH = 1140.0
_NAMES = 150.0
_VALUES = 96.0
_ROW = 46.0
_BAR = 26.0
_LEAST_LABEL = 58.0


@dataclass(frozen=True)
class Part:
    """A piece of a stacked bar: seconds and the class of its colour."""

    name: str
    value: float
    class_: str


def stacked(rows: Sequence[tuple[str, Sequence[Part]]], label: str) -> str:
    """One bar per row, made of parts, with its total in seconds at the end."""
    longest = max((sum(part.value for part in parts) for _, parts in rows), default=0.0)
    scale = svg.Scale(0.0, longest, 0.0, WIDTH - _NAMES - _VALUES)
    pieces: list[str] = []
    for index, (name, parts) in enumerate(rows):
        y = index * _ROW + 6
        pieces.append(svg.text(_NAMES - 12, y + _BAR / 2 + 5, name, "end", "name"))
        x = _NAMES
        for part in parts:
            width = scale(part.value)
            pieces += _piece(x, y, width, part)
            x += width
        total = sum(part.value for part in parts)
        pieces.append(svg.text(x + 10, y + _BAR / 2 + 5, seconds_text(total), "start", "name"))
    return svg.drawing(WIDTH, len(rows) * _ROW + 4, pieces, label)


def byte_pairs(rows: Sequence[tuple[str, float | None, float | None, str]]) -> str:
    """Name, bytes predicted, bytes counted, class: two thin bars each."""
    longest = max((value for row in rows for value in row[1:3] if value is not None), default=0.0)
    scale = svg.Scale(0.0, longest, 0.0, WIDTH - _NAMES - 2.6 * _VALUES)
    pieces: list[str] = []
    for index, (name, predicted, counted, class_) in enumerate(rows):
        y = index * (_ROW + 10) + 6
        pieces.append(svg.text(_NAMES - 12, y + 24, name, "end", "name"))
        for offset, value, what, shade in (
            (0, predicted, "predicted", " pale"),
            (20, counted, "counted", ""),
        ):
            width = 0.0 if value is None else scale(value)
            if value is not None:
                pieces.append(svg.box(_NAMES, y + offset, width, 16, f"fill-{class_}{shade}"))
            words = "not counted" if value is None else f"{bytes_text(value)} {what}"
            pieces.append(svg.text(_NAMES + width + 10, y + offset + 13, words))
    return svg.drawing(WIDTH, len(rows) * (_ROW + 10) + 4, pieces, "bytes per step, predicted and counted")


def _piece(x: float, y: float, width: float, part: Part) -> list[str]:
    words = seconds_text(part.value)
    pieces = [svg.box(x, y, width, _BAR, f"fill-{part.class_}", f"{part.name}: {words}")] if width > 0 else []
    if width >= _LEAST_LABEL:
        pieces.append(svg.text(x + width / 2, y + _BAR / 2 + 5, words, "middle", "inside"))
    return pieces
