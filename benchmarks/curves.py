"""Named curves over common axes as a picture in a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gradwire.lab.report import svg
from gradwire.lab.report.charts import Series, line_chart

COLOURS = ("#3465a4", "#cc0000", "#4e9a06", "#f57900", "#75507b", "#888a85")


def draw(path: Path, curves: Mapping[str, Sequence[svg.Point]], across: str, up: str) -> None:
    """Write at most six `curves`, with their names above."""
    style = "text{font:11px sans-serif;fill:#444}.paper{fill:white}.grid{stroke:#ddd}"
    style += "polyline{fill:none;stroke-width:2}"
    style += "".join(f".c{k}{{stroke:{c}}}.fill-c{k}{{fill:{c}}}" for k, c in enumerate(COLOURS))
    chart = line_chart(
        [Series(tuple(points), f"c{k}") for k, points in enumerate(curves.values())], across, up
    )
    legend = [(f"c{k}", name) for k, name in enumerate(curves)]
    path.write_text(svg.alone(chart, legend, style) + "\n", encoding="utf-8")
