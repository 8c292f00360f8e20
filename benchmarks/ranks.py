"""Ranks of a benchmark on an emulated network: the program itself once more, with `--out`."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gradwire.lab import emulate


def told_by_ranks(workers: int, rate: str, delay: str = "0", nodes: int | None = None) -> Any:
    """Start this program's ranks with its own options and `--out FILE`; the JSON that rank 0 writes there.

    `rate` and `delay` (one way) are those of each rank's link, or with `nodes` of each node's, as
    `gradwire net` reads them. Raises `RuntimeError` if a rank fails.
    """
    link = emulate.EmulatedLink(emulate.parse_rate(rate), emulate.parse_delay(delay))
    mode = emulate.enter("auto")
    with (
        tempfile.TemporaryDirectory() as folder,
        emulate.EmulatedNetwork(workers, link, mode, nodes) as network,
    ):
        out = Path(folder, "told.json")
        command = [sys.executable, *sys.argv, "--out", str(out)]
        ranks: list[subprocess.Popen[Any]] = [network.popen(rank, command) for rank in range(workers)]
        codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}")
        return json.loads(out.read_text(encoding="utf-8"))
