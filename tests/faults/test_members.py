"""Members as processes that are killed, stopped and started again, by a lighthouse of our own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gradwire_lab import emulate
from tests.faults.scenes_members import ALONE, EVERY, trained
from tests.support.lighthouse import Lighthouse
from tests.support.notes import notes_in
from tests.support.ranks import FORKED, ROOT
from tests.unit.members.test_lighthouse import has_ipv6

pytestmark = pytest.mark.process

GUARD_S = 60.0
QUORUM_S = 5.0
TIMEOUT_S = 15.0
"""Limit of gloo's waits, where a test waits until they have ended."""


class Site:
    """The processes of a play, by name."""

    def __init__(self, folder: Path, lighthouse: Lighthouse | None = None) -> None:
        self.folder, self.lighthouse = folder, lighthouse
        self.processes: dict[str, Any] = {}

    def start(
        self, name: str, rounds: int, recipe: str = "int4", pause_s: float = 0.0, **options: Any
    ) -> None:
        assert self.lighthouse is not None
        told = (self.lighthouse.port, name, self.folder, rounds, recipe, options, pause_s)
        self.processes[name] = process = FORKED.Process(target=trained, args=told, daemon=True)
        process.start()

    def notes(self, name: str) -> list[dict[str, Any]]:
        return notes_in(self.folder / f"{name}.jsonl")

    def rounds(self, name: str) -> int:
        """The last round that a member has noted."""
        return max((each.get("rounds", 0) for each in self.notes(name)), default=0)

    def wait_for(self, name: str, rounds: int) -> None:
        """Until a member has noted so many rounds."""
        self.wait_for_a_note(name, lambda each: each.get("rounds", 0) >= rounds)

    def wait_for_a_note(self, name: str, is_it: Callable[[dict[str, Any]], bool]) -> None:
        """Until a member has noted that."""
        until_s = time.monotonic() + GUARD_S
        while not any(is_it(each) for each in self.notes(name)):
            assert time.monotonic() < until_s, f"{name} is at {self.notes(name)[-1:]}"
            time.sleep(0.02)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].join()

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self.processes[name].pid, number)

    def end(self, *names: str) -> None:
        for name in names:
            self.processes[name].join(GUARD_S)
            assert self.processes[name].exitcode == 0, (name, self.notes(name)[-1:])

    def error(self, name: str) -> str:
        """The one with which a member has ended."""
        self.processes[name].join(GUARD_S)
        assert self.processes[name].exitcode == 1
        [found] = [each["error"] for each in self.notes(name) if "error" in each]
        return str(found)

    def warned(self, name: str) -> str:
        return "\n".join(text for each in self.notes(name) for text in each.get("warned", ()))

    def check(self, names: Iterable[str] = ()) -> dict[int, str]:
        """Shared parameters by rounds: the same for all that noted as many."""
        shared: dict[int, str] = {}
        for name in names or self.processes:
            for each in self.notes(name):
                if "rounds" in each:
                    assert shared.setdefault(each["rounds"], each["shared"]) == each["shared"], each["rounds"]
        return shared

    def events(self, name: str) -> list[tuple[str, tuple[str, ...]]]:
        [found] = [each["events"] for each in self.notes(name) if "events" in each]
        return [(what, tuple(who)) for what, who, _seconds, _bytes in found]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    lighthouse = Lighthouse(at_least=2)
    made = Site(tmp_path, lighthouse)
    yield made
    for process in made.processes.values():
        process.kill()
        process.join()
    lighthouse.close()


def test_a_killed_member_is_left_out_and_comes_back_healed(site: Site) -> None:
    for name in "abc":
        site.start(name, rounds=14, pause_s=0.1)
    site.wait_for("b", 3)
    site.kill("b")
    site.wait_for("a", 5)
    site.start("b", rounds=14, pause_s=0.1)
    site.end("a", "b", "c")
    shared = site.check()
    assert len(set(shared.values())) == len(shared)
    begun = [each["begun"] for each in site.notes("b") if "begun" in each]
    assert begun[0] < 3  # two that meet before the third one begin without it
    assert begun[1] >= 5
    assert ("left", ("b",)) in site.events("a")
    assert ("healed", ("b",)) in site.events("a") + site.events("c")
    last = [each["own"] for name in "abc" for each in site.notes(name) if each.get("rounds") == 14]
    assert len(last) == 3
    assert len(set(last)) == 1  # the newcomer counts, and lands what the others land


