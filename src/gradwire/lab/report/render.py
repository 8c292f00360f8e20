"""Fills the page's template."""

from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from gradwire.lab.bench.modes import mode_text
from gradwire.lab.bench.units import bytes_text, ratio_text, seconds_text
from gradwire.lab.demo.plan import TARGET_CCR
from gradwire.lab.demo.summary import final_figures, headline, lead, link_text, tiles
from gradwire.lab.report import pictures

_LEGEND = (("data", "loading data"), ("forward", "forward"), ("backward", "backward"))
_STEP_LEGEND = (*_LEGEND, ("wait", "waiting for the network"), ("optimizer", "optimizer"))
_TIMELINE_LEGEND = (("backward", "computing gradients"), ("encode", "encoding"), ("decode", "decoding"))
_SPAN_LEGEND = (*_TIMELINE_LEGEND, ("wire", "on the wire"), ("wait", "waiting"))


def render(document: dict[str, Any]) -> str:
    """One HTML page without external requests: style and pictures are inside.

    >>> from pathlib import Path
    >>> Path("report.html").write_text(render(document), encoding="utf-8")  # doctest: +SKIP
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"seconds": seconds_text, "bytes": bytes_text, "ratio": ratio_text}
    template = environment.from_string(_resource("report.html.j2"))
    drawn = {
        name: Markup(getattr(pictures, name)(document))
        for name in ("loss_over_time", "loss_over_steps", "step_parts", "step_timeline", "bytes_beside")
    }
    return template.render(
        document,
        style=Markup(_resource("report.css")),
        pictures=drawn,
        headline=headline(document),
        lead=lead(document),
        target_ccr=TARGET_CCR,
        tiles=tiles(document),
        figures=final_figures(document),
        link=link_text(document),
        mode=mode_text(document["settings"]["mode"]),
        step_legend=_STEP_LEGEND,
        span_legend=_SPAN_LEGEND,
        projected=any(
            course["seed"] == 0 and course["shaped"] < len(course["step_s"]) for course in document["courses"]
        ),
    )


def _resource(name: str) -> str:
    return resources.files("gradwire.lab.report").joinpath(name).read_text(encoding="utf-8")
