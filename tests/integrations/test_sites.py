"""Sites by torchft's lighthouse: of several ranks; beside a run; that are told to end while they wait."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from torchft.coordination import LighthouseServer

import gradwire
from gradwire.errors import TransportError
from gradwire.members.base import Card
from tests.integrations.sites import trained
from tests.support.notes import notes_in
from tests.support.ranks import FORKED

GUARD_S = 100.0
CARD = Card(terms={"recipe": "int4"}, address="127.0.0.1:1", rounds=3, number=7, established=True)


def opened(port: int = 0, at_least: int = 2, grace_s: float = 0.5, dead_s: float = 3.0) -> tuple[Any, str]:
    """A lighthouse, and its URL; at `port` as soon as the one before has let go of it."""
    until_s, server = time.monotonic() + GUARD_S, None
    while server is None:
        try:
            server = LighthouseServer(
                bind=f"127.0.0.1:{port}",
                min_replicas=at_least,
                join_timeout_ms=round(1e3 * grace_s),
                heartbeat_timeout_ms=round(1e3 * dead_s),
            )
        except RuntimeError:
            assert time.monotonic() < until_s
            time.sleep(0.02)
    return server, f"http://127.0.0.1:{server.address().rpartition(':')[2].strip('/')}"


class Sites:
    """Processes of sites, and what they have noted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[tuple[str, int], Any] = {}

    def start(self, url: str, name: str, rounds: int, **options: Any) -> None:
        """All ranks of a site."""
        for rank in range(1 if "kind" not in options else 2):
            process = FORKED.Process(
                target=trained, args=(url, name, self._folder, rounds), kwargs=options | {"rank": rank}
            )
            process.start()
            self._processes[name, rank] = process

    def notes(self, name: str, rank: int = 0) -> list[dict[str, Any]]:
        return notes_in(self._folder / f"{name}.{rank}.jsonl")

    def wait_for(self, name: str, key: str, least: int = 0) -> None:
        until_s = time.monotonic() + GUARD_S
        while not any(each.get(key, -1) >= least for each in self.notes(name)):
            assert time.monotonic() < until_s, f"{name} is at {self.notes(name)[-1:]}"
            time.sleep(0.02)

    def signal(self, name: str, number: signal.Signals) -> None:
        for (of, _rank), process in self._processes.items():
            if of == name:
                os.kill(process.pid, number)

    def codes(self) -> dict[tuple[str, int], int | None]:
        for process in self._processes.values():
            process.join(GUARD_S)
        return {which: process.exitcode for which, process in self._processes.items()}

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()

    def check(self, *names: str, ranks: int = 1) -> None:
        """Shared parameters are the same for all that have noted as many rounds, rank for rank."""
        for rank in range(ranks):
            shared: dict[int, Any] = {}
            for name in names:
                for each in self.notes(name, rank):
                    if "rounds" in each:
                        assert shared.setdefault(each["rounds"], each["shared"]) == each["shared"]
            assert shared


@pytest.fixture
def sites(tmp_path: Path) -> Iterator[Sites]:
    made = Sites(tmp_path)
    yield made
    made.end()


def test_sites_of_two_ranks_by_ddp_meet_and_wait_longer_than_their_own_group_s_limit(sites: Sites) -> None:
    server, url = opened()
    sites.start(url, "a", 4, kind="ddp", group_s=4.0)
    sites.wait_for("a", "asks")
    time.sleep(9.0)
    sites.start(url, "b", 4, kind="ddp", group_s=60.0)
    assert set(sites.codes().values()) == {0}
    sites.check("a", "b", ranks=2)
    assert sites.notes("a")[-1]["members"] == ["a", "b"]
    server.shutdown()


def test_sites_of_two_ranks_by_fsdp2_meet(sites: Sites) -> None:
    server, url = opened()
    sites.start(url, "a", 4, kind="fsdp2")
    sites.start(url, "b", 4, kind="fsdp2")
    assert set(sites.codes().values()) == {0}
    sites.check("a", "b", ranks=2)
    server.shutdown()


