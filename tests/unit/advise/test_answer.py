"""What is said of runs of which the cause is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire._api.plan import CANDIDATES
from gradwire.advise.answer import Advice, advise
from gradwire.advise.observed import Observed
from gradwire.advise.traces import read
from gradwire.planning.costs import CodecCost, Line
from tests.support.looped import looped
from tests.support.traces import Run

SLOW = Run()
"""16 MB in three all-reduces over 400 Mbit/s, for which a step of 0.1 s waits 0.28 s."""

FAST = replace(SLOW, byte_s=1e-10, latency_s=1e-5)
TINY = replace(SLOW, layers=(*[(512, 512)] * 40, (300,)), buckets=(1,) * 41, latency_s=5e-3, byte_s=1e-9)
QUICK = CodecCost(Line(0.0, 4e-10), Line(0.0, 1e-10))


def observed(folder: Path, *runs: Run) -> Observed:
    return read([run.write(folder / f"{run.rank}.json") for run in runs])


def of_both(folder: Path, run: Run) -> Observed:
    """Two ranks that are alike."""
    return observed(folder, run, replace(run, rank=1))


def measured(costs: Sequence[str] = CANDIDATES) -> dict[str, CodecCost]:
    return dict.fromkeys(costs, QUICK)


def test_a_slow_link_is_found_and_recipes_that_send_less_would_help(tmp_path: Path) -> None:
    found = advise(of_both(tmp_path, SLOW), codecs=measured())
    assert (found.bound, found.step_s) == ("bandwidth", pytest.approx(SLOW.step_s))
    assert found.rate_bit_per_s == pytest.approx(8.0 / SLOW.byte_s, rel=0.02)
    assert found.exposed_s == pytest.approx(SLOW.exposed_s)
    helps = {gain.change: gain for gain in found.would_help}
    # A quarter of the bytes: what is exposed shrinks to less than 0.08 s.
    assert helps["int8"].low < SLOW.step_s / (SLOW.step_s - SLOW.exposed_s + 0.06) < helps["int8"].high
    assert helps["int8"].high < 1.4 * helps["int8"].low
    assert found.write == 'wire = gradwire.attach(model, optimizer, "int4")'
    said = " ".join(str(found).split())
    assert "step 372 ms: compute" not in said  # the step's own numbers are in rows
    assert "16 MB in 3 calls, 400 Mbit/s" in said
    assert "bound by bandwidth between ranks (latency" in said


def test_nothing_would_help_on_a_fast_link(tmp_path: Path) -> None:
    found = advise(of_both(tmp_path, FAST), codecs=measured())
    assert (found.bound, found.would_help, found.write) == ("computing", (), "")
    assert "nothing of gradwire's: computing itself" in " ".join(str(found).split())


def test_a_slow_input_pipeline_is_named_first(tmp_path: Path) -> None:
    found = advise(of_both(tmp_path, replace(SLOW, input_s=0.4)))
    assert found.bound == "input"
    assert found.input_s == pytest.approx(0.4)
    assert "bound by the input pipeline: a step waits 400 ms for data" in " ".join(str(found).split())


def test_a_slow_rank_is_named_first(tmp_path: Path) -> None:
    late = replace(FAST, rank=1, forward_s=FAST.forward_s + 0.2)
    found = advise(observed(tmp_path, replace(FAST, waits_s=0.2), late))
    assert found.bound == "late rank"
    assert "rank 1 is 200 ms late" in str(found)
    assert found.exposed_s == pytest.approx(FAST.exposed_s)
    assert not found.would_help


def test_one_rank_alone_cannot_tell_the_network_from_a_late_rank(tmp_path: Path) -> None:
    found = advise(observed(tmp_path, replace(FAST, waits_s=0.2)))
    said = " ".join(str(found).split())
    assert "or a rank that is late" in said
    assert "traces of all ranks" in said


def test_tiny_buckets_are_named_first_and_cost_nothing_to_mend(tmp_path: Path) -> None:
    found = advise(of_both(tmp_path, TINY))
    assert found.bound == "buckets"
    [first, *_] = found.free
    assert first.change.startswith("bucket_cap_mb=")
    assert first.times > 1.5
    assert "41 all-reduces of 1.02 MB" in str(found)


def test_a_link_below_its_rate_is_named_if_the_rate_is_stated(tmp_path: Path) -> None:
    run = of_both(tmp_path, SLOW)
    found = advise(run, rate_bit_per_s=4e9)
    assert found.bound == "link rate"
    assert "a link below its rate: 400 Mbit/s of 4 Gbit/s" in " ".join(str(found).split())
    assert advise(replace(run, card_bit_per_s=4e9)).bound == "link rate"
    assert "assumed by its card" in " ".join(str(advise(replace(run, card_bit_per_s=4e9))).split())
    assert "below" not in advise(run).bound_by


def test_gradients_that_are_sent_in_each_pass_are_named_first(tmp_path: Path) -> None:
    found = advise(replace(of_both(tmp_path, SLOW), passes=4.0))
    assert found.bound == "no_sync"
    assert found.free[0].change.startswith("no_sync()")


def test_costs_that_were_not_measured_are_marked_and_widen_the_range(tmp_path: Path) -> None:
    run = of_both(tmp_path, SLOW)
    known, assumed = (
        {each.change: each for each in advise(run, codecs=costs).would_help} for costs in (measured(), {})
    )
    assert not known["int8"].assumed
    assert assumed["int8"].assumed
    width = {
        name: gains["int8"].high / gains["int8"].low
        for name, gains in (("known", known), ("assumed", assumed))
    }
    assert width["assumed"] > width["known"]
    assert "assumed" in str(advise(run))


@looped(
    ("change", "said"),
    [
        ({"world": 1}, "there is one rank"),
        ({"world": 0}, "number of ranks"),
        ({"buckets": ()}, "sizes of gradients"),
        ({"hook": "allreduce_hook"}, "a comm hook is registered (allreduce_hook)"),
        ({"wrapper": "FSDP2"}, "nothing is predicted for FSDP2"),
    ],
)
def test_it_says_why_nothing_is_predicted(tmp_path: Path, change: dict[str, object], said: str) -> None:
    found = advise(replace(of_both(tmp_path, SLOW), **change))  # type: ignore[arg-type]
    assert not found.would_help
    assert said in found.why_not


def test_ranks_that_take_turns_at_being_late_do_not_make_the_network_slower(tmp_path: Path) -> None:
    """In each step another rank waits for the other."""
    run = of_both(tmp_path, SLOW)
    ranks = []
    for rank in run.ranks:
        waits_s = [0.1 * ((place + rank.rank) % 2) for place in range(len(rank.steps))]
        steps = tuple(
            replace(step, step_s=step.step_s + 0.1, exposed_s=step.exposed_s + more_s)
            for step, more_s in zip(rank.steps, waits_s, strict=True)
        )
        ranks.append(replace(rank, steps=steps))
    found = advise(replace(run, ranks=tuple(ranks)), codecs=measured())
    assert found.exposed_s == pytest.approx(SLOW.exposed_s)
    assert found.rate_bit_per_s == pytest.approx(8.0 / SLOW.byte_s, rel=0.02)


def test_codecs_and_collectives_take_longer_on_cores_that_compute(tmp_path: Path) -> None:
    run = replace(of_both(tmp_path, SLOW), latency_s=1e-4)
    gains = {}
    for cores in (0.5, 64.0, None):
        found = advise(replace(run, cores_per_rank=cores), codecs=measured())
        [gains[cores]] = [gain for gain in found.would_help if gain.change == "int4"]
    assert gains[0.5].times < 0.95 * gains[64.0].times
    # A trace does not say how many there are.
    assert gains[0.5].times < gains[None].times <= gains[64.0].times


def test_a_latency_that_nothing_tells_is_assumed_and_widens_the_range(tmp_path: Path) -> None:
    run = replace(of_both(tmp_path, replace(SLOW, buckets=(8,))), cores_per_rank=64.0)
    found, known = (advise(each, codecs=measured()) for each in (run, replace(run, latency_s=0.0)))
    assert "the latency of a message was not found: 0.3 to 3 ms are assumed" in str(found)
    assert "latency of a message" not in str(known)
    wide, narrow = ({each.change: each for each in advice.would_help} for advice in (found, known))
    assert wide["int4"].high / wide["int4"].low > narrow["int4"].high / narrow["int4"].low


def test_what_recording_took_is_not_in_a_step_that_is_not_recorded(tmp_path: Path) -> None:
    run = replace(of_both(tmp_path, SLOW), latency_s=1e-4)
    recorded = advise(replace(run, recording_s=0.03), codecs=measured())
    assert "recording took about 30 ms of a step" in str(recorded)
    assert recorded.step_s == advise(run).step_s
    found, same = (
        {each.change: each.times for each in advice.would_help}
        for advice in (recorded, advise(run, codecs=measured()))
    )
    # Less of a step is computing, which no recipe makes shorter.
    assert found["int4"] > 1.05 * same["int4"]


def test_all_reduces_that_do_not_carry_the_gradients_are_not_those_of_plain_ddp(tmp_path: Path) -> None:
    """As with a comm hook that sends 16 bits."""
    run = of_both(tmp_path, TINY)
    found = advise(replace(run, buckets=tuple(size / 2 for size in run.buckets)))
    assert not found.would_help
    assert not found.free
    assert "carry 21 MB and gradients have 41.9 MB. So this is not plain DDP" in found.why_not


def test_calls_that_were_not_recorded_are_not_shown(tmp_path: Path) -> None:
    run = of_both(tmp_path, SLOW)
    assert "in 3 calls" in str(advise(run))
    assert "call" not in str(advise(replace(run, calls=0.0, buckets=()))).splitlines()[0]


def test_the_document_has_all_numbers(tmp_path: Path) -> None:
    found: Advice = advise(of_both(tmp_path, SLOW))
    document = found.as_dict()
    assert document["would_help"][0]["change"] == found.would_help[0].change
    assert {"step_s", "exposed_s", "input_s", "late_s", "bound", "causes", "write"} <= document.keys()
