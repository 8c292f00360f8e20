"""What adaptive recipes make of facts."""

from __future__ import annotations

import pytest
import torch

from gradwire.comm import Round
from gradwire.moment import Moment
from gradwire.planning.facts import Facts
from gradwire.recipes import Composition, recipe


def _decided(text: str, ccr: float, world: int = 4) -> Composition:
    decision = recipe(text).build().next
    assert decision is not None
    return decision.decide(Facts(backward_s=0.1, allreduce_s=0.1 * ccr, world=world))


@pytest.mark.parametrize(
    ("ccr", "chosen"),
    [
        (0.0, "dense"),
        (0.5, "dense"),
        (1.05, "dense"),
        (1.06, "fp16"),
        (2.1, "fp16"),
        (4.0, "leader_topk(ratio=0.2619, elect='round_robin', values='fp16', beta=1.0)"),
        (5.56, "leader_topk(ratio=0.1822, elect='round_robin', values='fp16', beta=1.0)"),
        (8.0, "leader_topk(ratio=0.1222, elect='round_robin', values='fp16', beta=1.0)"),
    ],
)
def test_auto_takes_the_least_compression_that_reaches_95_percent(ccr: float, chosen: str) -> None:
    assert _decided("auto", ccr).text == chosen


@pytest.mark.parametrize(
    ("ccr", "chosen"),
    [
        (2.1, "fp16"),
        (2.2, "int8(block=256, feedback=True, collective='all_gather')"),
        (2.89, "int8(block=256, feedback=True, collective='all_gather')"),
        (2.91, "int4(block=128, feedback=True, collective='all_gather')"),
        (5.54, "int4(block=128, feedback=True, collective='all_gather')"),
        (5.56, "topk(ratio=0.1822, values='fp16', reuse=False)"),
    ],
)
def test_auto_lets_two_ranks_send_all_elements_while_few_bits_suffice(ccr: float, chosen: str) -> None:
    assert _decided("auto", ccr, world=2).text == chosen


def test_auto_lets_two_ranks_choose_for_themselves_at_the_same_cost() -> None:
    alone, led = _decided("auto", 8.0, world=2), _decided("auto", 8.0, world=3)
    assert alone.text == "topk(ratio=0.1222, values='fp16', reuse=False)"
    at, kind = Moment(0, 0, 0, 2), torch.float32
    cost = [sum(r.wire_bytes(2) for r in each.exchange.rounds(10**6, kind, at)) for each in (alone, led)]
    assert cost[0] == pytest.approx(cost[1], abs=8)  # padding


def test_auto_takes_less_compression_when_less_is_enough() -> None:
    assert _decided("auto(target=0.5)", 1.9).text == "dense"
    assert _decided("auto(target=1.0)", 1.01).text == "fp16"


def test_auto_keeps_the_wire_busy_for_six_tenths_of_the_backward_pass() -> None:
    numel, world = 1_000_000, 4
    dense_bytes = Round("all_reduce", numel, torch.float32).wire_bytes(world)
    for ccr in (2.2, 3.0, 10.0, 30.0, 45.0, 100.0):
        exchange = _decided("auto(target=1.0)", ccr).exchange
        rounds = exchange.rounds(numel, torch.float32, Moment(0, 0, 0, world))
        sent = sum(each.wire_bytes(world) for each in rounds) / dense_bytes
        # The ratio is rounded to 4 digits, and an element kept costs less than 4 bytes of 4.
        assert sent == pytest.approx(0.6 / ccr, abs=1e-4)


@pytest.mark.parametrize("text", ["auto", "covap"])
@pytest.mark.parametrize("ccr", [1e3, 1e5, 1e8])
def test_an_absurd_ratio_still_gives_something_that_runs(text: str, ccr: float) -> None:
    composition = _decided(text, ccr)
    assert len(composition.cutter((100_000,))) < 100_000
    assert isinstance(recipe(composition.text).build(), Composition)


@pytest.mark.parametrize(
    ("ccr", "interval"), [(0.3, 1), (1.04, 1), (1.06, 2), (3.06, 4), (4.01, 4), (5.2, 6)]
)
def test_covap_takes_the_ceiling_of_the_ratio(ccr: float, interval: int) -> None:
    assert _decided("covap", ccr).text == f"covap(interval={interval})"


def test_covap_says_once_when_gradients_get_stale(caplog: pytest.LogCaptureFixture) -> None:
    assert "stale" in _decided("covap", 5.5).why
    assert [each.levelname for each in caplog.records] == ["WARNING"]
    assert "gradients get stale: CCR 5.50 needs every unit only each 6" in caplog.text


@pytest.mark.parametrize("ccr", [4.0, 5.0])
def test_covap_says_nothing_up_to_five(ccr: float, caplog: pytest.LogCaptureFixture) -> None:
    assert "stale" not in _decided("covap", ccr).why
    assert not caplog.records


def test_who_asks_for_a_long_interval_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(recipe("covap(interval=9)").build(), Composition)
    assert not caplog.records


def test_a_decision_gives_its_reason_in_numbers() -> None:
    assert _decided("auto", 4.0).why.startswith("CCR 4.00 (all-reduce 400 ms, backward 100 ms)")
    assert "CCR 4.00" in _decided("covap", 4.0).why
