"""The time of a step: against clockwork, against the papers' formulas, and by hand."""

from __future__ import annotations

from random import Random

import pytest

from gradwire.planning.boundaries import element_boundaries
from gradwire.planning.collectives import Transfer
from gradwire.planning.costs import BackwardTiming, CodecCost, Line, Link, Network
from gradwire.planning.step_time import Sent, Tail, UnitWork, held_up, step_time
from tests.support.looped import looped
from tests.support.planning_problems import step_held_up_s, units_between
from tests.unit.planning.ticking import Clockwork, Unit

SECONDS = Network(Link(0.0, 1.0))
"""A shift of n bytes takes n seconds."""


def sent(*seconds: float) -> tuple[Sent, ...]:
    return tuple(map(Sent, seconds))


def codec(encode_s: float, decode_s: float) -> CodecCost:
    """For units of any size."""
    return CodecCost(Line(encode_s, 0.0), Line(decode_s, 0.0))


@looped("seed", range(20))
def test_as_clockwork_has_it(seed: int) -> None:
    draw = Random(seed)
    for _ in range(10):
        numel = [draw.randint(0, 4) for _ in range(draw.randint(1, 8))]
        ready = sorted(draw.randint(0, 20) for _ in numel)
        encode, decode = (Line(draw.randint(0, 2), draw.choice((0, 1))) for _ in range(2))
        decodes, startup = draw.choice((1, 1, 2)), draw.choice((0, 0, 1))
        ticking, units = [], []
        for at, size in zip(ready, numel, strict=True):
            rounds = [draw.randint(1, 6) for _ in range(draw.randint(1, 3))]
            latency = draw.choice((0, 0, 3, 9))
            taken = [startup + seconds for seconds in rounds]
            ticking.append(Unit(at, int(encode(size)), taken, decodes * int(decode(size)), latency))
            units.append(UnitWork(at, size, tuple(Sent(s + latency, latency, startup) for s in rounds)))
        found = step_time(units, 0.0, CodecCost(encode, decode), decodes)
        assert found == Clockwork(ticking).run()


@looped("seed", range(20))
def test_dense_overlap_is_covaps_equation_3(seed: int) -> None:
    draw = Random(seed)
    computed = [draw.random() for _ in range(7)]
    took = [draw.random() for _ in range(7)]
    ready = [sum(computed[: i + 1]) for i in range(7)]
    # bubble_i: how long the wire then waits for the next tensor.
    bubbles, free = [], 0.0
    for at, seconds, then in zip(ready, took, [*ready[1:], 0.0], strict=True):
        free = max(free, at) + seconds
        bubbles.append(max(0.0, then - free))
    hidden = max(
        sum(computed[1:]), sum(s + bubble for s, bubble in zip(took[:-1], bubbles[:-1], strict=True))
    )
    equation_3 = computed[0] + took[-1] + hidden
    units = [UnitWork(at, 1, sent(s)) for at, s in zip(ready, took, strict=True)]
    assert step_time(units, ready[-1]) == pytest.approx(equation_3)


def test_a_longer_communication_hides_all_but_the_rest() -> None:
    # COVAP, equation 4: T' = (CCR − 1)·T_comp, in the limit of many small units.
    units = [UnitWork((i + 1) / 1000, 1, sent(2.5 / 1000)) for i in range(1000)]
    assert step_time(units, 1.0) - 1.0 == pytest.approx(1.5, abs=2 / 1000)


@pytest.mark.parametrize("seed", range(10))
def test_a_codec_that_holds_up_the_backward_pass_delays_all_that_comes_later(seed: int) -> None:
    draw = Random(seed)
    ready = sorted(draw.random() for _ in range(6))
    units = [UnitWork(at, draw.randint(1, 9), sent(draw.random())) for at in ready]
    compress = Line(draw.random(), draw.random())
    expected = step_held_up_s(units, ready[-1], CodecCost(compress, Line(0.0, 0.0)))
    assert step_time(*held_up(units, ready[-1], compress)) == pytest.approx(expected, rel=1e-12)


