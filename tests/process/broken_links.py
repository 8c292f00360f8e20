"""Ranks behind a line that fails, in network namespaces: what each of them raises, and what they end with.

    python -m tests.process.broken_links OUT.json '{"what": "flip", "every": 5, "after": 20}' [--steps 30]
    [--no-checksums] [--workers 2] [--recipe TEXT] [--timeout-s 60]

`tests.support.damaging_relay` says what may happen to the line. Prints nothing; OUT.json gets what each rank
found, and "acts", what the line did.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire_lab import emulate
from gradwire_lab.emulate import kernel, relay, topology
from tests.support.models import batch, digest, optimizer_of, perceptron


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Take steps until `steps` have counted; one that was damaged is taken again."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=options.timeout_s))
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, options.recipe, nodes=None, checksums=options.checksums)
    dist.barrier()
    raised: list[list[str]] = []
    ended, number, began_s = "", 0, 0.0
    while number < options.steps and not ended:
        inputs, targets = batch(number)
        optimizer.zero_grad()
        began_s = time.monotonic()
        try:
            nn.functional.mse_loss(ddp(inputs), targets).backward()
        except (gradwire.WireError, gradwire.PeerFailed) as error:
            raised.append([str(number), type(error).__name__])
        except Exception as error:
            ended = f"{type(error).__name__}: {error}"
        else:
            optimizer.step()
            number += 1
    return {
        "raised": raised,
        "ended": ended,
        "ended_after_s": time.monotonic() - began_s,
        "steps": number,
        "counted": wire.report().step,
        "digest": digest(ddp),
    }


def rank_main(options: argparse.Namespace) -> None:
    """One rank, which writes what it has found."""
    found = train(options)
    Path(f"{options.out}.{dist.get_rank()}").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


def _without_netem(tool: str, lines: Sequence[str]) -> None:
    """The kernel has none."""
    if any("netem" in line for line in lines):
        raise kernel.ToolFailed("no netem")
    kernel.batch(tool, lines)


def launch(options: argparse.Namespace) -> None:
    """The line, its ranks, and what came of them."""
    entered = emulate.enter("auto")
    with tempfile.TemporaryDirectory() as folder:
        log, out = Path(folder, "log"), Path(folder, "out")
        log.touch()
        damage = {**json.loads(options.damage), "log": str(log)}
        os.environ |= {"DAMAGE": json.dumps(damage), "RELAY": str(relay.__file__)}
        relay.__file__ = str(Path(__file__).parents[1] / "support" / "damaging_relay.py")
        # Packets pass through a relay only where the kernel cannot delay them itself.
        topology.batch = _without_netem
        with emulate.EmulatedNetwork(options.workers, emulate.EmulatedLink(None, 1e-4), entered) as network:
            command = [sys.executable, "-m", "tests.process.broken_links", str(out), "{}", "--rank"]
            command += ["--steps", str(options.steps), "--recipe", options.recipe]
            command += ["--timeout-s", str(options.timeout_s)]
            command += [] if options.checksums else ["--no-checksums"]
            ranks = [network.popen(rank, command) for rank in range(options.workers)]
            codes = [rank.wait() for rank in ranks]
        paths = [Path(f"{out}.{rank}") for rank in range(options.workers)]
        found = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
        acts = Counter(log.read_text().splitlines())
    Path(options.out).write_text(json.dumps({"ranks": found, "codes": codes, "acts": acts}))


def main() -> None:
    """A rank, or the launcher of all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out")
    parser.add_argument("damage")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--recipe", default="topk(ratio=0.5)")
    parser.add_argument("--timeout-s", type=float, default=60.0)
    parser.add_argument("--checksums", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    (rank_main if options.rank else launch)(options)


if __name__ == "__main__":
    main()
