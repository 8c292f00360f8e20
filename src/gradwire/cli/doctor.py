"""`gradwire doctor`: what gradwire finds on this machine, for issue reports."""

from __future__ import annotations

import os
import platform
import socket
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.cli.main import COMMANDS
from gradwire.cli.prerequisites import FORMAT, STDOUT, check_folder, write_json
from gradwire.environment import require_torch
from gradwire.version import described

_ON_GPUS = "device; host for recipes that read numbers there, and with placement='host'"
"""Where memory and codecs are for gradients on a GPU."""


def doctor(
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write JSON; - prints nothing else.")
    ] = None,
) -> None:
    """Say what gradwire finds on this machine and would use, for issue reports. Sends and changes nothing.

    The exit code is 1 if something is missing that training with gradwire needs.
    """
    try:
        check_folder(json_path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    found = findings()
    lacking = found["lacking"]
    if str(json_path) != STDOUT:
        for name, value in found["facts"].items():
            print(f"{name:19} {value}")
        print()
        print("\n".join(f"lacking: {each}" for each in lacking) or "nothing is lacking")
    write_json({"format": FORMAT, **found}, json_path)
    raise typer.Exit(1 if lacking else 0)


def findings() -> dict[str, Any]:
    """`facts` by name, in words, and what is `lacking`, a sentence each."""
    facts = {
        "gradwire": described(),
        "python": f"{platform.python_version()}, {platform.platform()}",
        "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} for this process",
    }
    lacking: list[str] = []
    for part in (_torch, _kernels, _interfaces):
        try:
            more, reasons = part()
        except ImportError as error:
            more, reasons = {}, [str(error)]
        facts |= more
        lacking += reasons
    facts["triton"] = _version("triton")
    for mode, verdict in import_module(COMMANDS["net"]).modes().items():
        facts[f"network, {mode}"] = verdict
    for name in ("lightning", "accelerate", "transformers", "torchft"):
        facts[name] = _version(name)
    return {"facts": facts, "lacking": lacking}


def _torch() -> tuple[dict[str, str], list[str]]:
    require_torch()
    import torch
    import torch.distributed as dist

    there = dist.is_available()
    gloo, nccl = (there and dist.is_gloo_available(), there and dist.is_nccl_available())
    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())] if cuda else []
    facts = {
        "torch": torch.__version__,
        "torch threads": str(torch.get_num_threads()),
        "gloo": _is(gloo, "for tensors on the CPU, and for what ranks agree on"),
        "nccl": _is(nccl, "for tensors on GPUs"),
        "CUDA": ", ".join(devices) or "no device",
        "placement": _ON_GPUS if devices else "host",
    }
    return facts, [] if gloo else ["torch was built without gloo, over which gradwire sends"]


def _kernels() -> tuple[dict[str, str], list[str]]:
    from gradwire.kernels.cpu.cache import places, writable

    folder = writable()
    if folder is None:
        tried = ", ".join(map(str, places()))
        state = f"in memory only, compiled anew by each process: nothing can be written to {tried}"
    else:
        files = list(folder.glob("*")) if folder.is_dir() else []
        size = sum(each.stat().st_size for each in files if each.is_file())
        state = f"{folder}, {len(files)} files, {size / 1e6:.1f} MB"
    return {"numba": _version("numba"), "kernel cache": state}, []


def _interfaces() -> tuple[dict[str, str], list[str]]:
    """Addresses and rates of network interfaces, and the address at which gloo would listen."""
    from gradwire.members.address import is_loopback, own_address

    found = {}
    for _number, name in socket.if_nameindex():
        with suppress(OSError, ValueError):  # it has no address
            found[name] = own_address(name)
    facts = {f"interface {name}": f"{address}, {_rate(name)}" for name, address in found.items()}
    asked, host = os.environ.get("GLOO_SOCKET_IFNAME", ""), socket.gethostname()
    try:
        address = own_address(asked.partition(",")[0] or host)
        why = f"by GLOO_SOCKET_IFNAME={asked}" if asked else f"of the host name {host}"
    except (OSError, ValueError):
        if asked:
            return facts | {"gloo's address": "none"}, [f"GLOO_SOCKET_IFNAME={asked}: no address is there"]
        address, why = "127.0.0.1", f"as the host name {host} has no address of this machine"
    others = [name for name, other in found.items() if not is_loopback(other)]
    if is_loopback(address) and others:
        why += f". No other machine reaches it: set GLOO_SOCKET_IFNAME to {' or '.join(others)}"
    return facts | {"gloo's address": f"{address}, {why}"}, []


def _rate(interface: str) -> str:
    """As the driver tells it, which virtual ones do not."""
    try:
        megabits = int(Path(f"/sys/class/net/{interface}/speed").read_text())
    except (OSError, ValueError):
        megabits = -1
    return f"{megabits} Mbit/s" if megabits > 0 else "rate unknown"


def _is(there: bool, use: str) -> str:
    return f"available, {use}" if there else "not available"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
