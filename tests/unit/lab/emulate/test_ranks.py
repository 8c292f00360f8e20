"""What a rank finds in its environment, and what is refused before anything is built."""

import pytest

from gradwire_lab.emulate import EmulatedLink, EmulatedNetwork, counters, ranks, sandbox, why_not
from gradwire_lab.emulate.network import shell_code
from gradwire_lab.emulate.ranks import backend
from gradwire_lab.emulate.topology import MTU_BYTES, burst_bytes, pieces_bytes


def test_every_rank_looks_like_a_node_of_its_own():
    found = ranks.namespace_variables({"GRADWIRE_SANDBOX": "root"}, 2, 4, 29501, "10.0.0.1", "eth0")
    assert found["RANK"] == found["GROUP_RANK"] == "2"
    assert (found["WORLD_SIZE"], found["LOCAL_RANK"], found["LOCAL_WORLD_SIZE"]) == ("4", "0", "1")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("10.0.0.1", "29501")
    assert (found["GLOO_SOCKET_IFNAME"], found["OMP_NUM_THREADS"]) == ("eth0", "1")
    assert "GRADWIRE_SANDBOX" not in found  # a rank may build a sandbox of its own
    assert found["GRADWIRE_COMPILE_FIRST"] == "1"  # or what is timed would be dense at first


def test_what_the_user_has_set_is_kept():
    own = {"OMP_NUM_THREADS": "3", "GRADWIRE_COMPILE_FIRST": "0"}
    assert own.items() <= ranks.backend_variables(own, 0, 1, 1, "/w").items()


def test_outside_of_a_network_there_is_gloo_and_nothing_to_count(monkeypatch):
    monkeypatch.delenv(ranks.INTERFACE_VARIABLE, raising=False)
    monkeypatch.delenv(ranks.WIRE_VARIABLE, raising=False)
    assert backend() == "gloo"
    assert counters() is None


@pytest.mark.parametrize(("workers", "mode"), [(0, "root"), (251, "root"), (2, "auto"), (2, "magic")])
def test_networks_that_cannot_be_are_refused(workers, mode):
    with pytest.raises(ValueError, match="must"):
        EmulatedNetwork(workers, EmulatedLink(), mode)


def test_servers_need_namespaces():
    with pytest.raises(ValueError, match="servers=1: mode backend slows every rank by itself"):
        EmulatedNetwork(2, EmulatedLink(), "backend", servers=1)


def test_a_rank_beyond_the_world_is_refused():
    with EmulatedNetwork(2, EmulatedLink(), "backend") as network, pytest.raises(ValueError, match="rank=2"):
        network.popen(2, ["python", "x.py"])


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="must be one of auto, root, user, backend"):
        sandbox.choose("sudo")


def test_what_is_missing_is_said(monkeypatch, capsys):
    monkeypatch.setattr(sandbox, "find", lambda tool: None)
    why_not.cache_clear()
    try:
        assert sandbox.choose("auto") == "backend"
        assert "unshare, ip, tc" in capsys.readouterr().err
        with pytest.raises(ValueError, match="iproute2"):
            sandbox.choose("root")
    finally:
        why_not.cache_clear()


def test_bursts_hold_a_frame_and_not_two_or_a_millisecond():
    assert MTU_BYTES + 14 <= burst_bytes(1e6) < 2 * MTU_BYTES
    assert burst_bytes(1e9) == 125_000


@pytest.mark.parametrize(
    ("rate", "expected"), [(None, 65_536), (1e9, 65_536), (200e6, 25_000), (144e6, 18_000), (100e6, 65_536)]
)
def test_pieces_are_what_may_leave_at_once_if_that_is_more_than_a_frame(rate, expected):
    assert pieces_bytes(rate) == expected


def test_exit_codes_are_those_of_a_shell():
    assert [shell_code(0), shell_code(3), shell_code(-9)] == [0, 3, 137]
