"""Rounds over an object store: by drawn scripts, and one rule after the other."""

from __future__ import annotations

import json
import math
import sys
import threading
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from gradwire.errors import GradwireError, TransportError
from gradwire.members.bucket import member
from gradwire.members.bucket.member import Metered
from gradwire.members.bucket.objects import (
    LARGEST,
    PIECE,
    Bucket,
    StoreError,
    check_size,
    created,
    paced,
)
from gradwire.members.bucket.records import SPEC, Beat, Offer, Seal, check_name, seal_key
from gradwire.members.bucket.rounds import (
    NO_MORE,
    Rules,
    Seat,
    announce_snapshot,
    catch_up,
    enter,
    land,
    prune,
    send,
    settle,
    take_newest,
    write_snapshot,
)
from tests.support.bucket import Learner, Memory, Play
from tests.support.looped import looped

FEW, MANY = range(128), range(128, 1280)
RULES = Rules(at_least=1, patience_s=15.0, wait_s=300.0, beat_s=2.0, snapshot_every=2)
WRITES = [
    *("put theta", "put members"),
    *("create spec", "create members", "create offers", "create seals", "create snapshots"),
    *("delete offers", "delete snapshots", "delete theta"),
]
LISTS = ["list members", "list offers", "list snapshots"]
REQUESTS = [
    *WRITES,
    *LISTS,
    *("get spec", "get members", "get offers", "get seals", "get snapshots", "get theta"),
]
AIMS = [
    *product(("kill", "lost"), REQUESTS),
    *product(("answer lost", "late"), WRITES),
    *product(("stale",), LISTS),
]
"""Each fault at each request to which it can come. A play aims at one of them, and draws others."""


@cache
def played(seed: int) -> Play:
    """Two to four members, with up to thirteen faults; every thirteenth play has none."""
    rules = Rules(1 + seed % 2, patience_s=15.0, wait_s=300.0, beat_s=2.0, snapshot_every=1 + seed % 5 % 2)
    faults, (turn, number) = seed % 13, divmod(seed, len(AIMS))
    play = Play(
        seed,
        "abcd"[: 2 + seed % 3],
        rounds=6,
        faults=faults,
        rules=rules,
        often=0.03,
        aim=AIMS[number] if faults else None,
        skip=turn % 4,
    )
    play.run()
    return play


def check(play: Play) -> None:
    """The seals count everything at most once; all else is held, or lost with a word or a death."""
    counted = play.counted()
    held = set().union(*(play.replicas[id_].held for id_, end in play.ends.items() if end == "done"))
    assert not counted & held, "would be counted twice"
    assert play.learned <= counted | held | play.lost, "lost unsaid"


def test_without_faults_all_is_counted_once_and_nothing_is_lost() -> None:
    for seed in range(0, 130, 13):
        play = played(seed)
        check(play)
        assert not play.lost - set().union(*(each.held for each in play.replicas.values()))
        assert not play.told["dropped"]
        assert not play.told["healed"]


@looped("seed", FEW)
def test_members_that_die_at_any_request_keep_the_invariant(seed: int) -> None:
    check(played(seed))


@pytest.mark.rest
@pytest.mark.timeout(600)
def test_faults_come_at_every_request_and_thousands_of_schedules_keep_the_invariant() -> None:
    struck, kinds = set[tuple[str, str]](), set[str]()
    for seed in MANY:
        play = played(seed)
        check(play)
        struck |= play.struck.keys()
        kinds |= {end.partition(":")[0] for end in play.ends.values()}
    assert not set(AIMS) - struck
    assert {("start again", "from a save"), ("start again", "anew")} <= struck
    assert kinds >= {"done", "left alone", "killed"}


# -- one rule after the other


class Told(list[str]):
    def __call__(self, what: str, who: tuple[str, ...], why: str) -> None:
        self.append(f"{what} {', '.join(who)}: {why}")


def learner(name: str, *learned: str) -> Learner:
    play: Any = SimpleNamespace(learned=set(), lost=set(), after={})
    process: Any = SimpleNamespace(id=name, play=play, saved=None)
    found = Learner(process)
    found.draw = SimpleNamespace(  # type: ignore[assignment]
        random=lambda: 1.0, sample=lambda pool, _n: pool, randint=lambda _low, high: high
    )
    found.held |= set(learned)
    return found


