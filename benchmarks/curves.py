"""Named curves over common axes as a picture in a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gradwire.lab.report import svg
from gradwire.lab.report.charts import HEIGHT, WIDTH, Series, line_chart

COLOURS = ("#3465a4", "#cc0000", "#4e9a06", "#f57900", "#75507b", "#888a85")
LINE = 16.0


def draw(path: Path, curves: Mapping[str, Sequence[svg.Point]], across: str, up: str) -> None:
    """Write at most six `curves`, with their names below."""
    style = "text{font:11px sans-serif;fill:#444}.grid{stroke:#ddd}polyline{fill:none;stroke-width:2}"
    style += "".join(f".c{k}{{stroke:{colour}}}" for k, colour in enumerate(COLOURS))
    chart = line_chart(
        [Series(tuple(points), f"c{k}") for k, points in enumerate(curves.values())], across, up
    )
    head, tail = chart.split(">", 1)
    height = HEIGHT + LINE * -(-len(curves) // 2)
    head = head.replace(f"0 0 {WIDTH:g} {HEIGHT:g}", f"0 0 {WIDTH:g} {height:g}")
    legend = ""
    for k, name in enumerate(curves):
        x, y = 16 + (k % 2) * WIDTH / 2, HEIGHT + LINE * (k // 2) + 4
        legend += svg.element("circle", cx=x, cy=y - 4, r=4, fill=COLOURS[k]) + svg.text(x + 10, y, name)
    paper = f'<style>{style}</style><rect width="100%" height="100%" fill="white"/>'
    head = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    path.write_text(f"{head}>{paper}{tail.removesuffix('</svg>')}{legend}</svg>\n")
