"""What is said of runs of which the cause is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwire._api.plan import CANDIDATES
from gradwire.advise.answer import Advice, Gain, advise
from gradwire.advise.observed import Late, Observed, ObservedStep, RankSteps
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


def kind(gain: Gain) -> str:
    """The recipe's name, without its form."""
    return gain.change.partition("(")[0]


def test_a_slow_link_is_found_and_recipes_that_send_less_would_help(tmp_path: Path) -> None:
    found = advise(of_both(tmp_path, SLOW), codecs=measured())
    assert (found.bound, found.step_s) == ("bandwidth", pytest.approx(SLOW.step_s))
    assert found.rate_bit_per_s == pytest.approx(8.0 / SLOW.byte_s, rel=0.02)
    assert found.exposed_s == pytest.approx(SLOW.exposed_s)
    helps = {kind(gain): gain for gain in found.would_help}
    # A quarter of the bytes: what is exposed shrinks to less than 0.08 s.
    assert helps["int8"].low < SLOW.step_s / (SLOW.step_s - SLOW.exposed_s + 0.06) < helps["int8"].high
    assert helps["int8"].high < 1.4 * helps["int8"].low
    # auto tries these on the model itself: one of them may leave more of its gradient late than it allows.
    assert found.write == "wire = gradwire.attach(model, optimizer)"
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
    said = " ".join(str(found).split())
    assert (
        "bound by the input pipeline: a step waits 400 ms for data first give the DataLoader more workers"
        in said
    )
    assert "would help" in said


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


def test_a_link_below_its_rate_comes_before_any_recipe(tmp_path: Path) -> None:
    found = advise(of_both(tmp_path, SLOW), rate_bit_per_s=4e9)
    [first, *_] = found.free
    assert first.change == "the link at its rate"
    assert first.low < SLOW.step_s / replace(SLOW, byte_s=2e-9).step_s < first.high
    said = " ".join(str(found).split())
    begins, helps = said.index(" first find out why the link is slow"), said.index(" would help ")
    assert begins < said.index("the link at its rate, about 3.") < helps


def test_gradients_that_are_sent_in_each_pass_are_named_first(tmp_path: Path) -> None:
    found = advise(replace(of_both(tmp_path, SLOW), passes=4.0))
    assert found.bound == "no_sync"
    assert found.free[0].change.startswith("no_sync()")