def entered(
    store: Memory, name: str, replica: Learner, rules: Rules = RULES, saved: Any = None, told: Any = None
) -> Seat:
    return enter(
        store, name, {"recipe": "int4"}, replica, rules, saved, tell=Told() if told is None else told
    )


def take_round(seat: Seat, replica: Learner) -> Seal:
    assert send(seat, replica)
    seal, offers = settle(seat)
    land(seat, replica, seal, offers)
    return seal


def test_a_newcomer_never_begins_a_run_beside_a_running_one() -> None:
    store, a, b = Memory(), learner("a", "one"), learner("b")
    seat = entered(store, "a", a)
    take_round(seat, a)
    b.shared = {"other parameters"}
    other = entered(store, "b", b)
    assert (other.run, other.round, b.shared) == (seat.run, 1, {"one"})


def test_one_that_dies_before_its_spec_leaves_nothing_half_made() -> None:
    store, a = Memory(), learner("a", "one")
    store.put("theta/of-one-that-died", b"[]")
    seat = entered(store, "a", a)
    take_round(seat, a)
    assert a.shared == {"one"}


def test_other_settings_are_refused_by_their_names() -> None:
    store = Memory()
    entered(store, "a", learner("a"))
    with pytest.raises(GradwireError, match="recipe: int8 here, int4 there"):
        enter(store, "b", {"recipe": "int8"}, learner("b"), RULES)
    assert not [key for key in store.list("members") if "/b-" in key]


def test_an_offer_that_was_not_sealed_goes_along_with_the_next() -> None:
    store, a, b = Memory(), learner("a", "one"), learner("b")
    seat, other = entered(store, "a", a), entered(store, "b", b)
    b.held = {"two"}
    assert take_round(seat, a).names == ("a",)  # b lives, and a waits no longer than its patience
    other.offered = "offers/00000000/b-000000"  # it came after the seal
    assert send(other, b)
    assert (b.shared, b.held) == ({"one"}, {"two"})
    land(other, b, *settle(other))
    assert b.shared == {"one", "two"}
    assert not b.held
    assert not other.lost


def test_what_came_too_late_too_often_is_dropped_with_a_word() -> None:
    store, a, b, told = Memory(), learner("a"), learner("b"), Told()
    seat, other = entered(store, "a", a), entered(store, "b", b, told=told)
    b.held = {"late"}
    for round_ in range(3):
        a.held = {str(round_)}
        other.offered = f"offers/{round_:08d}/b-000000"  # it came after the seal
        take_round(seat, a)
        catch_up(other, b)
        assert b.held == ({"late"} if round_ < RULES.late_rounds else set())
    assert told[-1] == "dropped b: it came too late for 3 rounds"
    assert other.lost == 1


def test_a_process_that_starts_again_from_a_save_counts_nothing_twice() -> None:
    store, a, b = Memory(), learner("a", "one"), learner("b")
    seat, other = entered(store, "a", a), entered(store, "b", b)
    b.held = {"two"}
    saved, shared, held = (other.run, other.round, other.waits_since), set(b.shared), set(b.held)
    assert send(other, b)  # and dies
    take_round(seat, a)
    again, told = learner("b"), Told()
    again.shared, again.held = shared, held
    entered(store, "b", again, saved=saved, told=told)
    assert (again.shared, again.held) == ({"one", "two"}, set())
    assert told[0].startswith("dropped b: another process of this name has offered")


def test_a_save_of_another_run_is_refused() -> None:
    store = Memory()
    with pytest.raises(GradwireError, match="a run that is not at this URL"):
        entered(store, "a", learner("a"), saved=("another", 3, -1))
    entered(store, "a", learner("a"))
    with pytest.raises(GradwireError, match="the save is of another run"):
        entered(store, "b", learner("b"), saved=("another", 3, -1))


def test_of_two_with_one_name_the_older_one_ends_with_a_sentence() -> None:
    store, a, twin = Memory(), learner("a", "one"), learner("a")
    seat = entered(store, "a", a)
    entered(store, "a", twin)
    assert send(seat, a)
    with pytest.raises(GradwireError, match="another process has taken the name 'a'"):
        settle(seat)


