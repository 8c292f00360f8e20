"""One step of each contestant: computing, encoding, sending and waiting, on a common time axis."""

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.lab.bench.units import seconds_text
from gradwire.lab.report import svg

WIDTH = 1140.0
_NAMES = 150.0
_LANE = 26.0
_BAR = 20.0
_GAP = 22.0

Span = Mapping[str, Any]

_LANES = (
    ("backward", ("backward",)),
    ("encode, decode", ("encode", "decode")),
    ("on the wire", ("wire",)),
    ("waiting", ("wait",)),
)


def timeline(groups: Sequence[tuple[str, Sequence[Span]]]) -> str:
    """Lanes of spans per group; lanes without a span are left out. Time starts with the backward pass."""
    spans = [span for _, group in groups for span in group]
    if not spans:
        return svg.drawing(WIDTH, 40, [svg.text(8, 24, "nothing was recorded")], "timeline")
    # A forward-running clock can put an event a hair before backward starts.
    low = min(0.0, *(span["start_s"] for span in spans))
    high = max(span["stop_s"] for span in spans)
    across = svg.Scale(low, high, _NAMES, WIDTH - 16)
    pieces: list[str] = []
    y = 4.0
    for name, group in groups:
        pieces.append(svg.text(0, y + 14, name, "start", "name"))
        y += _GAP
        for lane, kinds in _LANES:
            mine = [span for span in group if span["what"] in kinds]
            if mine:
                pieces += _lane(lane, mine, across, y)
                y += _LANE
        y += 8
    pieces += _axis(across, y)
    return svg.drawing(WIDTH, y + 40, pieces, "timeline of one step")


def _lane(name: str, spans: Sequence[Span], across: svg.Scale, y: float) -> list[str]:
    pieces = [svg.text(_NAMES - 12, y + 15, name, "end")]
    pieces.append(svg.line(_NAMES, y + _BAR / 2, across.stop, y + _BAR / 2, "grid"))
    for span in spans:
        start, stop = across(span["start_s"]), across(span["stop_s"])
        words = seconds_text(span["stop_s"] - span["start_s"])
        unit = f" {span['unit']}" if span["unit"] else ""
        pieces.append(
            svg.box(start, y, stop - start, _BAR, f"fill-{span['what']}", f"{span['what']}{unit}: {words}")
        )
    return pieces


def _axis(across: svg.Scale, y: float) -> list[str]:
    pieces = [svg.line(across.start, y, across.stop, y, "axis")]
    pieces += [
        svg.text(across(value / 1e3), y + 18, svg.tick_text(value), "middle")
        for value in svg.ticks(across.low * 1e3, across.high * 1e3, 10)
    ]
    middle = (across.start + across.stop) / 2
    return [*pieces, svg.text(middle, y + 36, "milliseconds since backward started", "middle", "name")]