def test_a_member_whose_parameters_stay_not_finite_ends_alone(site: Site) -> None:
    for name in "ab":
        site.start(name, rounds=12, pause_s=0.1)
    site.wait_for("a", 1)
    site.start("w", rounds=12, pause_s=0.1, nan=True)
    assert "was not finite in 3 rounds in a row" in site.error("w")
    site.end("a", "b")
    assert max(site.check("ab")) == 12
    assert ("left", ("w",)) in site.events("a")


@pytest.mark.rest
def test_a_member_that_is_healed_forgets_the_round_that_was_under_way_in_its_save(site: Site) -> None:
    for name in "abc":
        site.start(name, rounds=30, pause_s=0.2, delay=2, saves_under_way=name == "c")
    site.wait_for_a_note("c", lambda each: each.get("saved", 0) >= 3)
    site.kill("c")
    site.wait_for("a", site.rounds("a") + 3)
    site.start("c", rounds=30, pause_s=0.2, delay=2, saves_under_way=True)
    site.end("a", "b", "c")
    site.check()
    assert "without a result" not in site.warned("c")


@pytest.mark.rest
@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_members_meet_at_addresses_of_ipv6(site: Site) -> None:
    for name in "ab":
        site.start(name, rounds=4, address="::1")
    site.end("a", "b")
    assert max(site.check()) == 4


@pytest.mark.rest
@pytest.mark.parametrize("nth", [1, 2], ids=["the first group", "another one"])
def test_a_member_that_dies_while_groups_are_made_is_left_out_before_a_limit(site: Site, nth: int) -> None:
    site.start("a", rounds=8, pause_s=0.2, connect_s=10 * GUARD_S)  # others may come later
    site.start("b", rounds=8, pause_s=0.2, connect_s=10 * GUARD_S, dies_making=nth)
    site.start("c", rounds=8, pause_s=0.2, connect_s=10 * GUARD_S)
    site.end("a", "c")
    site.check("ac")
    # The first roster may be without one of the two.
    failed = [[what for what, _who in site.events(name)].count("failed") for name in "ac"]
    assert max(failed) == 1


@pytest.mark.rest
def test_a_stopped_member_is_left_out_and_heals_when_it_wakes(site: Site) -> None:
    for name in "abc":
        site.start(name, rounds=30, pause_s=0.2)
    site.wait_for("a", 3)
    site.signal("c", signal.SIGSTOP)
    site.wait_for("a", 6)
    site.signal("c", signal.SIGCONT)
    site.end("a", "b", "c")
    site.check()
    assert ("left", ("c",)) in site.events("a")
    assert any(what == "healed" and who == ("c",) for what, who in site.events("c"))
    assert "Unless it was stopped or cut off, the grace of a roster is shorter" in site.warned("c")


@pytest.mark.rest
def test_a_member_without_a_quorum_trains_on_and_brings_it_all_to_the_next_one(site: Site) -> None:
    site.start("a", rounds=8, pause_s=0.1, alone_s=0.3, quorum_s=QUORUM_S, saves=True)
    site.start("b", rounds=50, pause_s=0.1)
    site.wait_for("a", 3)
    site.kill("b")
    site.wait_for_a_note("a", lambda each: "alone" in each)
    time.sleep(QUORUM_S + 1.0)  # its question has no answer in time, and it asks again
    site.start("b", rounds=8, pause_s=0.1)
    site.end("a", "b")
    site.check()
    steps = sorted(each["steps"] for each in site.notes("a") if "steps" in each)
    assert steps[:-1] == [EVERY] * 7
    assert steps[-1] > ALONE
    [told] = [each["report"] for each in site.notes("a") if "alone" in each]
    assert "int4" in told