def test_a_whole_job_goes_on_from_the_bucket_alone() -> None:
    store, a = Memory(), learner("a")
    seat = entered(store, "a", a)
    for round_ in range(5):
        a.held = {str(round_)}
        seal = take_round(seat, a)
        if round_ % 2:
            write_snapshot(seat, seat.round, a.give())
    assert seal.round == 4
    again = learner("a")
    entered(store, "a", again)
    assert again.shared == set("01234")
    assert len(store.list("snapshots")) == 2
    assert len(store.list("seals")) == 5
    assert sorted(store.list("offers")) == [f"offers/{round_:08d}/a-000000" for round_ in (2, 3, 4)]


def test_pruning_leaves_what_a_living_member_reads() -> None:
    store, a = Memory(), learner("a")
    seat, reader = entered(store, "a", a), entered(store, "b", learner("b"))
    take_newest(reader, learner("b"))  # of round 0, and reads on
    for round_ in range(6):
        a.held = {str(round_)}
        take_round(seat, a)
        reader.beat()
        seat.beat()
        write_snapshot(seat, seat.round, a.give())
    assert "offers/00000000/a-000000" in store.list("offers")
    store.time_s += 100.0
    seat.beat()
    prune(seat)
    assert "offers/00000000/a-000000" not in store.list("offers")


def test_one_writes_a_snapshot_for_all_and_another_one_if_it_dies() -> None:
    store, replicas = Memory(), {name: learner(name) for name in "ab"}
    seats = {name: entered(store, name, replica) for name, replica in replicas.items()}

    def is_writer(names: str) -> bool:
        """Of a round of `names`, whether the first one, which seals it, writes a snapshot."""
        for name in names:
            assert send(seats[name], replicas[name])
        for name in names:
            seal, offers = settle(seats[name])
            land(seats[name], replicas[name], seal, offers)
        return announce_snapshot(seats[names[0]], seal)

    assert [is_writer("ab"), is_writer("ab")] == [False, True]
    assert not is_writer("ba")  # a still writes
    write_snapshot(seats["a"], 2, replicas["a"].give())
    assert is_writer("ba")  # the next one
    store.time_s += 100.0  # in which b is silent
    seats["a"].beat()
    assert is_writer("a")

    def fails(_key: str, _data: bytes, _bytes_per_s: float = 0.0) -> None:
        raise StoreError("no answer")

    store.upload = fails  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        write_snapshot(seats["a"], 5, replicas["a"].give())
    for seat in seats.values():
        seat.beat()
    assert is_writer("ba")


def test_states_that_no_snapshot_names_are_deleted_with_those_of_their_time() -> None:
    store, a, told = Memory(), learner("a"), Told()
    store.put("theta/00000000-of-one-that-died-before-its-spec", b"[]")
    seat = entered(store, "a", a, told=told)
    store.put("theta/00000002-of-one-that-died-before-its-pointer", b"[]")
    store.put("theta/.DS_Store", b"")
    store.put("snapshots/.DS_Store", b"")
    for round_ in range(4):
        a.held = {str(round_)}
        take_round(seat, a)
        seat.beat()
        write_snapshot(seat, seat.round, a.give())
    assert sorted(key[:14] for key in store.list("theta")) == [
        "theta/.DS_Stor",
        "theta/00000003",
        "theta/00000004",
    ]
    again = learner("b")
    entered(store, "b", again)
    assert again.shared == set("0123")


def test_a_heartbeat_that_is_slow_is_not_written_over_a_newer_one() -> None:
    """One thread has begun to write a heartbeat when another one writes what it reads, or that it leaves."""
    for newer, reads in ((Seat.beat, 3), (Seat.leave, -1)):
        store, begun, written = Memory(), threading.Event(), threading.Event()
        seat = Seat(store, "a", 0, RULES, joined=0)
        put = store.put

        def slow(key: str, data: bytes, put: Any = put, begun: Any = begun, written: Any = written) -> None:
            if not begun.is_set():
                begun.set()
                written.wait(0.5)  # what comes after it, if it comes before this one has ended
            put(key, data)
            written.set()

        store.put = slow  # type: ignore[method-assign]
        thread = threading.Thread(target=seat.beat)
        thread.start()
        assert begun.wait(60.0)
        seat.reads = reads
        newer(seat)
        thread.join()
        seat.beat() if newer is Seat.leave else None  # it has left
        last = Beat.of(store.get("members/a-000000") or b"")
        assert (last.reads, last.joined) == ((3, 0) if newer is Seat.beat else (-1, -1))


