"""What `auto` makes of a link, of a dense step's time, and of the gradient's type."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gradwire.comm import Round
from gradwire.moment import Moment
from gradwire.planning.costs import Backward, Link, Network
from gradwire.planning.facts import Facts
from gradwire.recipes import Composition, recipe
from gradwire.recipes.auto import candidates, predicted

NUMEL = (10_000, 40_000, 200_000, 50_000)
BACKWARD_S = 0.02


def _facts(
    alpha_s: float, mbit_per_s: float, world: int = 3, numel: tuple[int, ...] = NUMEL, itemsize: int = 4
) -> Facts:
    """Of a model in one bucket, ready evenly. Nothing of its all-reduce hides, but the verdict beside it."""
    link = Link(alpha_s, 8e-6 / mbit_per_s)
    allreduce_s = 2 * (world - 1) * (alpha_s + itemsize * sum(numel) / world * link.beta_s)
    ready_s = tuple(BACKWARD_S * (number + 1) / len(numel) for number in range(len(numel)))
    return Facts(
        BACKWARD_S,
        allreduce_s,
        world,
        Backward(0.5, ready_s, numel, BACKWARD_S),
        Network(link),
        collectives_s=(allreduce_s,),
        dense_s=BACKWARD_S + allreduce_s,
        gradient_bytes=float(itemsize * sum(numel)),
        buckets=(sum(numel),),
    )


def _decided(facts: Facts, text: str = "auto") -> Composition:
    decision = recipe(text).build().next
    assert decision is not None
    return decision.decide(facts)


def _name(composition: Composition) -> str:
    return composition.text.split("(")[0]


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("alpha_s", [1e-3, 20e-3])
def test_on_a_link_of_latency_alone_a_tiny_model_stays_dense(world: int, alpha_s: float) -> None:
    facts = _facts(alpha_s, 1e6, world, numel=(500, 1000, 200))
    facts = replace(facts, backward_s=facts.allreduce_s / 5)
    assert _decided(replace(facts, network=None)).text != "dense", "by CCR alone"
    chosen = _decided(facts)
    assert chosen.text == "dense"
    assert chosen.watch is None


def test_what_is_not_predicted_to_be_faster_is_skipped_and_the_next_is_asked() -> None:
    """Two rounds of a leader's choice take twice the latency of the two of int4 by all-to-all."""
    facts = _facts(alpha_s=2e-3, mbit_per_s=50.0, numel=(2500, 10_000, 50_000, 12_500))
    chosen = _decided(facts)
    assert _name(_decided(replace(facts, dense_s=None))) == "leader_topk", "by CCR alone"
    assert _name(chosen) == "int4"
    expected_s = predicted(chosen, facts)
    assert expected_s is not None
    assert facts.dense_s is not None
    assert expected_s < facts.dense_s
    told = f"predicted to take {expected_s * 1e3:.0f} ms where dense takes {facts.dense_s * 1e3:.0f} ms"
    assert chosen.why.endswith(told)


def test_where_bytes_are_all_that_counts_the_first_candidate_is_taken() -> None:
    facts = _facts(alpha_s=0.0, mbit_per_s=50.0)
    assert _name(_decided(facts)) == "leader_topk"
    assert _name(_decided(replace(facts, world=2))) == "topk"


def test_a_faster_dense_step_refuses_one_candidate_after_the_other_and_says_so() -> None:
    facts = _facts(alpha_s=1e-3, mbit_per_s=50.0)
    share = 1.0 / (0.95 * facts.ccr)
    asked = list(candidates(facts, share))
    assert [_name(each) for each in asked] == ["leader_topk", "int4", "int8", "fp16"]
    times_s = [predicted(each, facts) for each in asked]
    known_s = [each_s for each_s in times_s if each_s is not None]
    assert len(known_s) == len(asked)
    for dense_s in (1.2 * max(known_s), *(1.01 * each_s for each_s in known_s), 0.9 * min(known_s)):
        faster = [each for each, each_s in zip(asked, known_s, strict=True) if each_s < 0.95 * dense_s]
        chosen = _decided(replace(facts, dense_s=dense_s))
        assert chosen.text == (faster[0].text if faster else "dense")
        assert (chosen.watch is not None) == bool(faster), "what is taken is on trial"
        assert f"{dense_s * 1e3:.0f} ms" in chosen.why
        if not faster:
            told = [f"{_name(each)} {s * 1e3:.0f} ms" for each, s in zip(asked, known_s, strict=True)]
            assert chosen.why.endswith(", ".join(told))


def test_latency_counts_once_for_every_round() -> None:
    near, far = (_facts(alpha_s, 1e6, numel=(300_000,)) for alpha_s in (0.0, 1e-3))
    # Four units with two all-reduces of four messages each on three ranks; one bucket; and the verdict.
    for text, messages in (("leader_topk(ratio=0.01)", 4 * 2 * 4 + 4), ("fp16", 4 + 4)):
        composition = recipe(text).build()
        far_s, near_s = predicted(composition, far), predicted(composition, near)
        assert far_s is not None
        assert near_s is not None
        assert far_s - near_s == pytest.approx(messages * 1e-3)


@pytest.mark.parametrize("missing", ["network", "backward", "dense_s"])
def test_without_measured_links_times_or_steps_nothing_can_be_refused(missing: str) -> None:
    facts = replace(_facts(alpha_s=20e-3, mbit_per_s=1e6, numel=(500, 1000)), allreduce_s=0.1)
    assert _decided(facts).text == "dense"
    chosen = _decided(replace(facts, **{missing: None}))
    assert _name(chosen) == "leader_topk"
    assert chosen.watch is None


def _bytes_per_element(composition: Composition, world: int) -> float:
    at = Moment(1 << 20, 0, 0, world)
    rounds = composition.exchange.rounds(1 << 20, torch.float32, at)
    return sum(each.wire_bytes(world) for each in rounds) / Round(
        "all_reduce", 1 << 20, torch.uint8
    ).wire_bytes(world)


@pytest.mark.parametrize("itemsize", [2, 4, 8])
@pytest.mark.parametrize("world", [2, 3])
def test_a_choice_sends_the_share_of_the_gradients_own_bytes(itemsize: int, world: int) -> None:
    facts = _facts(0.0, 10.0, world, itemsize=itemsize)
    chosen = _decided(replace(facts, allreduce_s=20 * BACKWARD_S), "auto(target=1.0)")
    assert _name(chosen) == ("topk" if world == 2 else "leader_topk")
    # Six tenths of the backward pass, at 20 times its length for all bytes; the ratio has four digits.
    assert _bytes_per_element(chosen, world) / itemsize == pytest.approx(0.6 / 20, abs=2e-4)


def test_16_bits_are_no_compression_of_16_bits() -> None:
    facts = _facts(0.0, 50.0, itemsize=2)
    assert "fp16" not in {_name(each) for each in candidates(facts, 0.9)}
    assert next(candidates(_facts(0.0, 50.0, itemsize=4), 0.5)).text == "fp16"
    assert next(candidates(_facts(0.0, 50.0, itemsize=8), 0.25)).text == "fp16"


@pytest.mark.parametrize(("itemsize", "share"), [(2, 0.75), (4, 0.4)])
def test_8_bits_of_all_elements_hide_by_the_gradients_own_bytes(itemsize: int, share: float) -> None:
    """0.508 bytes of 2 need 0.73 of the pass, 0.254 of 4 need 0.36: at 0.7 of the share."""
    two = _facts(0.0, 50.0, world=2, itemsize=itemsize)
    assert _name(next(candidates(two, share))) == "int8"
    assert _name(next(candidates(two, 0.9 * share))) == "int4"
