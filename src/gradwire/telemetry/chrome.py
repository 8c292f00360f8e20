"""The last step as a trace that chrome://tracing and ui.perfetto.dev open.

Source: "Trace Event Format" (the Chromium project), sections "Complete Events" and "Metadata Events". Times
are in microseconds there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from gradwire.environment import write_whole
from gradwire.measure.clock import Span, What

ROWS: tuple[What, ...] = get_args(What)
"""Each kind of span has a row of its own, as spans of several kinds overlap."""


def chrome_trace(spans: Sequence[Span], start_s: float, rank: int) -> dict[str, Any]:
    """A process for the rank, a thread for each kind of span; time 0 is `start_s`.

    Spans on the wire overlap each other, so each unit's has a thread below the others.

    >>> trace = chrome_trace([Span("encode", "unit 3", 10.25, 10.5)], 10.0, rank=0)
    >>> [(each["name"], each["ts"], each["dur"]) for each in trace["traceEvents"] if each["ph"] == "X"]
    [('encode unit 3', 250000.0, 250000.0)]
    """
    rows: dict[str, int] = {what: number for number, what in enumerate(ROWS)}
    events: list[dict[str, Any]] = []
    for span in sorted(spans, key=lambda each: each.start_s):
        row = f"wire {span.unit}" if span.what == "wire" else span.what
        times = {"ts": (span.start_s - start_s) * 1e6, "dur": (span.stop_s - span.start_s) * 1e6}
        name = f"{span.what} {span.unit}".strip()
        thread = rows.setdefault(row, len(rows))
        events.append({"name": name, "cat": span.what, "ph": "X", "pid": rank, "tid": thread, **times})
    named = [_named("process_name", rank, 0, f"gradwire, rank {rank}")]
    named += [_named("thread_name", rank, rows[row], row) for row in rows]
    return {"displayTimeUnit": "ms", "traceEvents": named + events}


def _named(what: str, rank: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": thread, "args": {"name": name}}


def write_trace(path: str | Path, trace: dict[str, Any]) -> None:
    """Write a trace as JSON."""
    write_whole(Path(path), json.dumps(trace) + "\n")
