"""Notes that a process adds to a file, a JSON object a line, and that a test reads at the same time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def notes_in(path: Path) -> list[dict[str, Any]]:
    """The notes that are there. A line without an end is being written, or was when its writer was killed."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]