def test_requests_of_several_threads_are_all_counted() -> None:
    class Nothing(Memory):
        def put(self, key: str, data: bytes) -> None:
            pass

    metered, each, before_s = Metered(Nothing()), 20_000, sys.getswitchinterval()

    def write() -> None:
        for _ in range(each):
            metered.put("members/a-000000", b"12")

    threads = [threading.Thread(target=write) for _ in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before_s)
    assert (metered.requests["put"], metered.sent_bytes) == (4 * each, 8 * each)


def test_one_that_was_healed_reads_no_snapshot_any_more_and_all_is_pruned_again() -> None:
    store, a, b = Memory(), learner("a"), learner("b")
    seat, other = entered(store, "a", a), entered(store, "b", b)
    b.shared = {"a flipped bit"}
    for round_ in range(6):
        a.held = {str(round_)}
        take_round(seat, a)
        catch_up(other, b)
        other.beat()
        seat.beat()
        write_snapshot(seat, seat.round, a.give())
    assert b.shared == a.shared
    assert min(store.list("offers")) == "offers/00000005/a-000000"
    assert len(store.list("snapshots")) == 2


def test_one_whose_parameters_differ_takes_the_snapshot_and_says_so() -> None:
    store, a, b, told = Memory(), learner("a", "one"), learner("b"), Told()
    seat, other = entered(store, "a", a), entered(store, "b", b, told=told)
    take_round(seat, a)
    b.shared = {"a flipped bit"}
    catch_up(other, b)
    assert b.shared == {"one"}
    assert "its shared parameters differ from those of the others" in told[-1]
    b.take = lambda data: None  # type: ignore[method-assign]  # and again, from the snapshot
    b.shared, a.held = {"another"}, {"two"}
    take_round(seat, a)
    with pytest.raises(GradwireError, match="come out otherwise here"):
        catch_up(other, b)


def test_one_that_offers_nothing_is_not_waited_for() -> None:
    store, a, b = Memory(), learner("a", "one"), learner("b")
    seat, other = entered(store, "a", a), entered(store, "b", b)
    b.draw = SimpleNamespace(random=lambda: 0.0)  # type: ignore[assignment]
    assert not send(other, b)
    before_s = store.time_s
    take_round(seat, a)
    assert store.time_s - before_s < RULES.patience_s


def test_one_that_could_not_follow_is_not_waited_for_before_it_offers() -> None:
    store, a, b = Memory(), learner("a", "one"), learner("b", "two")
    seat, other = entered(store, "a", a), entered(store, "b", b)
    other.passes, other.trains_alone, get = NO_MORE, True, store.get
    store.get = Mock(side_effect=StoreError("no answer"))  # type: ignore[method-assign]
    with pytest.raises(StoreError):
        send(other, b)
    store.get = get  # type: ignore[method-assign]
    other.beat()
    before_s = store.time_s
    take_round(seat, a)
    assert store.time_s - before_s < RULES.patience_s


def test_a_wait_without_enough_members_ends_with_what_is_missing() -> None:
    store, a = Memory(), learner("a", "one")
    seat = entered(store, "a", a, Rules(at_least=2, wait_s=50.0))
    assert send(seat, a)
    with pytest.raises(TransportError, match="1 of at least 2 offers are there"):
        settle(seat)


def test_where_parameters_differ_and_none_are_those_of_most_all_begin_anew_from_the_snapshot() -> None:
    store, told = Memory(), Told()
    replicas = {name: learner(name) for name in "ab"}
    rules = Rules(at_least=2, wait_s=50.0)
    seats = {name: entered(store, name, each, rules, told=told) for name, each in replicas.items()}
    replicas["a"].held, replicas["b"].held = {"of a"}, {"of b"}

    def take() -> Seal:
        """A round of both. What each lands comes to it before the next one."""
        assert [send(seats[name], each) for name, each in replicas.items()] == [True, True]
        for name, each in replicas.items():
            seal, offers = settle(seats[name])
            land(seats[name], each, seal, offers)
        return seal

    assert take().names == ("a", "b")
    replicas["b"].shared.add("a flipped bit")
    replicas["a"].held, replicas["b"].held = {"lost of a"}, {"lost of b"}
    assert take().names == ()
    assert [each for each in told if each.startswith("healed")] == [
        f"healed {name}: the members' shared parameters differ, and none are those of most: it takes the "
        "snapshot of round 0"
        for name in "ab"
    ]
    replicas["a"].held, replicas["b"].held = {"one"}, {"two"}
    assert take().names == ("a", "b")
    assert replicas["a"].shared == replicas["b"].shared == {"of a", "of b", "one", "two"}
    assert not any(each.startswith("dropped") for each in told)
    late = learner("c")
    assert entered(store, "c", late, rules).round == 3
    assert late.shared == replicas["a"].shared


