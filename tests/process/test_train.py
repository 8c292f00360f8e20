"""Real gloo ranks: dense is DDP bit for bit, a recipe of each class learns, and replicas stay equal."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.planning.profiler import DISCARDED, ORDINARY
from tests.support.models import digest, optimizer_of, perceptron, train
from tests.support.recipes import TRAINS
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


def digest_of(recipe: str | None, options: dict[str, Any]) -> str:
    """Of the parameters after ten steps under DDP with these options; `None` is without gradwire."""
    ddp = DistributedDataParallel(perceptron(), **options)
    optimizer = optimizer_of(ddp)
    if recipe is not None:
        gradwire.attach(ddp, optimizer, recipe)
    train(ddp, optimizer, range(10))
    return digest(ddp)


@dataclass(frozen=True)
class Trained:
    """A hundred steps."""

    first_loss: float
    """Mean over ten steps."""
    last_loss: float
    digest: str
    sizes: list[int]
    """Elements of each parameter."""
    settled: bool
    report: gradwire.Report

    @property
    def told(self) -> dict[str, Any]:
        """The report as JSON has it."""
        return self.report.as_dict()


def trained(recipe: str) -> Trained:
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02)
    optimizer = optimizer_of(ddp, lr=0.2)
    wire = gradwire.attach(ddp, optimizer, recipe)
    losses = train(ddp, optimizer, range(100))
    return Trained(
        first_loss=sum(losses[:10]) / 10,
        last_loss=sum(losses[-10:]) / 10,
        digest=digest(ddp),
        sizes=[parameter.numel() for parameter in ddp.parameters()],
        settled=wire.settled,
        report=wire.report(),
    )


STEPS = DISCARDED + ORDINARY
"""After which `auto` knows whether communication hides."""


@dataclass(frozen=True)
class Hidden:
    """A run in which communication hides, and one of plain DDP."""

    settled: list[bool]
    """After each step."""
    report: gradwire.Report
    digest: str
    of_ddp: str


def hidden() -> Hidden:
    """All ranks compute for long, the first one longest, and little is asked of dense."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, "auto", target=0.2)

    def computed_for_long(output: Tensor, target: Tensor) -> Tensor:
        time.sleep(0.05 if dist.get_rank() == 0 else 0.02)
        return nn.functional.mse_loss(output, target)

    settled = []
    for step in range(STEPS + 3):
        train(ddp, optimizer, range(step, step + 1), computed_for_long)
        settled.append(wire.settled)
    alike = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    train(alike, optimizer_of(alike), range(STEPS + 3))
    return Hidden(settled, wire.report(), digest(ddp), digest(alike))


DENSE: dict[str, dict[str, Any]] = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.01},
}
"""Options of DDP."""


@pytest.mark.parametrize("options", DENSE.values(), ids=DENSE)
def test_dense_equals_plain_ddp_bit_for_bit(three: Ranks, options: dict[str, Any]) -> None:
    # On two ranks: see test_hazards.
    assert three(digest_of, "dense", options) == three(digest_of, None, options)


KINDS = (
    "dense",
    "topk(ratio=0.05)",
    "threshold(threshold=0.05)",
    "int8",
    "star_topk(ratio=0.05)",
    "gcomp",
    "auto",
)
"""One for each way of sending: all-reduce, gathers of payloads, even and not, all-to-all, what a leader
broadcasts, a ring of frames; and a choice."""


@pytest.mark.parametrize("recipe", rest(TRAINS, but=KINDS))
def test_a_recipe_learns_replicas_are_identical_and_bytes_and_the_link_are_agreed(
    three: Ranks, recipe: str
) -> None:
    found = three(trained, recipe)
    assert len({rank.digest for rank in found}) == 1
    for rank in found:
        assert rank.last_loss < 0.7 * rank.first_loss
        assert rank.report.step == 100
        assert rank.settled
        metered = rank.report.metered_bytes_per_step
        assert rank.report.wire_bytes_per_step == pytest.approx(metered, rel=1e-12)
        assert metered > 0
        # A line needs several steps whose tail ran alone, which is up to the clock; `None` is agreed on, too.
        for fact in ("link", "link_changes"):
            assert rank.told[fact] == found[0].told[fact]


def test_who_has_led_is_counted_alike_on_all_ranks(three: Ranks) -> None:
    first, *others = [rank.report.times_led for rank in three(trained, "star_topk(ratio=0.05)")]
    assert sorted(first) == [33, 33, 34]
    assert others == [first] * 2


@pytest.mark.parametrize("recipe", rest(["auto", "covap"], but=["auto"]))
def test_an_adaptive_recipe_decides_alike_on_all_ranks(three: Ranks, recipe: str) -> None:
    assert len({rank.report.recipe for rank in three(trained, recipe)}) == 1


def test_auto_stays_with_dense_where_communication_hides_and_measures_no_more(three: Ranks) -> None:
    found = three(hidden)
    assert len({rank.report.why for rank in found}) == 1, "the waits are agreed on"
    for rank in found:
        assert rank.settled == (STEPS - 1) * [False] + 4 * [True]
        assert rank.report.recipe == "dense"
        assert rank.report.why.startswith("communication hides as it is: at most ")
        assert rank.report.facts is None, "no step was taken apart, and no link probed"
        assert rank.digest == rank.of_ddp


@pytest.mark.parametrize("recipe", rest(["auto", "covap"], but=["auto"]))
def test_what_was_measured_is_the_same_on_all_ranks(three: Ranks, recipe: str) -> None:
    found = three(trained, recipe)
    facts = found[0].told["facts"]
    assert all(rank.told["facts"] == facts for rank in found)
    backward, network = facts["backward"], facts["network"]
    # The layout is the reverse of registration, which is how a perceptron's backward pass goes.
    assert list(backward["numel"]) == found[0].sizes[::-1]
    assert all(0.0 < ready_s <= backward["total_s"] for ready_s in backward["ready_s"])
    assert backward["ready_s"][0] < backward["ready_s"][-1]
    assert backward["before_s"] > 0.0
    verbs = {"all_reduce", "all_gather"}
    # Each candidate of `auto` is predicted by the collectives that it uses.
    assert set(network["calibrated"]) == (verbs | {"all_to_all", "shift"} if recipe == "auto" else verbs)
    assert all(link["alpha_s"] >= 0.0 and link["beta_s"] >= 0.0 for link in network["calibrated"].values())


@pytest.mark.rest
def test_most_recipes_show_what_the_link_is_like(three: Ranks) -> None:
    recipes = [recipe for recipe in TRAINS if recipe not in KINDS]
    seen = [three(trained, recipe)[0].told["link"] is not None for recipe in recipes]
    assert sum(seen) > len(recipes) / 2