def test_by_hand() -> None:
    # Encode 1, rounds of 2 and 3, decode 1; ready at 0 and 4.
    units = [UnitWork(at, 1, sent(2.0, 3.0)) for at in (0.0, 4.0)]
    # The second is encoded from 4 to 5. The wire is busy until 6, and the worker waits for its first round
    # until 8. The first unit came back at 6 and is decoded from 8 on, the second one after its last round, at
    # 11.
    assert step_time(units[:1], 4.0, codec(1.0, 1.0)) == 7.0
    assert step_time(units, 4.0, codec(1.0, 1.0)) == 12.0


def test_the_worker_takes_what_was_posted_first() -> None:
    # The first unit comes back at 3. The second, ready at 2, is encoded from 2 to 4, and comes back at 5. So
    # the first one is decoded from 4 to 7, and the second from 7 to 10. Had the worker waited for the first,
    # the second would be encoded from 6 to 8, and decoded from 9 to 12.
    units = [UnitWork(0.0, 1, sent(1.0)), UnitWork(2.0, 1, sent(1.0))]
    assert step_time(units, 2.0, codec(2.0, 3.0)) == 10.0


def test_the_tail_waits_for_the_last_decoding_unless_there_is_none() -> None:
    units, vote = [UnitWork(1.0, 1, sent(2.0))], Sent(5.0)
    assert step_time(units, 1.0, codec(0.0, 1.0), tail=Tail(vote)) == 1 + 2 + 1 + 5
    assert step_time(units, 1.0, codec(0.0, 1.0), tail=Tail(vote, waits=False)) == 1 + 2 + 5
    assert step_time([], 1.0, tail=Tail(vote, waits=False)) == 1 + 5


def test_small_gradients_go_out_when_the_backward_pass_ends_and_the_status_vote_after_them() -> None:
    units, tail = [UnitWork(1.0, 1, sent(2.0))], Tail(Sent(5.0), waits=False, beside=Sent(4.0))
    assert step_time(units, 1.0, tail=tail) == 1 + 2 + 4 + 5
    assert step_time(units, 4.0, tail=tail) == 4 + 4 + 5
    assert step_time(units, 4.0, tail=tail._replace(waits=True)) == 4 + 4 + 5
    # Their last three seconds are latency: the status vote is on the wire after one.
    assert step_time(units, 4.0, tail=tail._replace(beside=Sent(4.0, 3.0))) == 4 + 1 + 5


def test_latencies_pass_side_by_side() -> None:
    far = Sent(5.0, latency_s=4.0)
    units = [UnitWork(0.0, 1, (far,)) for _ in range(3)]
    assert step_time(units, 0.0) == 1 + 1 + 5
    assert step_time(units, 0.0, tail=Tail(far, waits=False)) == 1 + 1 + 1 + 5
    assert step_time(units, 0.0, tail=Tail(far)) == 1 + 1 + 5 + 5


def test_a_unit_that_rests_costs_nothing() -> None:
    unit, resting, cost = UnitWork(1.0, 1, sent(1.0)), UnitWork(1.0, 5, ()), codec(1.0, 1.0)
    assert step_time([resting, unit, resting], 1.0, cost) == step_time([unit], 1.0, cost) == 4.0
    assert step_time([resting], 1.0, cost) == 1.0


def test_units_between_element_boundaries_are_ready_with_their_last_tensor() -> None:
    of = BackwardTiming(0.0, (1.0, 2.0, 4.0), (10, 20, 5), 4.0)
    numbers = []

    def rounds(index: int, numel: int) -> tuple[Transfer, ...]:
        numbers.append((index, numel))
        return (Transfer("shift", numel),)

    units = units_between(of, (10, 15, 31), rounds, 2, SECONDS)
    assert [unit.ready_s for unit in units] == [1.0, 2.0, 4.0, 4.0]
    assert numbers == [(0, 10), (1, 5), (2, 16), (3, 4)]
    assert element_boundaries((1, 2), of.numel) == (10, 30)
