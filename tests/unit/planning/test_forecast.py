"""What a forecast becomes where codecs run elsewhere, or on cores that are not theirs alone."""

from __future__ import annotations

import pytest

from gradwire.planning.costs import ENOUGH, BackwardTiming, CodecCost, Cores, Line
from gradwire.planning.step_time import BYTE_S, CALL_S, Forecast, Sent, Tail, UnitWork

CODEC = CodecCost(Line(0.75, 0.0), Line(0.25, 0.0))


def test_decoding_everybodys_payload_takes_as_many_times_as_long() -> None:
    backward = BackwardTiming(0.0, (0.0,), (100,), 0.0)
    for decodes in (1.0, 4.0, 5.0):
        forecast = Forecast(
            backward,
            ((UnitWork(0.0, 100, (Sent(1.0),)),),),
            Tail(Sent(0.0)),
            0.0,
            0.0,
            0.0,
            at_most=False,
            codec=CodecCost(Line(0.0, 0.0), Line(0.5, 0.01)),
            decodes=decodes,
        )
        assert forecast.step_s() == 1.0 + decodes * 1.5


def _forecast(cores: Cores = ENOUGH, codec: CodecCost = CODEC) -> Forecast:
    """Backward 2 s after 1 s; two units of a second on the wire each, and two calls."""
    return Forecast(
        BackwardTiming(1.0, (1.0, 2.0), (10, 10), 2.0),
        (tuple(UnitWork(ready_s, 10, (Sent(1.0),)) for ready_s in (1.0, 2.0)),),
        Tail(Sent(0.0)),
        wire_bytes=1e8,
        node_bytes=0.0,
        memory_bytes=0.0,
        at_most=False,
        calls=2.0,
        codec=codec,
        cores=cores,
    )


def test_a_step_takes_at_least_the_processor_time_of_all_that_it_does_on_its_cores() -> None:
    """Four ranks on two cores: computing keeps half a core busy, so two more seconds of work take four."""
    work_s = 2 * (0.75 + 0.25) + 2 * CALL_S + 1e8 * BYTE_S
    few = _forecast(Cores(share=0.5, busy=0.5))
    assert few.work_s == pytest.approx(work_s, rel=1e-12)
    assert few.step_s() == pytest.approx(1.0 + (0.5 * 2.0 + work_s) / 0.5, rel=1e-12)
    assert few.step_s(2.0) == pytest.approx(2.0 + (0.5 * 4.0 + work_s) / 0.5, rel=1e-12)


def test_collectives_that_were_found_to_be_dear_make_a_step_longer_and_codecs_no_dearer() -> None:
    """Processor time of collectives was measured: three times what is assumed."""
    assumed, dear = (_forecast(Cores(share=0.5, busy=0.5, overhead_factor=each)) for each in (1.0, 3.0))
    more_s = 2 * (2 * CALL_S + 1e8 * BYTE_S)
    assert dear.work_s == pytest.approx(assumed.work_s + more_s, rel=1e-12)
    assert dear.step_s() == pytest.approx(assumed.step_s() + more_s / 0.5, rel=1e-12)


def test_codecs_of_ranks_that_share_cores_slow_each_other_down_though_computing_leaves_these_free() -> None:
    """Computation that sleeps: at two ranks per core a codec takes twice as long."""
    asleep, twice = _forecast(Cores(share=0.5, busy=0.0)), _forecast(codec=CODEC.slowed(2.0))
    assert asleep.step_s() == twice.step_s() > _forecast().step_s()


def test_with_a_core_to_spare_nothing_is_slower() -> None:
    assert _forecast(Cores(share=4.0, busy=1.0)).step_s() == _forecast().step_s()
