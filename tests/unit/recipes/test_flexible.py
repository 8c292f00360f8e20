"""flexible: what it looks at, and what it makes of a changing link."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, run_ranks
from gradwire.exchange.ar_topk import Election
from gradwire.exchange.base import run
from gradwire.planning.boundaries import one_unit
from gradwire.planning.costs import Link
from gradwire.planning.facts import StepObservation, Watched
from gradwire.planning.flexible import Choice
from gradwire.planning.ratio import candidate_ratios
from gradwire.recipes import Composition, recipe
from gradwire.recipes.flexible import energies, rounds_of
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped

RATIOS = candidate_ratios()
NUMEL, WORLD = 1_000_000, 4


def _built(text: str) -> Composition:
    return recipe(text).build()


@looped("power", [1.0, 3.0])
def test_energies_are_those_of_the_exact_choice(power: float) -> None:
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(1)).pow(power)
    total, *sent = energies(x, RATIOS)
    assert total == pytest.approx(float(x.double().square().sum()), rel=1e-9)
    for ratio, found in zip(RATIOS, sent, strict=True):
        kept = max(1, round(ratio * x.numel()))
        exact = float(x.double().square().topk(kept).values.sum())
        # A bin is an eighth wide; at most its elements are counted by their mean.
        assert found == pytest.approx(exact, rel=0.02)


def test_a_step_that_will_not_be_committed_is_not_looked_at() -> None:
    assert energies(torch.tensor([1.0, torch.nan]), RATIOS) == [0.0] * 6
    assert energies(torch.tensor([1.0, -torch.inf]), RATIOS) == [0.0] * 6
    assert energies(torch.zeros(7), [0.5]) == [0.0, 0.0]


def _shown(step: int, link: Link, ratios: Sequence[float] = RATIOS) -> StepObservation:
    looked = (1.0, *(min(1.0, 0.8 * (ratio / 0.1) ** 0.3) for ratio in ratios))
    return StepObservation(step, 0.2, 0.01, looked, link)


def test_a_slow_link_leads_to_a_recipe_that_can_be_written_down_and_goes_on_watching() -> None:
    watch = _built("flexible(factor=5.0, elect='variance')").watch
    assert watch is not None
    judge = watch.judge(Watched(WORLD, (NUMEL,)))
    slow = Link(alpha_s=1e-4, beta_s=8 / 2e7)
    ratios = candidate_ratios(factor=5.0)
    *tried, fastest, found = [found for step in range(20) if (found := judge(_shown(step, slow, ratios)))]
    assert all(f"way={way!r}" in each.text for way, each in zip(("all_gather", "tree"), tried, strict=True))
    assert fastest.why == "step 8: 10.00% by ring took the least of all ways; the link is not known yet"
    assert found.text.startswith("flexible(ratio=0.001")
    assert found.text.endswith("factor=5.0, elect='variance', trigger='any', inner='topk')")
    assert found.why == "step 11: 0.10 ms and 20 Mbit/s call for 0.10% by tree"
    assert found.watch is not None
    again = _built(found.text)
    assert again.text == found.text
    assert again.exchange == found.exchange


def test_a_bandwidth_that_is_not_resolved_is_said_in_the_report() -> None:
    watch = _built("flexible").watch
    assert watch is not None
    judge = watch.judge(Watched(WORLD, (NUMEL,)))
    *_tried, found = [found for step in range(20) if (found := judge(_shown(step, Link(1e-3, 1e-12))))]
    assert [judge(_shown(step, Link(0.0, 1e-6))) for step in range(20, 60)] == 40 * [None], (
        "no latency at all"
    )
    assert re.fullmatch(
        r"step \d+: 1.00 ms and bandwidth not resolved, \d+ Mbit/s or more call .*", found.why
    )


@looped(("elect", "leads"), [("round_robin", "broadcast"), ("variance", "all_gather"), ("auto", "broadcast")])
def test_who_leads_is_an_option_of_what_runs_and_of_what_is_counted(elect: Election, leads: str) -> None:
    watched, ctx = Watched(WORLD, (NUMEL,)), ExchangeContext(0, 0, 0, WORLD)
    for way in ("ring", "tree"):
        exchange = _built(f"flexible(way={way!r}, elect={elect!r})").exchange
        rounds = rounds_of(watched, one_unit, elect)(Choice(0.1, way))
        assert rounds == exchange.rounds(NUMEL, torch.float32, ctx)
        assert rounds[0].verb == leads


@looped("inner", ["mstopk(rounds=10)", "lwtopk", "dgc(sample=0.1, warmup_steps=0)"])
def test_another_recipes_choice_inside_is_that_recipes(inner: str) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(1))
    name, _, options = inner.removesuffix(")").partition("(")

    def sent(text: str) -> Tensor:
        def rank(comm: Comm) -> Tensor:
            mean = torch.zeros(5000)
            run(_built(text).exchange, x.clone(), mean, comm, ExchangeContext(0, 0, comm.rank, comm.world))
            return mean

        return run_ranks(1, rank)[0]

    expected = sent(f"{name}(ratio=0.02, {options})")
    assert expected.count_nonzero() == 100
    for way in ("all_gather", "ring"):
        assert torch.equal(sent(f"flexible(ratio=0.02, {way=}, {inner=})"), expected)


def test_a_choice_that_was_made_holds_until_link_or_gain_move() -> None:
    watch, watched = _built("flexible").watch, Watched(WORLD, (NUMEL,))
    assert watch is not None
    slow, slower = (Link(alpha_s=1e-4, beta_s=8 / rate) for rate in (2e7, 2e7 / 1.1))
    judge, chosen = watch.judge(watched), []
    for step in range(40):
        following = judge(_shown(step, slow if step < 20 or step % 2 else slower))
        if following is not None:
            assert following.watch is not None
            chosen.append(following.text)
            # What the reducer does when it installs what follows.
            judge = following.watch.judge(watched)
    assert len(chosen) == 4, "two ways are tried, the fastest of three runs, and one choice is made"


@looped("way", ["all_gather", "ring", "tree"])
def test_every_way_sends_as_much_as_its_ratio_says(way: str) -> None:
    exchange = _built(f"flexible(ratio=0.01, way='{way}')").exchange
    assert exchange.laws.contractive
    assert exchange.laws.conserves


@looped(
    ("options", "message"),
    [
        ("way='star'", "all_gather, ring, tree"),
        ("rule='best'", "progress, knee"),
        ("every=0", "every=0"),
        ("factor=1.0", "factor > 1"),
        ("elect='all'", "round_robin, variance, auto"),
        ("trigger='gain'", "any, link"),
        ("inner='int8'", "no option 'ratio'"),
        ("inner='topk(ratio=0.1)'", "gives a ratio"),
        ("inner='sketchsgd'", "chooses no elements"),
        ("link_change=0.0", "link_change"),
        ("gain_change=-0.1", "gain_change"),
        ("low=0.2", "low <= high"),
        ("ratio=0.0", "ratio"),
    ],
)
def test_what_cannot_be_is_refused(options: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe(f"flexible({options})")
