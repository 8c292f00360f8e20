"""A few shapes of SVG, as text. Colours are class names: the page's style sheet decides, light or dark."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """Maps values in [low, high] to pixels in [start, stop]."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        width = (self.high - self.low) or 1.0
        return self.start + (value - self.low) / width * (self.stop - self.start)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """About `about` round numbers within [low, high].

    >>> ticks(0.0, 2.3)
    [0.0, 0.5, 1.0, 1.5, 2.0]
    """
    if not high > low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_text(value: float) -> str:
    """The shortest exact text of a number.

    >>> tick_text(0.5), tick_text(100.0)
    ('0.5', '100')
    """
    return f"{value:g}"


def element(name: str, body: str = "", **attributes: object) -> str:
    """`<name key="value">body</name>`; underscores become hyphens, a trailing one goes."""
    parts = [f'{key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items()]
    return f"<{' '.join([name, *parts])}>{body}</{name}>"


def text(x: float, y: float, words: str, anchor: str = "start", class_: str = "label") -> str:
    """Element with `words` at (x, y) in pixels; `anchor` is start, middle or end, and `class_` the style."""
    return element("text", escape(words), x=x, y=y, text_anchor=anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def polyline(points: Iterable[Point], class_: str) -> str:
    return element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=class_)


def polygon(points: Iterable[Point], class_: str) -> str:
    return element("polygon", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), class_=class_)


def dot(x: float, y: float, radius: float, class_: str) -> str:
    return element("circle", cx=x, cy=y, r=radius, class_=class_)


def box(x: float, y: float, width: float, height: float, class_: str, hint: str = "") -> str:
    """Element of a rectangle at (x, y), in pixels; `hint` appears under the pointer, and `class_` is the
    style. Never thinner than a pixel: short events must show.
    """
    title = element("title", escape(hint)) if hint else ""
    return element("rect", title, x=x, y=y, width=max(width, 1.0), height=height, class_=class_)


def drawing(width: float, height: float, parts: Sequence[str], label: str) -> str:
    """Picture of `width` by `height` pixels with these `parts`, scaled to the width of its place; `label` is
    for those who cannot see it.
    """
    body = "".join(parts)
    return element(
        "svg", body, viewBox=f"0 0 {width:g} {height:g}", role="img", aria_label=escape(label, quote=True)
    )


_ENTRY, _EDGE, _ENLARGED = 18.0, 12.0, 1.5
# Of an entry of the legend: its square, and a letter. Those of browsers, of 12 pixels, are narrower.
_SQUARE, _LETTER = 40.0, 6.5


def alone(picture: str, legend: Sequence[tuple[str, str]], style: str) -> str:
    """A drawing as a file of its own: on paper, in the colours of `style` (CSS), below its legend.

    An entry of the legend is the class of a curve and its words. A line has as many as fit.
    """
    size = re.search(r'viewBox="0 0 (\S+) (\S+)".* aria-label="([^"]*)"', picture)
    if size is None:
        raise ValueError("not a drawing")
    width, height = float(size[1]), float(size[2])
    parts = [element("style", style), element("rect", width="100%", height="100%", class_="paper")]
    x, y = _EDGE, _EDGE
    for class_, words in legend:
        takes = _SQUARE + _LETTER * len(words)
        if x > _EDGE and x + takes > width:
            x, y = _EDGE, y + _ENTRY
        parts += [box(x, y, 12, 12, f"fill-{class_}"), text(x + 20, y + 10.5, words)]
        x += takes
    top = y + _ENTRY if legend else _EDGE
    parts.append(element("svg", picture, x=_EDGE, y=top, width=width, height=height))
    whole, tall = width + 2 * _EDGE, top + height + _EDGE
    return element(
        "svg",
        "".join(parts),
        xmlns="http://www.w3.org/2000/svg",
        width=_ENLARGED * whole,
        height=_ENLARGED * tall,
        viewBox=f"0 0 {whole:g} {tall:g}",
        role="img",
        aria_label=size[3],
    )


def _value(value: object) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)
