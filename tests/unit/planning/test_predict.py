"""The predicted step: against clockwork, against the papers' formulas, and by hand."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from gradwire.planning.collectives import Transfer
from gradwire.planning.costs import BackwardTiming, CodecCost, Line, Link, Network
from gradwire.planning.cuts import element_cuts
from gradwire.planning.predict import Tail, UnitWork, predict
from tests.support.planning_problems import units_between
from tests.unit.planning.ticking import Clockwork, Unit

SECONDS = Network(Link(0.0, 1.0))
"""A shift of n bytes takes n seconds."""


def shift(seconds: float) -> Transfer:
    return Transfer("shift", seconds)


def fixed(encode_s: float, decode_s: float) -> CodecCost:
    return CodecCost(Line(encode_s, 0.0), Line(decode_s, 0.0))


def as_work(unit: Unit) -> UnitWork:
    rounds = tuple(Transfer("shift", s + unit.latency, latency_s=unit.latency) for s in unit.rounds)
    return UnitWork(unit.ready, 1, rounds, fixed(unit.encode, unit.decode))


@pytest.mark.parametrize("seed", range(20))
def test_as_clockwork_has_it(seed: int) -> None:
    draw = Random(seed)
    for _ in range(10):
        number = draw.randint(1, 8)
        ready = sorted(draw.randint(0, 20) for _ in range(number))
        units = [
            Unit(
                at,
                draw.randint(0, 4),
                [draw.randint(1, 6) for _ in range(draw.randint(1, 3))],
                draw.randint(0, 4),
                draw.choice((0, 0, 3, 9)),
            )
            for at in ready
        ]
        assert predict([as_work(unit) for unit in units], 0.0, 2, SECONDS).step_s == Clockwork(units).run()


@pytest.mark.parametrize("seed", range(20))
def test_dense_overlap_is_covaps_equation_3(seed: int) -> None:
    draw = Random(seed)
    before, computed = draw.random(), [draw.random() for _ in range(7)]
    sent = [draw.random() for _ in range(7)]
    ready = [sum(computed[: i + 1]) for i in range(7)]
    # bubble_i: how long the wire then waits for the next tensor.
    bubbles, free = [], 0.0
    for at, seconds, then in zip(ready, sent, [*ready[1:], 0.0], strict=True):
        free = max(free, at) + seconds
        bubbles.append(max(0.0, then - free))
    hidden = max(
        sum(computed[1:]), sum(s + bubble for s, bubble in zip(sent[:-1], bubbles[:-1], strict=True))
    )
    equation_3 = before + computed[0] + sent[-1] + hidden
    units = [UnitWork(at, 1, (shift(s),)) for at, s in zip(ready, sent, strict=True)]
    assert predict(units, ready[-1], 2, SECONDS, before_s=before).step_s == pytest.approx(equation_3)


def test_a_longer_communication_hides_all_but_the_rest() -> None:
    # COVAP, equation 4: T' = (CCR − 1)·T_comp, in the limit of many small units.
    units = [UnitWork((i + 1) / 1000, 1, (shift(2.5 / 1000),)) for i in range(1000)]
    step = predict(units, 1.0, 2, SECONDS)
    assert step.exposed_s == pytest.approx(1.5, abs=2 / 1000)
    assert step.share_of_linear == pytest.approx(1 / 2.5, rel=2 / 1000)


def test_by_hand() -> None:
    # Encode 1, rounds of 2 and 3, decode 1; ready at 0 and 4.
    units = [UnitWork(at, 1, (shift(2.0), shift(3.0)), fixed(1.0, 1.0)) for at in (0.0, 4.0)]
    step = predict(units, 4.0, 2, SECONDS, before_s=10.0)
    spans = [(span.what, span.unit, span.start_s - 10, span.stop_s - 10) for span in step.spans[1:]]
    assert spans == [
        ("encode", 0, 0.0, 1.0),
        ("wire", 0, 1.0, 3.0),
        ("wire", 0, 3.0, 6.0),
        ("encode", 1, 4.0, 5.0),
        ("wire", 1, 6.0, 8.0),  # the wire was busy; the worker waits for it until 8
        ("wire", 1, 8.0, 11.0),
        ("decode", 0, 8.0, 9.0),
        ("decode", 1, 11.0, 12.0),
    ]
    assert (step.step_s, step.compute_s, step.exposed_s) == (22.0, 14.0, 8.0)
    assert (step.busy_s("wire"), step.busy_s("decode")) == (10.0, 2.0)


def test_the_worker_takes_what_was_posted_first() -> None:
    # The first unit comes back at 3; the second, ready at 2, is under way until 4.
    units = [
        UnitWork(0.0, 1, (shift(2.0),), fixed(1.0, 1.0)),
        UnitWork(2.0, 1, (shift(1.0),), fixed(2.0, 1.0)),
    ]
    spans = predict(units, 2.0, 2, SECONDS).spans
    assert [(span.what, span.unit) for span in spans if span.what in ("encode", "decode")] == [
        ("encode", 0),
        ("encode", 1),
        ("decode", 0),
        ("decode", 1),
    ]


def test_the_tail_waits_for_the_last_decoding_unless_there_is_none() -> None:
    units = [UnitWork(1.0, 1, (shift(2.0),), fixed(0.0, 1.0))]
    assert predict(units, 1.0, 2, SECONDS, tail=Tail(shift(5.0))).step_s == 1 + 2 + 1 + 5
    assert predict(units, 1.0, 2, SECONDS, tail=Tail(shift(5.0), waits=False)).step_s == 1 + 2 + 5
    assert predict([], 1.0, 2, SECONDS, tail=Tail(shift(5.0), waits=False)).step_s == 1 + 5


def test_latencies_pass_side_by_side() -> None:
    far = Transfer("shift", 5.0, latency_s=4.0)
    units = [UnitWork(0.0, 1, (far,)) for _ in range(3)]
    assert predict(units, 0.0, 2, SECONDS).step_s == 1 + 1 + 5
    assert predict(units, 0.0, 2, SECONDS, tail=Tail(far, waits=False)).step_s == 1 + 1 + 1 + 5
    assert predict(units, 0.0, 2, SECONDS, tail=Tail(far)).step_s == 1 + 1 + 5 + 5


def test_decoding_everybodys_payload_takes_as_many_times_as_long() -> None:
    codec = CodecCost(Line(0.0, 0.0), Line(0.5, 0.01))
    for decodes in (1, 4, 5):
        unit = UnitWork(0.0, 100, (shift(1.0),), codec, decodes)
        assert predict([unit], 0.0, 2, SECONDS).step_s == 1.0 + decodes * 1.5


def test_a_unit_that_rests_costs_nothing() -> None:
    sent, resting = UnitWork(1.0, 1, (shift(1.0),), fixed(1.0, 1.0)), UnitWork(1.0, 9, (), fixed(5.0, 5.0))
    assert predict([resting, sent, resting], 1.0, 2, SECONDS) == predict([resting, sent], 1.0, 2, SECONDS)
    assert predict([resting], 1.0, 2, SECONDS).exposed_s == 0.0


def test_nothing_runs_twice_at_a_time() -> None:
    draw = Random(4)
    units = [
        UnitWork(
            i / 10, 1, tuple(shift(draw.random()) for _ in range(2)), fixed(draw.random(), draw.random())
        )
        for i in range(20)
    ]
    step = predict(units, 3.0, 2, SECONDS, tail=Tail(shift(0.5)))
    for resource in (("wire",), ("encode", "decode"), ("backward",)):
        spans = sorted((span.start_s, span.stop_s) for span in step.spans if span.what in resource)
        assert all(a[1] <= b[0] + 1e-12 for a, b in pairwise(spans)), resource
    assert step.step_s == max(span.stop_s for span in step.spans)


def test_units_between_element_cuts_are_ready_with_their_last_tensor() -> None:
    of = BackwardTiming(0.0, (1.0, 2.0, 4.0), (10, 20, 5), 4.0)
    numbers = []

    def rounds(index: int, numel: int) -> tuple[Transfer, ...]:
        numbers.append((index, numel))
        return (shift(numel),)

    units = units_between(of, (10, 15, 31), rounds)
    assert [unit.ready_s for unit in units] == [1.0, 2.0, 4.0, 4.0]
    assert numbers == [(0, 10), (1, 5), (2, 16), (3, 4)]
    assert element_cuts((1, 2), of.numel) == (10, 30)
