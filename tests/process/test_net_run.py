"""`gradwire net run` and `gradwire net check` as a user sees them."""

import json

import pytest
from typer.testing import CliRunner

from gradwire_lab import emulate
from gradwire_lab.cli.net import net
from tests.support.command import gradwire
from tests.support.tiers import rest

pytestmark = [pytest.mark.network, pytest.mark.process]


def test_check_says_which_modes_are_possible():
    done = CliRunner().invoke(net, ["check"])
    assert done.exit_code == 0, done.output
    lines = dict(line.split(maxsplit=1) for line in done.output.splitlines())
    assert list(lines) == ["root", "user", "backend"]
    for mode, verdict in lines.items():
        assert verdict.startswith("possible" if emulate.why_not(mode) is None else "not possible: ")


def test_nonsense_is_refused_before_anything_starts():
    done = CliRunner().invoke(net, ["run", "--rate", "fast", "--", "true"])
    assert done.exit_code == 2
    assert "rate='fast'" in done.output


@pytest.mark.parametrize("mode", rest(["auto", "root", "user"], but=["auto"]))
def test_ranks_see_each_other_and_their_bytes_are_counted(tmp_path, mode):
    reason = None if mode == "auto" else emulate.why_not(mode)
    if reason is not None:
        pytest.skip(f"mode {mode} is not possible here: {reason}")
    account = tmp_path / "net.json"
    # No torch here: every rank greets rank 0 with a kilobyte, over the interface that it was told.
    program = (
        "import os, socket\n"
        "rank, host = int(os.environ['RANK']), os.environ['MASTER_ADDR']\n"
        "if rank == 0:\n"
        "    server = socket.create_server((host, 29400))\n"
        "    got = sum(len(server.accept()[0].recv(1000, socket.MSG_WAITALL)) for _ in range(2))\n"
        "    print(got, os.environ['WORLD_SIZE'])\n"
        "else:\n"
        "    for _ in range(200):\n"
        "        try:\n"
        "            socket.create_connection((host, 29400)).send(bytes(1000))\n"
        "            break\n"
        "        except OSError:\n"
        "            __import__('time').sleep(0.05)\n"
    )
    words = ["--mode", mode, "--workers", "3", "--rate", "1mbit", "--json", str(account)]
    done = gradwire("net", "run", *words, "--", "python3", "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "2000 3\n"
    told = json.loads(account.read_text())
    assert (told["workers"], told["rate_bit_per_s"], told["exit_code"]) == (3, 1e6, 0)
    if told["mode"] == "backend":
        return  # ranks have no interfaces of their own, whose bytes could be counted
    received = [rank["rx_bytes"] for rank in told["ranks"]]
    assert 2000 < received[0] < 6000
    assert f"received {received[0]:,} bytes" in done.stderr


@pytest.mark.rest
def test_ranks_of_a_node_share_its_link_and_what_they_send_each_other_does_not_take_it(tmp_path):
    if all(emulate.why_not(mode) is not None for mode in ("root", "user")):
        pytest.skip("no network namespaces here")
    account, far, near = tmp_path / "account.json", 1000, 3_000_000
    program = (
        "import os, socket\n"
        "rank, host = int(os.environ['RANK']), os.environ['MASTER_ADDR']\n"
        "if rank == 0:\n"
        "    server, got = socket.create_server((host, 29400)), []\n"
        "    for _ in range(3):\n"
        "        with server.accept()[0] as peer:\n"
        "            got.append(sum(len(piece) for piece in iter(lambda: peer.recv(65536), b'')))\n"
        "    names = 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'GROUP_RANK', 'GROUP_WORLD_SIZE'\n"
        "    print(sorted(got), *(os.environ[name] for name in names))\n"
        "else:\n"
        f"    size = {near} if os.environ['GROUP_RANK'] == '0' else {far}\n"
        "    for _ in range(200):\n"
        "        try:\n"
        "            with socket.create_connection((host, 29400)) as peer:\n"
        "                peer.sendall(bytes(size))\n"
        "            break\n"
        "        except ConnectionRefusedError:\n"
        "            __import__('time').sleep(0.05)\n"
    )
    words = ["--workers", "4", "--nodes", "2", "--rate", "1mbit", "--json", str(account)]
    done = gradwire("net", "run", *words, "--", "python3", "-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"[{far}, {far}, {near}] 0 2 0 2\n"
    told = json.loads(account.read_text())
    assert (told["workers"], told["nodes"]) == (4, 2)
    # Two messages between nodes, with headers and refused attempts, and nothing of what stays inside.
    assert 2 * far < told["links"][0]["rx_bytes"] < near / 10
    assert 2 * far < told["links"][1]["tx_bytes"] < near / 10


@pytest.mark.rest
def test_nodes_that_ranks_do_not_fill_are_refused():
    done = gradwire("net", "run", "--workers", "4", "--nodes", "3", "--", "true")
    assert done.returncode == 2
    assert "cannot be shared out evenly" in " ".join(done.stderr.split())


@pytest.mark.rest
def test_what_may_leave_at_once_is_handed_over_at_once():
    if all(emulate.why_not(mode) is not None for mode in ("root", "user")):
        pytest.skip("no network namespaces here")
    words = ["--rate", "200mbit", "--workers", "1"]
    done = gradwire("net", "run", *words, "--", "ip", "-d", "link", "show", "eth0")
    assert done.returncode == 0, done.stderr
    assert "gso_max_size 25000" in done.stdout