def test_a_rank_that_fails_ends_its_own_site_and_the_other_site_goes_on(sites: Sites) -> None:
    server, url = opened(at_least=1)
    sites.start(url, "a", 6, kind="ddp", pause_s=0.2)
    sites.wait_for("a", "asks")
    sites.start(url, "w", 20, kind="ddp", breaks_at=2)
    codes = sites.codes()
    assert codes == {("a", 0): 0, ("a", 1): 0, ("w", 0): 1, ("w", 1): 1}
    assert sites.notes("w", 1)[-1]["error"] == "MemoryError: no memory"
    assert "ranks [1] of this replica have failed" in sites.notes("w", 0)[-1]["error"]
    server.shutdown()


@pytest.mark.parametrize("kind", ["one rank", "ddp"])
def test_a_site_that_waits_for_a_quorum_hears_a_signal(sites: Sites, kind: str) -> None:
    server, url = opened()
    sites.start(url, "a", 4, **({"kind": kind} if kind == "ddp" else {}))
    sites.wait_for("a", "asks")
    time.sleep(3.0)
    sites.signal("a", signal.SIGTERM)
    assert set(sites.codes().values()) == {7}
    server.shutdown()


def test_newcomers_beside_a_run_that_is_between_rounds_are_healed_from_it(sites: Sites) -> None:
    server, url = opened(at_least=1)
    sites.start(url, "c", 6, pause_s=4.0)
    sites.wait_for("c", "rounds", 2)
    sites.start(url, "a", 6)
    sites.start(url, "b", 6)
    assert set(sites.codes().values()) == {0}
    of_c = {each["rounds"]: each["shared"] for each in sites.notes("c") if "rounds" in each}
    for name in "ab":
        (begun,) = (each for each in sites.notes(name) if "begun" in each)
        assert begun["begun"] >= 2
        assert begun["shared"] == of_c[begun["begun"]]
    server.shutdown()


WATCH = """
import sys, time, urllib.request
for _ in range(40):
    page = urllib.request.urlopen(sys.argv[1] + "/status", timeout=60).read().decode()
    print("dead" if "site-a" in page.partition("old")[2] else "lives", flush=True)
    time.sleep(0.1)
"""


def test_heartbeats_need_no_interpreter() -> None:
    server, url = opened(at_least=1, dead_s=2.0)
    member = gradwire.members.torchft(url, "site-a", quorum_s=60)
    member.ask(CARD)
    with subprocess.Popen([sys.executable, "-c", WATCH, url], stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        seen = [watch.stdout.readline().strip()]
        ctypes.PyDLL(None).sleep(8)  # holds the interpreter, as compiling does
        seen += watch.stdout.read().split()
    assert set(seen) == {"lives"}
    member.close()
    server.shutdown()


def test_after_a_lighthouse_has_started_again_all_that_live_are_in_the_next_roster() -> None:
    server, url = opened(at_least=4, grace_s=30.0)
    all_ = [gradwire.members.torchft(url, name, quorum_s=GUARD_S) for name in "abcd"]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda each: each.ask(CARD), all_))
        for _ in range(3):
            waiting = [threads.submit(each.ask, CARD) for each in all_[:2]]
            server.shutdown()
            server, _url = opened(int(url.rpartition(":")[2]), grace_s=30.0)
            waiting += [threads.submit(each.ask, CARD) for each in all_[2:]]
            for each in waiting:
                assert {entry.name for entry in each.result().entries} == set("abcd")
    for each in all_:
        each.close()
    server.shutdown()


def test_a_wait_without_a_lighthouse_ends_at_its_limit() -> None:
    server, url = opened()
    alone = gradwire.members.torchft(url, "site-a", quorum_s=4.0)
    server.shutdown()
    start_s = time.monotonic()
    with pytest.raises(TransportError, match=r"no quorum at .* in 4 s"):
        alone.ask(CARD)
    assert time.monotonic() - start_s > 3.5  # not how much longer: the machine may be busy
    alone.close()
