"""One run of `gradwire bench`, as its JSON document."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def bench(*arguments: str) -> dict[str, Any]:
    """Run it with these arguments; `subprocess.CalledProcessError` if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "bench.json")
        command = [sys.executable, "-m", "gradwire", "bench", *arguments, "--json", str(path)]
        subprocess.run(command, check=True)
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return document
