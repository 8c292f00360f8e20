"""`docs/two-machines.md` in two network namespaces, each with a host name and a loopback of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from gradwire_lab import emulate
from gradwire_lab.emulate.kernel import find
from tests.support.source import ROOT

pytestmark = [
    pytest.mark.network,
    pytest.mark.process,
    pytest.mark.rest,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        emulate.why_not("root") is not None, reason=f"no namespaces: {emulate.why_not('root')}"
    ),
]
ADDRESSES = ("10.201.77.1", "10.201.77.2")
PORT, PORTS = 29500, (40000, 40999)
LINE = [
    sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
    "--master-addr", ADDRESSES[0], "--master-port", str(PORT),
]  # fmt: skip


def ip(*words: str) -> None:
    subprocess.run([find("ip") or "ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def machines() -> Iterator[list[str]]:
    """Names of two namespaces, joined by a cable; new connections take ports of a small range."""
    names = [f"gw{os.getpid()}{letter}" for letter in "ab"]
    with ExitStack() as held:
        for name in names:
            ip("netns", "add", name)
            held.callback(ip, "netns", "del", name)  # takes the cable along
        ip(
            "link",
            "add",
            "eth0",
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            names[1],
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            for each in ("eth0", "lo"):
                ip("-n", name, "link", "set", each, "up")
            ports = f"echo {PORTS[0]} {PORTS[1]} > /proc/sys/net/ipv4/ip_local_port_range"
            ip("netns", "exec", name, "sh", "-c", ports)
        yield names


def started(machine: str, command: Sequence[str], **variables: str) -> subprocess.Popen[str]:
    """In a namespace, under its name as host name."""
    named = ["unshare", "--uts", "sh", "-c", f'hostname {machine} && exec "$@"', "sh", *command]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1", **variables}
    environment.pop("GLOO_SOCKET_IFNAME" if "GLOO_SOCKET_IFNAME" not in variables else "", None)
    return subprocess.Popen(
        [find("ip") or "ip", "netns", "exec", machine, *named],
        cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def run(machines: Sequence[str], *words: str) -> list[str]:
    """What torchrun prints on each machine, with a number each."""
    ranks = [
        started(machine, [*LINE, "--node-rank", str(number), *words], GLOO_SOCKET_IFNAME="eth0")
        for number, machine in enumerate(machines)
    ]
    try:
        with ThreadPoolExecutor(len(ranks)) as pool:
            said = list(pool.map(lambda rank: rank.communicate(timeout=280)[0], ranks))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return said


def test_two_machines_train_and_listen_only_at_ports_of_the_range(machines: list[str]) -> None:
    told = []
    for said in run(machines, "-m", "tests.process.two_machines"):
        [line] = re.findall(r"^TOLD (.*)$", said, re.MULTILINE)
        told.append(json.loads(line))
    assert [each["host"] for each in told] == machines
    assert [each["step"] for each in told] == [20, 20]
    assert told[0]["digest"] == told[1]["digest"]
    for each, address in zip(told, ADDRESSES, strict=True):
        ports = {port for _address, port in each["listening"]}
        assert ports - {PORT}, "gloo listens"
        assert all(PORTS[0] <= port <= PORTS[1] for port in ports - {PORT}), each["listening"]
        assert any(where == address and port != PORT for where, port in each["listening"])


def test_the_link_is_measured_and_a_script_is_advised_on_two_machines(
    machines: list[str], tmp_path: Path
) -> None:
    words = ["-m", "gradwire", "probe", "--verbs", "all_reduce", "--budget", "0.5"]
    assert re.search(r"bit/s", run(machines, *words)[0])
    script = ["tests/process/advised_script.py", str(tmp_path)]
    answer = run(machines, "-m", "gradwire", "advise", *script)[0]
    assert "bound by" in answer


@pytest.mark.parametrize("interface", ["", "eth0"])
def test_the_doctor_names_interfaces_and_the_address_that_gloo_takes(
    machines: list[str], interface: str
) -> None:
    given = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    said, _ = started(machines[0], [sys.executable, "-m", "gradwire", "doctor"], **given).communicate(
        timeout=200
    )
    facts = dict(re.findall(r"^(\S.{18}) (.*)$", said, re.MULTILINE))
    facts = {name.strip(): value for name, value in facts.items()}
    assert facts["interface eth0"].startswith(f"{ADDRESSES[0]}, ")
    address = facts["gloo's address"]
    if interface:
        assert address == f"{ADDRESSES[0]}, by GLOO_SOCKET_IFNAME=eth0"
    else:
        assert address.startswith("127.0.0.1, as the host name ")
        assert address.endswith("No other machine reaches it: set GLOO_SOCKET_IFNAME to eth0")
