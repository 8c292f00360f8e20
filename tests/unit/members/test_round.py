"""Rounds among members that come and go, by drawn scripts, and the plans that follow from rosters."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from gradwire.errors import GradwireError
from gradwire.members.base import Card, Entry, Roster
from gradwire.members.plan import ENDS, awaited, planned
from tests.support.looped import looped
from tests.support.scripted import Play

FEW, MANY = range(160), range(160, 1024)


@cache
def played(seed: int) -> Play:
    """Three or four members, with up to twelve faults."""
    play = Play(seed, "abcd"[: 3 + seed % 2], rounds=4, faults=seed % 13, at_least=1 + seed % 2)
    play.run()
    return play


def check(play: Play) -> None:
    """The last parameters have everything at most once, and all else is unsent, or lost with somebody."""
    for process in play.processes:
        if dict(play.ends)[process.id].startswith("refused"):
            assert process.saved is not None, "nobody else ends for what others do"
    ended = [play.replicas[id_] for id_, end in play.ends if end in ("done", "left alone")]
    if not ended:
        return
    last = max(ended, key=lambda each: (len(each.shared), each.rounds, each.number))
    alike = [each for each in ended if each.number == last.number]
    assert all(each.shared == last.shared for each in alike)
    waiting = set().union(*(each.held for each in alike))
    assert not waiting & last.shared, "would be counted twice"
    healed_later = set().union(*(each.held | each.shared for each in ended if each not in alike))
    assert play.learned - last.shared - waiting <= play.lost | healed_later


def test_without_faults_all_is_counted_once_and_nothing_is_lost() -> None:
    for seed in range(0, 260, 13):
        play = played(seed)
        check(play)
        assert not play.lost
        assert {end for _id, end in play.ends} <= {"done", "left alone"}


@looped("seed", FEW)
def test_members_that_die_sleep_and_come_back_keep_the_invariant(seed: int) -> None:
    check(played(seed))


def test_faults_come_in_every_call_of_a_round() -> None:
    struck = set[tuple[str, str]]().union(*(played(seed).struck for seed in FEW))
    assert {"meet", "heal", "exchange", "vote"} == {call for what, call in struck if what == "break"}
    calls = {"ask", "meet", "heal", "exchange", "vote", "land", "work"}
    assert calls == {call for what, call in struck if what == "kill"}
    assert calls == {call for what, call in struck if what == "sleep"}
    assert {"meet", "heal", "exchange", "vote"} == {call for what, call in struck if what == "cut"}
    assert ("start again", "from a save") in struck


@pytest.mark.rest
def test_a_thousand_schedules_keep_the_invariant() -> None:
    kinds = set[str]()
    for seed in MANY:
        play = played(seed)
        check(play)
        kinds |= {end.partition(":")[0] for _id, end in play.ends}
    assert kinds == {"done", "left alone", "killed", "broken", "refused"}


# -- plans

LIVE = Card(
    terms={"recipe": "int4"}, address="10.0.0.1:1", run="r", rounds=3, number=30 * ENDS, tried=30 * ENDS
)
LIVE = replace(LIVE, checksum="c", established=True)


def roster(moment: int = 40, **cards: Card) -> Roster:
    return Roster(moment, tuple(Entry(name, f"{name}#", card) for name, card in cards.items()))


def test_a_card_survives_the_lighthouse_and_no_other_text_passes_for_one() -> None:
    assert Card.of(LIVE.as_dict()) == LIVE
    for strange in (None, {}, LIVE.as_dict() | {"rounds": '"3"'}, LIVE.as_dict() | {"run": "{"}):
        with pytest.raises(ValueError, match="not the card of a member"):
            Card.of(strange)


def test_ranks_go_by_name_and_the_first_one_is_the_host() -> None:
    plan = planned(roster(b=LIVE, a=replace(LIVE, address="10.0.0.2:7")), "b#")
    assert plan.names == ("a", "b")
    assert plan.addresses == ("10.0.0.2:7", "10.0.0.1:1")
    assert (plan.number // ENDS, plan.heals, plan.is_new) == (40, (), True)


def test_groups_stay_while_all_have_the_same_and_are_made_anew_after_a_failure() -> None:
    first = planned(roster(a=LIVE, b=LIVE), "a#")
    held = replace(LIVE, meeting=first.meeting)
    again = planned(roster(50, a=held, b=held), "b#")
    assert (again.meeting, again.is_new) == (first.meeting, False)
    assert planned(roster(50, a=held, b=LIVE), "a#").is_new  # it has failed on one of them
    assert planned(roster(50, a=held, b=held, c=held), "a#").is_new  # another member
    assert planned(roster(50, a=held), "a#").is_new
    assert planned(roster(50, a=held, b=replace(held, checksum="other")), "a#").is_new  # one is healed
    assert planned(roster(50, a=LIVE, b=LIVE), "a#").meeting != first.meeting


def test_a_number_is_above_all_tried_ones_even_if_a_clock_is_set_back() -> None:
    assert planned(roster(7, a=replace(LIVE, tried=44 * ENDS), b=LIVE), "a#").number // ENDS == 45


def test_members_that_meet_apart_after_a_clock_was_set_back_have_other_numbers() -> None:
    given = replace(LIVE, tried=44 * ENDS)
    one, other = planned(roster(7, a=given, b=given), "a#"), planned(roster(7, c=given, d=given), "c#")
    assert one.number // ENDS == other.number // ENDS
    assert one.number != other.number


def test_all_take_the_first_one_s_parameters_where_nobody_has_begun() -> None:
    new = Card(terms={"recipe": "int4"}, address="x:1")
    plan = planned(roster(c=new, a=new, b=new), "c#")
    assert (plan.begins, plan.source, plan.heals) == (True, "a", ("b", "c"))
    assert plan.run


def test_the_ones_behind_and_the_new_ones_are_healed() -> None:
    new = Card(terms={"recipe": "int4"}, address="x:1")
    missed = replace(LIVE, rounds=2, number=20 * ENDS)
    plan = planned(roster(a=new, b=missed, c=LIVE, d=replace(LIVE, number=29 * ENDS)), "a#")
    assert (plan.source, plan.heals, plan.begins) == ("c", ("a", "b", "d"), False)


def test_most_decide_where_someone_has_loaded_other_values() -> None:
    plan = planned(roster(a=replace(LIVE, checksum="other"), b=LIVE, c=LIVE), "a#")
    assert (plan.source, plan.heals) == ("b", ("a",))


def test_of_runs_that_have_begun_apart_the_one_that_counts_fewer_steps_is_healed_and_nobody_ends() -> None:
    long = replace(LIVE, run="long", rounds=15, counted=450, terms={"recipe": "int4", "types": "float32"})
    young = replace(LIVE, run="young", rounds=2, counted=120, number=50 * ENDS, terms=long.terms)
    for me in "abc":
        plan = planned(roster(60, a=young, b=young, c=long), f"{me}#")
        assert (plan.source, plan.heals, plan.run, plan.begins) == ("c", ("a", "b"), "long", False)
    joined = replace(young, established=False, rounds=0, counted=0, number=-1)
    assert planned(roster(60, a=joined, b=joined, c=long), "a#").heals == ("a", "b")
    strange = replace(young, terms={"recipe": "int4", "types": "bfloat16"})  # two are no more than a long run
    assert planned(roster(60, a=strange, b=strange, c=long), "c#").names == ("c",)


def test_of_rounds_apart_the_one_of_more_steps_counts_and_not_the_later_one() -> None:
    two = replace(LIVE, counted=180)
    alone = replace(LIVE, counted=150, number=31 * ENDS, tried=31 * ENDS, checksum="d")
    plan = planned(roster(a=two, b=two, c=alone), "a#")
    assert (plan.source, plan.heals) == ("a", ("c",))
    assert planned(roster(a=two, c=replace(alone, counted=180)), "a#").source == "c"


def test_newcomers_wait_for_those_that_live_and_have_not_asked() -> None:
    new = Card(terms={"recipe": "int4"}, address="x:1", living=("a#", "b#", "c#"))
    assert awaited(roster(a=new, b=new)) == {"c#"}
    assert not awaited(roster(a=new, b=new, c=new))
    assert not awaited(roster(a=new, b=replace(LIVE, living=new.living)))
    saved = replace(LIVE, established=False, living=("b#", "c#"))
    assert awaited(roster(b=saved)) == {"c#"}


def refusal(me: str, given: Roster) -> str:
    with pytest.raises(GradwireError) as raised:
        planned(given, me)
    return str(raised.value)


def test_members_that_do_not_fit_are_refused_in_words_and_the_others_go_on() -> None:
    other = replace(LIVE, terms={"recipe": "topk"}, established=False)
    given = roster(a=other, b=LIVE, c=LIVE)
    assert "the others differ in recipe: topk here, int4 there" in refusal("a#", given)
    assert planned(given, "b#").names == ("b", "c")
    given = roster(a=replace(LIVE, run="s", established=False, joins=True), b=LIVE)
    assert "another run" in refusal("a#", given)
    given = roster(a=replace(LIVE, rounds=9, established=False), b=LIVE, c=LIVE)
    assert "ahead of the run, which has made 3 rounds" in refusal("a#", given)
    assert planned(roster(a=replace(LIVE, rounds=9, established=False), b=LIVE), "b#").source == "a"


def test_of_two_with_one_name_the_younger_stays() -> None:
    old, young = replace(LIVE, born=1.0), replace(LIVE, born=2.0)
    given = Roster(40, (Entry("a", "a#2", young), Entry("a", "a#1", old), Entry("b", "b#", LIVE)))
    assert "another process has taken its name 'a'" in refusal("a#1", given)
    assert planned(given, "a#2").names == ("a", "b")


def test_what_is_no_member_of_gradwire_is_left_out() -> None:
    given = Roster(40, (Entry("x", "x#", None), Entry("b", "b#", LIVE)))
    assert planned(given, "b#").names == ("b",)