def test_where_parameters_come_out_otherwise_each_time_all_raise_in_words() -> None:
    store = Memory()
    replicas = {name: learner(name, f"of {name}") for name in "ab"}
    rules = Rules(at_least=2, wait_s=50.0)
    seats = {name: entered(store, name, each, rules) for name, each in replicas.items()}
    for each in replicas.values():
        each.digest = lambda name=each.process.id: name  # type: ignore[method-assign]
    for round_ in range(3):
        for name, each in replicas.items():
            each.held = {f"{round_} of {name}"}
        assert [send(seats[name], each) for name, each in replicas.items()] == [True, True]
        for name, each in replicas.items():
            if round_ < 2:
                land(seats[name], each, *settle(seats[name]))
                catch_up(seats[name], each)
            else:
                with pytest.raises(
                    GradwireError, match="before round 2 the shared parameters come out otherwise"
                ):
                    settle(seats[name])


@pytest.mark.rest
@looped("seed", range(24))
def test_a_bit_that_flips_ends_no_run(seed: int) -> None:
    rules = Rules(2, patience_s=15.0, wait_s=3000.0, beat_s=2.0, snapshot_every=2)
    play = Play(seed, "abc"[: 2 + seed % 2], rounds=6, faults=0, rules=rules, flips=1)
    play.run()
    assert play.flipped
    assert set(play.ends.values()) == {"done"}


def test_one_that_trains_alone_asks_once_and_sends_the_same_offer_later() -> None:
    store, a = Memory(), learner("a", "one")
    seat = entered(store, "a", a, Rules(at_least=1, wait_s=50.0))
    seat.trains_alone = True
    create = store.create

    def fails(key: str, data: bytes) -> bool:
        raise StoreError("no answer")

    store.create = fails  # type: ignore[method-assign]
    before_s = store.time_s
    with pytest.raises(StoreError, match="no answer"):
        send(seat, a)
    assert store.time_s - before_s < 10.0
    a.held.add("two")
    store.create = create  # type: ignore[method-assign]
    take_round(seat, a)
    assert (a.shared, a.held) == ({"one"}, {"two"})


def test_one_that_strayed_seals_nothing_and_is_not_named() -> None:
    store, replicas = Memory(), {name: learner(name) for name in "abc"}
    seats = {name: entered(store, name, replica, Rules(wait_s=5.0)) for name, replica in replicas.items()}
    replicas["c"].shared = {"a flipped bit"}
    for name, replica in replicas.items():
        replica.held = {f"of {name}"}
        assert send(seats[name], replica)
    with pytest.raises(TransportError, match="was not sealed in 5 s"):
        settle(seats["c"])
    assert settle(seats["a"])[0].names == ("a", "b")


def test_damaged_offers_are_not_named_in_a_seal() -> None:
    store, a = Memory(), learner("a", "one")
    seat = entered(store, "a", a)
    store.put("offers/00000000/b-000000", b"no offer")
    store.put("offers/00000000/.DS_Store", b"")
    store.put("members/.DS_Store", b"")
    assert take_round(seat, a).names == ("a",)


def test_what_is_no_offer_is_read_once() -> None:
    store, a, read = Memory(), learner("a", "one"), list[str]()
    seat = entered(store, "a", a, Rules(wait_s=20.0))
    other = Offer(7, a.digest(), 1.0, b"of another round")
    wrong = {"offers/00000000/b-000000": b"no offer", "offers/00000000/c-000000": other.as_bytes()}
    for key, data in wrong.items():
        store.put(key, data)
    assert send(seat, a)
    get = store.get
    store.get = lambda key: [read.append(key), get(key)][1]  # type: ignore[method-assign,func-returns-value]
    with pytest.raises(TransportError, match="was not sealed in 20 s"):
        settle(seat)
    assert [key for key in read if key in wrong] == list(wrong)