def test_costs_that_were_not_measured_are_marked_and_widen_the_range(tmp_path: Path) -> None:
    run = of_both(tmp_path, SLOW)
    known, assumed = (
        {kind(each): each for each in advise(run, codecs=costs).would_help} for costs in (measured(), {})
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
        [gains[cores]] = [gain for gain in found.would_help if kind(gain) == "int4"]
    assert gains[0.5].times < 0.95 * gains[64.0].times
    # A trace does not say how many there are.
    assert gains[0.5].times < gains[None].times <= gains[64.0].times


def test_a_latency_that_nothing_tells_is_assumed_and_widens_the_range(tmp_path: Path) -> None:
    run = replace(of_both(tmp_path, replace(SLOW, buckets=(8,))), cores_per_rank=64.0)
    found, known = (advise(each, codecs=measured()) for each in (run, replace(run, latency_s=0.0)))
    assert "the latency of a message was not found: 0.3 to 3 ms are assumed" in str(found)
    assert "latency of a message" not in str(known)
    wide, narrow = ({kind(each): each for each in advice.would_help} for advice in (found, known))
    assert wide["int4"].high / wide["int4"].low > narrow["int4"].high / narrow["int4"].low


def test_what_recording_took_is_not_in_a_step_that_is_not_recorded(tmp_path: Path) -> None:
    run = replace(of_both(tmp_path, SLOW), latency_s=1e-4)
    recorded = advise(replace(run, recording_s=0.03), codecs=measured())
    assert "recording took about 30 ms of a step" in str(recorded)
    assert recorded.step_s == advise(run).step_s
    found, same = (
        {kind(each): each.times for each in advice.would_help}
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
    first, without = (
        " ".join(str(advise(each)).split("bound by")[0].split())
        for each in (run, replace(run, calls=0.0, buckets=()))
    )
    assert "in 3 calls" in first
    assert "call" not in without


def test_the_document_has_all_numbers(tmp_path: Path) -> None:
    found: Advice = advise(of_both(tmp_path, SLOW))
    document = found.as_dict()
    assert document["would_help"][0]["change"] == found.would_help[0].change
    assert {"step_s", "exposed_s", "input_s", "late_s", "bound", "causes", "write"} <= document.keys()


def made_up(*ranks: Sequence[tuple[float, ...]], **of_run: Any) -> Observed:
    """Ranks that were watched. Each step has (step, input, exposed, optimizer, between) in milliseconds.
    Gradients of 4 MB are in one all-reduce unless `of_run` says otherwise.
    """
    seen = []
    for rank, steps in enumerate(ranks):
        times = ([1e-3 * each for each in step] for step in steps)
        steps_s = (
            ObservedStep(a, b, 0.4 * a, 0.1 * a, c, optimizer_s=d, between_s=e) for a, b, c, d, e in times
        )
        seen.append(RankSteps(rank, tuple(steps_s)))
    run = {"world": len(ranks), "buckets": (4e6,), "calls": 1.0, "latency_s": 1e-4}
    return Observed("made up", "DDP", "gloo", ranks=tuple(seen), **{**run, **of_run})


def test_a_rank_that_is_late_by_turns_is_not_named() -> None:
    """A random one of two ranks is 60 ms late in each step: medians over steps would name rank 1."""
    slow = [int(mark) for mark in "01101110010110101011"]
    own, other = (160.0, 0.0, 12.0, 5.0, 0.0), (160.0, 0.0, 72.0, 5.0, 0.0)
    found = advise(made_up(*([own if late == rank else other for late in slow] for rank in (0, 1))))
    assert (found.bound, found.late_s) == ("late ranks", pytest.approx(0.06))
    assert found.exposed_s == pytest.approx(0.012)
    assert "one rank" not in str(found)
    assert "the last rank is 60 ms late, rank 1 in 12 of 20 steps" in found.bound_by
    assert "a machine like the others" not in found.why_not


@looped(
    ("times", "steps", "is_one"),
    [(20, 20, True), (16, 20, True), (15, 20, False), (5, 5, True), (4, 5, False), (550, 1000, False)],
)
def test_a_rank_is_late_if_it_is_the_last_in_nearly_all_steps(times: int, steps: int, is_one: bool) -> None:
    assert Late(0, 0.1, times, steps).is_one == is_one


def test_the_input_of_the_late_rank_is_named() -> None:
    quick, slow = (150.0, 4.0, 122.0, 3.0, 0.0), (150.0, 116.0, 10.0, 3.0, 0.0)
    found = advise(made_up([quick] * 8, [slow] * 8))
    assert found.bound == "late rank"
    assert found.bound_by.startswith(
        "one rank: rank 1 is 112 ms late, and all others wait for it; it waits 112 ms"
    )
    assert "give the DataLoader more workers" in found.why_not
    busy = advise(made_up([quick] * 8, [(150.0, 4.0, 10.0, 3.0, 112.0)] * 8))
    assert "it spends 112 ms longer between steps" in busy.bound_by
    assert "DataLoader" not in busy.why_not


def test_work_between_steps_has_nothing_to_do_with_a_loader() -> None:
    found = advise(made_up(*[[(200.0, 0.0, 5.0, 5.0, 120.0)] * 8] * 2))
    assert found.bound == "between"
    assert "optimizer.step() and the next forward pass" in found.why_not
    assert "workers" not in str(found)
    assert "between steps 120" in str(found)


def test_a_sixth_of_a_step_is_no_bound() -> None:
    found = advise(made_up(*[[(6.0, 0.0, 0.3, 0.2, 1.0)] * 8] * 2))
    assert found.bound == "computing"
    assert found.bound_by == "computing; 5% of a step waits for the network, 17% is work between steps"


def test_an_optimizer_that_takes_most_of_a_step_is_named() -> None:
    found = advise(made_up(*[[(154.0, 0.0, 45.0, 80.0, 0.0)] * 8] * 2))
    assert (found.bound, found.optimizer_s) == ("optimizer", pytest.approx(0.08))
    assert "optimizer 80" in str(found)
    usual = advise(made_up(*[[(154.0, 0.0, 45.0, 10.0, 0.0)] * 8] * 2))
    assert usual.bound == "bandwidth"


@pytest.mark.parametrize("delay_s", [1e-5, 2e-2])
def test_ten_numbers_tell_no_rate(delay_s: float) -> None:
    run = made_up(*[[(92.0, 0.0, 85.0, 0.1, 0.0)] * 8] * 2, buckets=(48.0,), latency_s=delay_s)
    for found in (advise(run), advise(run, rate_bit_per_s=1e9)):
        assert (found.bound, found.rate_bit_per_s) == ("latency", None)
        assert "1 all-reduce of 48 B. So few bytes do not tell" in found.bound_by
        assert "bit/s" not in str(found)
        assert "exchange less often" in found.why_not


def test_what_gradwire_waits_for_is_not_called_computing() -> None:
    run = made_up(*[[(177.0, 2.0, 0.0, 8.0, 90.0)] * 8] * 2, hook="gradwire.attach", is_blind=True)
    found = advise(run)
    assert (found.bound, found.compute_s, found.exposed_s) == ("unknown", None, None)
    assert "print(wire.report())" in found.bound_by
    assert "compute " not in str(found)
    assert "between steps" not in str(found)
    assert not found.would_help
    # A DataLoader is timed itself.
    slow = made_up(*[[(177.0, 120.0, 0.0, 8.0, 0.0)] * 8] * 2, hook="mine", is_blind=True)
    assert advise(slow).bound == "input"
    assert "the script has registered a comm hook (mine)" in advise(slow).why_not


def test_fewer_bits_of_a_hook_of_torch_tell_the_rate() -> None:
    half = advise(
        made_up(*[[(100.0, 0.0, 50.0, 0.0, 0.0)] * 8] * 2, buckets=(2e6,), hook="fp16_compress_hook")
    )
    assert half.bound == "bandwidth"
    assert half.rate_bit_per_s == pytest.approx(8 * 2e6 / 0.05, rel=0.05)
    assert half.write == ""
    other = advise(made_up(*[[(100.0, 0.0, 50.0, 0.0, 0.0)] * 8] * 2, buckets=(), hook="powerSGD_hook"))
    assert other.bound == "hook"
    assert "what it computes, and what it sends" in other.bound_by


def test_a_network_of_which_little_is_known_is_not_called_slow() -> None:
    found = advise(made_up(*[[(100.0, 0.0, 50.0, 0.0, 0.0)] * 8] * 2, buckets=()))
    assert found.bound == "network"
    assert found.why_not.startswith("cannot tell: ")
