"""Where does a step of PowerSGD go, call by call: ours beside torch's hook, on real ranks?

Every call of `torch.distributed` in a step of training is noted, with what it hands in, and when it began and
ended. A rank's messages and bytes follow from the calls by the algorithms that gloo runs: an all-reduce is a
ring, which halves each rank's part, and so sends 4(N-1) messages and 2(N-1)/N of the payload; an all-to-all
sends N-1 messages. "In a row" is the longest chain of calls of which each began after the one before had
ended: the latencies of these add up. What DDP sends by itself (buffers) is not noted.

Nothing here is a time. `gradwire bench --workload convnet --workers 4 --rate 200mbit --recipes
"powersgd(rank=1)" --peers "powersgd_hook(rank=1, bucket_cap_mb=1000)"` measures steps.

    python benchmarks/powersgd_calls.py [--workloads convnet chargpt] [--workers 4] [--rank 1] [--json PATH]
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.lab.workloads.catalogue import workload

DENSE_STEPS, ONE_BUCKET_MB = 2, 1000
TORCH, OURS = "torch's hook", "powersgd"
VERBS = ("all_reduce", "all_to_all_single", "isend", "broadcast")


@dataclass
class Call:
    """One collective or message of this rank: `payload_bytes` are handed in; times are this rank's clock."""

    verb: str
    payload_bytes: int
    start_s: float
    stop_s: float = 0.0

    def messages(self, world: int) -> int:
        """How many this rank sends."""
        return {"all_reduce": 4 * (world - 1), "all_to_all_single": world - 1}.get(self.verb, 1)

    def sent_bytes(self, world: int) -> float:
        """Bytes that this rank sends."""
        share = 2 * (world - 1) / world if self.verb == "all_reduce" else 1.0
        return share * self.payload_bytes


@contextmanager
def noted(calls: list[Call]) -> Iterator[None]:
    """Add to `calls` what is called meanwhile."""

    def noting(verb: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **named: Any) -> Any:
            payload = args[1] if verb == "all_to_all_single" else args[0]
            calls.append(call := Call(verb, payload.nbytes, time.perf_counter()))

            def ended(_future: object) -> None:
                call.stop_s = time.perf_counter()

            work = function(*args, **named)
            if verb != "isend":  # gloo has no future of a message
                work.get_future().add_done_callback(ended)
            return work

        return called

    with ExitStack() as stack:
        for verb in VERBS:
            stack.enter_context(patch.object(dist, verb, noting(verb, getattr(dist, verb))))
        yield


def in_a_row(calls: Sequence[Call]) -> int:
    """The most calls of which each began after the one before had ended."""
    count, free_s = 0, 0.0
    for call in sorted((call for call in calls if call.stop_s), key=lambda call: call.stop_s):
        if call.start_s >= free_s:
            count, free_s = count + 1, call.stop_s
    return count


def torch_hook(ddp: DistributedDataParallel, rank: int) -> None:
    """The peer, as soon as it may start."""
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=DENSE_STEPS
    )
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


ATTACH: dict[str, Callable[[DistributedDataParallel, int], object]] = {
    TORCH: torch_hook,
    OURS: lambda ddp, rank: gradwire.attach(ddp, recipe=f"powersgd(rank={rank}, warmup_steps={DENSE_STEPS})"),
}


def steps_of(name: str, setting: str, arguments: argparse.Namespace) -> list[list[Call]]:
    """The calls of each step, once all is warm."""
    work, group = workload(name), dist.group.WORLD
    model = DistributedDataParallel(work.model(seed=0), bucket_cap_mb=ONE_BUCKET_MB)
    optimizer = work.optimizer(model.parameters())
    ATTACH[setting](model, arguments.rank)
    found, warm = list[list[Call]](), DENSE_STEPS + 3
    for step, batch in enumerate(
        islice(work.batches(dist.get_rank(), dist.get_world_size(), seed=0), warm + arguments.steps)
    ):
        optimizer.zero_grad()
        loss = work.loss(model, batch)
        calls = list[Call]()
        with noted(calls):
            loss.backward()
            dist.barrier(group)  # not noted: until all callbacks have run, calls have no end
        optimizer.step()
        if step >= warm:
            found.append(calls)
    return found


def inside(arguments: argparse.Namespace) -> None:
    """What every rank does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {
        name: {
            setting: [list(map(asdict, step)) for step in steps_of(name, setting, arguments)]
            for setting in ATTACH
        }
        for name in arguments.workloads
    }
    if dist.get_rank() == 0:
        arguments.inside.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def launch(argv: Sequence[str], arguments: argparse.Namespace) -> dict[str, Any]:
    """Ranks on this machine; rank 0's calls."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(arguments.workers), __file__, *argv, "--inside", str(path)]
        subprocess.run(command, check=True)
        document: dict[str, Any] = json.loads(path.read_text())
        return document


def table(name: str, found: dict[str, list[list[Call]]], world: int) -> Table:
    """A line for each call of a step, and their sums."""
    view = Table(title=f"{name}, {world} ranks", box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("", "call", "hands in", "messages", "sends", "in a row"):
        view.add_column(
            head, justify="right" if head in ("hands in", "messages", "sends", "in a row") else "left"
        )
    for setting, steps in found.items():
        kinds = Counter(tuple((call.verb, call.payload_bytes) for call in step) for step in steps)
        if len(kinds) > 1:
            print(f"{name}, {setting}: steps differ in their calls; shown is the last of {len(steps)}")
        step = steps[-1]
        for call in step:
            sent = f"{call.sent_bytes(world):,.0f} B"
            view.add_row("", call.verb, f"{call.payload_bytes:,} B", str(call.messages(world)), sent)
        row = sorted(map(in_a_row, steps))[len(steps) // 2]
        messages, sent = (
            sum(each) for each in zip(*((c.messages(world), c.sent_bytes(world)) for c in step), strict=True)
        )
        view.add_row(
            setting, f"{len(step)} calls", "", str(messages), f"{sent:,.0f} B", str(row), end_section=True
        )
    return view


def main() -> None:
    """Count, print, and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", default=["convnet", "chargpt"])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rank", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(arguments)
        return
    found = launch(sys.argv[1:], arguments)
    for name, settings in found.items():
        steps = {key: [[Call(**call) for call in step] for step in of] for key, of in settings.items()}
        Console().print(table(name, steps, arguments.workers))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