@pytest.mark.rest
@pytest.mark.parametrize("recipe", ["diloco", "sparseloco", "powersgd(rank=2)"])
def test_many_kills_keep_members_alike(site: Site, recipe: str) -> None:
    for name in "abc":
        site.start(name, rounds=60, recipe=recipe, pause_s=0.05)
    for turn in range(4):
        site.wait_for("a", 4 + 10 * turn)
        site.kill("b")
        site.wait_for("a", 6 + 10 * turn)
        site.start("b", rounds=60, recipe=recipe, pause_s=0.05)
    site.end("a", "b", "c")
    site.check()
    assert ("left", ("b",)) in site.events("c")


@pytest.mark.rest
def test_a_delayed_round_that_a_death_breaks_is_given_up_and_the_next_one_brings_it(site: Site) -> None:
    for name in "abc":
        site.start(name, rounds=16, pause_s=0.1, delay=1)
    site.wait_for("a", 3)
    site.kill("b")
    site.wait_for("a", 6)
    site.start("b", rounds=16, pause_s=0.1, delay=1)
    site.end("a", "b", "c")
    site.check()


@pytest.mark.rest
def test_a_run_whose_members_have_all_died_goes_on_from_their_saves(site: Site) -> None:
    for name in "ab":
        site.start(name, rounds=50, pause_s=0.1, saves=True)
    site.wait_for("b", 3)
    for name in "ab":
        site.kill(name)
    for name in "abc":  # one more than before
        site.start(name, rounds=8, pause_s=0.1, saves=name != "c")
    site.end("a", "b", "c")
    shared = site.check()
    assert max(shared) == 8
    assert [each["begun"] for each in site.notes("a") if "begun" in each][1] >= 2
    last = [each["own"] for name in "abc" for each in site.notes(name) if each.get("rounds") == 8]
    assert len(set(last)) == 1


@pytest.mark.rest
def test_replicas_that_make_as_many_steps_as_they_can_share_rounds_by_time(site: Site) -> None:
    for name in "ab":
        site.start(name, rounds=10, every_seconds=0.2)
    site.end("a", "b")
    assert sorted(site.check()) == list(range(1, 11))


@pytest.mark.rest
def test_open_files_and_threads_are_as_many_after_many_rosters_as_after_the_first(site: Site) -> None:
    def start(name: str) -> None:
        site.start(name, rounds=10_000, pause_s=0.05, timeout_s=TIMEOUT_S)

    def of_all(name: str, since: float = 0.0) -> list[dict[str, Any]]:
        return [each for each in site.notes(name) if len(each.get("members", ())) == 3 and each["at"] > since]

    for name in "abc":
        start(name)
    while min(len(of_all(name)) for name in "ac") < 3:
        site.wait_for("a", site.rounds("a") + 1)
    most = {
        name: {key: 2 + max(each[key] for each in of_all(name)[:3]) for key in ("files", "threads")}
        for name in "ac"
    }
    for _ in range(4):
        site.kill("b")
        at = site.rounds("a")
        site.wait_for("a", at + 2)
        start("b")
        site.wait_for_a_note("a", lambda each, at=at: each.get("rounds", 0) > at and "b" in each["members"])
        site.wait_for("a", site.rounds("a") + 3)
    # A wait for a message that a kill has broken ends at gloo's timeout. Until then it keeps its group.
    since, until_s = time.time(), time.monotonic() + TIMEOUT_S + GUARD_S
    for name, limits in most.items():
        while not any(all(each[key] <= limits[key] for key in limits) for each in of_all(name, since)):
            assert time.monotonic() < until_s, f"more than {limits} in {site.notes(name)[-1:]}"
            site.wait_for("a", site.rounds("a") + 1)


@pytest.mark.rest
@pytest.mark.network
@pytest.mark.parametrize("ways", ["one-way", "both-ways"])
def test_a_link_that_is_cut_between_two_members_costs_rounds_and_no_member(tmp_path: Path, ways: str) -> None:
    if all(emulate.why_not(mode) is not None for mode in ("root", "user")):
        pytest.skip("no network namespaces here")
    command = [sys.executable, "-m", "tests.faults.cut_members", str(tmp_path), ways]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    site = Site(tmp_path)
    shared = site.check("abc")
    assert max(shared) == 12
    assert {what for name in "abc" for what, _who in site.events(name)} >= {"joined", "failed"}
    last = [each["own"] for name in "abc" for each in site.notes(name) if each.get("rounds") == 12]
    assert len(last) == 3
    assert len(set(last)) == 1
