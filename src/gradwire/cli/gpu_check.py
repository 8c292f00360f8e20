"""`gradwire probe --check`: does this transport, on these devices, do what gloo does on the CPU?"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel

from gradwire import attach
from gradwire.comm import Comm, ProcessGroupComm, gathered
from gradwire.kernels import compiler
from gradwire.measure.probe import table_of
from gradwire.tools.crosscheck import CPU, Case, Compared, crosscheck, recipe_cases, verb_cases
from gradwire.version import described

_TIMEOUT = default_pg_timeout / 60
"""Of every group: 30 seconds."""
_SHAPES = ((64, 96), (96,), (33, 127))
_TRAINED = ("dense", "int8", "topk(ratio=0.05)")


def check() -> int:
    """Check and print, on the ranks that torchrun has started; 0 if all is well on all ranks, else 1."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    try:
        oracle, control = _comm("gloo"), _comm("gloo")
        where, why_not = _where(control)
        # Before anything is compared, kernels are compiled, and torch imports what an optimizer needs.
        compiler.prepare(compiler.every(), turn=control.rank)
        _trained("dense", oracle, CPU)
        # NCCL cannot be ended while its collectives hang; torch ends the process after the timeout.
        comm = _comm("gloo" if where == CPU else "nccl")
        own = [case for case in verb_cases() if "/" in case.name]
        library = [case for case in verb_cases() if "/" not in case.name]
        training = [_training(text, where) for text in _TRAINED]
        cases = [*library, *training, *recipe_cases(where), *own]
        begins = partial(_progress, control.rank)
        found = list(crosscheck(cases, comm, where, oracle, control, begins=begins))
        if where != CPU:
            found.append(on_one_gpu([int(row[0]) for row in table_of(control, [contexts(os.getpid())])]))
        names = _names(control, where)
        if control.rank == 0:
            print(block(found, names, where, why_not))
        return int(any(each.fault for each in found))
    finally:
        dist.destroy_process_group()


def _comm(backend: str) -> ProcessGroupComm:
    """Comm over a new process group of `backend`, with all ranks. A collective."""
    group = dist.new_group(backend=backend, timeout=_TIMEOUT)
    assert isinstance(group, dist.ProcessGroup)
    return ProcessGroupComm(group)


def _where(control: Comm) -> tuple[torch.device, str]:
    """(Device to check, reason): this rank's GPU if every rank has one of its own, else the CPU.

    The reason is empty for a GPU. A collective.
    """
    local, here = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    least, most = (pick(row[0] - row[1] for row in table_of(control, [count, here])) for pick in (min, max))
    if least < 0:
        none = most < 0 and count == 0
        reason = "torch finds no CUDA device" if none else "some ranks have no GPU of their own"
        return CPU, f"no device was checked: {reason}"
    torch.cuda.set_device(local)
    return torch.device("cuda", local), ""


def _progress(rank: int, name: str) -> None:
    """Print the name of the case that begins, on rank 0. If the check hangs, the last line names the case."""
    if rank == 0:
        print(f"checking {name}", file=sys.stderr, flush=True)


class _Products(nn.Module):
    """Model with output Σ p·x, so that its gradients are exactly the inputs x, on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList(
            nn.Parameter(torch.zeros(shape, dtype=torch.float32, device="cpu")) for shape in _SHAPES
        )

    def forward(self, *given: Tensor) -> Tensor:
        return torch.stack([(p * x).sum() for p, x in zip(self.factors, given, strict=True)]).sum()


def _training(text: str, where: torch.device) -> Case:
    """Case that trains an attached model for three steps with recipe `text`, on the device and on the CPU."""
    return Case(f"training, {text}", partial(_trained, text), exact=True, shared=True)


def _trained(text: str, comm: Comm, where: torch.device) -> Tensor:
    """All parameters after three steps of SGD, whose rate is a power of two and so rounds nothing."""
    assert isinstance(comm, ProcessGroupComm)
    ddp = DistributedDataParallel(_Products().to(where), process_group=comm.group)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    wire = attach(ddp, optimizer, text)
    for step in range(3):
        draw = torch.Generator().manual_seed(100 * comm.rank + step)
        optimizer.zero_grad()
        ddp(
            *(
                torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu").to(where)
                for shape in _SHAPES
            )
        ).backward()
        optimizer.step()
    wire.detach()
    return torch.cat([p.detach().reshape(-1) for p in ddp.parameters()])


def contexts(process: int) -> int:
    """On how many GPUs the driver knows a process; 0 where it does not say, as inside some containers."""
    if find_spec("pynvml") is None:
        return 0
    nvml: Any = import_module("pynvml")
    try:
        nvml.nvmlInit()
        gpus = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        known = [{each.pid for each in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)} for gpu in gpus]
    except nvml.NVMLError:
        return 0
    return sum(process in each for each in known)


def on_one_gpu(counts: Sequence[int]) -> Compared:
    """A line on the ranks' numbers of contexts. Each takes some 500 MB of a GPU; a second one is a fault.

    >>> on_one_gpu([1, 2]).fault
    'rank 1 also takes memory of a GPU that is not its own'
    """
    more = [str(rank) for rank, count in enumerate(counts) if count > 1]
    if more:
        fault = f"rank {', '.join(more)} also takes memory of a GPU that is not its own"
        return Compared("contexts", fault, fault)
    return Compared(
        "contexts", "each rank on its own GPU" if min(counts) > 0 else "skipped: NVML does not say"
    )


_NAME_BYTES = 64


def _names(control: Comm, where: torch.device) -> list[str]:
    """Name of the device of every rank, by rank. A collective."""
    name = "CPU" if where == CPU else torch.cuda.get_device_name(where)
    text = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES)
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    out = gathered(control, mine)
    return [bytes(row.tolist()).decode(errors="replace").strip() for row in out]


def block(found: Sequence[Compared], names: Sequence[str], where: torch.device, why_not: str) -> str:
    """A block of Markdown for an issue: versions, devices, a table and a verdict.

    Args:
        found: results of the cases, in the order of the table; at least one.
        names: device of every rank.
        where: device of the tensors; the CPU stands for gloo, else for NCCL.
        why_not: why GPUs were not checked; empty if they were.
    """
    nccl: Any = torch.cuda.nccl  # its functions have no types
    transport = "gloo" if where == CPU else f"NCCL {'.'.join(map(str, nccl.version()))}"
    faults = [each.name for each in found if each.fault]
    verdict = "all as with gloo on the CPU" if not faults else f"{len(faults)} faults: {', '.join(faults)}"
    width = max(len(each.name) for each in found)
    lines = [
        "```",
        f"gradwire {described()}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"CUDA {torch.version.cuda}, {platform.platform()}",
        f"{len(names)} ranks over {transport}: {', '.join(names)}",
        *([why_not] if why_not else []),
        *(f"{each.name:<{width}}  {each.seconds:6.2f} s  {each.said}" for each in found),
        f"verdict: {verdict}" + (f"; {why_not}" if why_not else ""),
        "```",
    ]
    return "\n".join(lines)