def test_all_add_up_the_bytes_that_were_sealed_also_who_has_offered_others() -> None:
    store, replicas = Memory(), {name: learner(name, f"of {name}") for name in "ab"}
    seats = {name: entered(store, name, replica, Rules(wait_s=5.0)) for name, replica in replicas.items()}
    for name, replica in replicas.items():
        assert send(seats[name], replica)
    stored = Offer(0, replicas["a"].digest(), 1.0, json.dumps(["a flipped bit"]).encode())
    store.put(seats["a"].offered, stored.as_bytes())
    seal, offers = settle(seats["b"])
    assert seal.names == ("a", "b")
    assert settle(seats["a"]) == (seal, offers)


# -- stores


class Unclear(Memory):
    """The answer to the first request that creates is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = True

    def create(self, key: str, data: bytes) -> bool:
        found = super().create(key, data)
        if self.lost:
            self.lost = False
            raise StoreError("no answer")
        return found


def test_after_an_unclear_answer_the_object_says_whose_it_is() -> None:
    store = Unclear()
    assert created(store, "seals/0", b"mine")
    store.lost = True
    assert not created(store, "seals/0", b"another's")


class Timed(Memory):
    """Creates at a rate, and notes the rate at which it is asked to upload."""

    rate = 0.0

    def upload(self, key: str, data: bytes, bytes_per_s: float = math.inf) -> None:
        self.rate = bytes_per_s


def test_a_snapshot_takes_a_tenth_of_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Timed()
    metered = Metered(store)
    monkeypatch.setattr(member, "now_s", store.now_s)
    create = store.create

    def takes(seconds: float) -> Any:
        return lambda key, data: [store.pause(seconds), create(key, data)][1]

    for key, seconds in (("offers/1", 2.0), ("offers/2", 4.0)):  # 50 and 25 bytes a second
        store.create = takes(seconds)  # type: ignore[method-assign]
        metered.create(key, bytes(100))
    metered.upload("theta/0", bytes(3 * PIECE))
    assert store.rate == pytest.approx(5.0)
    assert metered.requests["put"] == 2 + 3 + 2


def test_pieces_come_no_faster_than_their_rate() -> None:
    store, data = Memory(), bytes(2 * PIECE + 7)
    came = []
    for piece in paced(data, PIECE / 8.0, store.pause, store.now_s):
        came.append((store.time_s - 1000.0, len(piece)))
        store.time_s += 1.0  # the request
    assert came == [(0.0, PIECE), (8.0, PIECE), (16.0, 7)]
    assert [len(each) for each in paced(b"", 1.0, store.pause, store.now_s)] == [0]


def test_a_folder_takes_an_object_in_pieces(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    store, data = Bucket(str(tmp_path)), bytes(range(256)) * ((2 * PIECE) // 256 + 3)
    store.upload("theta/0", data)
    assert store.get("theta/0") == data


def test_an_offer_that_no_store_creates_is_refused_in_words() -> None:
    check_size("/mnt/shared/run", LARGEST + 1)
    check_size("s3://bucket/run", LARGEST)
    with pytest.raises(
        ValueError, match=r"an offer of this model has 12.0 GB .* an object of 5.0 GB at most"
    ):
        check_size("s3://bucket/run", 12 * 10**9)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a--b", "-a", "site-000001", 3, "ä"])
def test_names_that_are_no_keys_are_refused(name: Any) -> None:
    with pytest.raises(ValueError, match="is no name of this replica"):
        check_name(name)


def test_a_folder_creates_once_lists_and_deletes(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    store, won = Bucket(str(tmp_path / "run")), list[int]()
    starts = threading.Barrier(8)

    def race(number: int) -> None:
        starts.wait()
        if created(store, "seals/00000001", str(number).encode()):
            won.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(won) == 1
    assert store.get("seals/00000001") == str(won[0]).encode()
    assert store.get(SPEC) is None
    assert store.list("members") == {}
    store.put("members/a-000000", b"1")
    [(key, at)] = store.list("members").items()
    assert key == "members/a-000000"
    assert at > 0.0
    store.delete(["members/a-000000", "members/gone"])
    assert store.list("members") == {}
    assert seal_key(1) in store.list("")


def test_a_url_that_is_no_store_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    for url in ("ftp://host/run", "s3:/bucket/run", "s3:bucket/run"):
        with pytest.raises(ValueError, match="opens no store: write a folder, or a URL such as s3"):
            Bucket(url)
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot be made a folder"):
        Bucket(str(tmp_path / "file" / "run"))
