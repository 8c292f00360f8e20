"""Real gloo ranks: dense is DDP bit for bit, a recipe of each class learns, and replicas stay equal."""

from __future__ import annotations

import pytest

from tests.process.scenes_train import DENSE, STEPS
from tests.support.recipes import TRAINS
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes on three ranks: a world that is no power of two, so that 1/W is not exact."""
    return Scenes("tests.process.scenes_train", 3, tmp_path_factory.mktemp("three"))


@pytest.mark.parametrize("scene", DENSE)
def test_dense_equals_plain_ddp_bit_for_bit(three: Scenes, scene: str) -> None:
    # On two ranks: see test_hazards.
    for found in value(three, scene):
        assert found["gradwire"] == found["ddp"]


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
    three: Scenes, recipe: str
) -> None:
    found = value(three, recipe)
    assert len({each["digest"] for each in found}) == 1
    for each in found:
        assert each["last"] < 0.7 * each["first"]
        assert each["step"] == 100
        assert each["settled"]
        assert each["predicted"] == pytest.approx(each["metered"], rel=1e-12)
        assert each["metered"] > 0
        # A line needs several steps whose tail ran alone, which is up to the clock; `None` is agreed on, too.
        assert (each["link"], each["link_changes"]) == (found[0]["link"], found[0]["link_changes"])


def test_who_has_led_is_counted_alike_on_all_ranks(three: Scenes) -> None:
    first, *others = [each["led"] for each in value(three, "star_topk(ratio=0.05)")]
    assert sorted(first) == [33, 33, 34]
    assert others == [first] * 2


@pytest.mark.parametrize("recipe", rest(["auto", "covap"], but=["auto"]))
def test_an_adaptive_recipe_decides_alike_on_all_ranks(three: Scenes, recipe: str) -> None:
    assert len({each["recipe"] for each in value(three, recipe)}) == 1


def test_auto_stays_with_dense_where_communication_hides_and_measures_no_more(three: Scenes) -> None:
    found = value(three, "hides")
    assert len({each["why"] for each in found}) == 1, "the waits are agreed on"
    for each in found:
        assert each["settled"] == (STEPS - 1) * [False] + 4 * [True]
        assert each["recipe"] == "dense"
        assert each["why"].startswith("communication hides as it is: at most ")
        assert each["facts"] is None, "no step was taken apart, and no link probed"
        assert each["digest"] == each["ddp"]


@pytest.mark.parametrize("recipe", rest(["auto", "covap"], but=["auto"]))
def test_what_was_measured_is_the_same_on_all_ranks(three: Scenes, recipe: str) -> None:
    first, *others = (each["facts"] for each in value(three, recipe))
    assert all(facts == first for facts in others)
    backward, network = first["backward"], first["network"]
    assert backward["numel"] == value(three, recipe)[0]["parameters"][::-1]
    assert all(0.0 < ready_s <= backward["total_s"] for ready_s in backward["ready_s"])
    # The layout is the reverse of registration, which is how a perceptron's backward pass goes.
    assert backward["ready_s"][0] < backward["ready_s"][-1]
    assert backward["before_s"] > 0.0
    verbs = {"all_reduce", "all_gather"}
    # Each candidate of `auto` is predicted by the collectives that it uses.
    assert set(network["calibrated"]) == (verbs | {"all_to_all", "shift"} if recipe == "auto" else verbs)
    assert all(link["alpha_s"] >= 0.0 and link["beta_s"] >= 0.0 for link in network["calibrated"].values())


@pytest.mark.rest
def test_most_recipes_show_what_the_link_is_like(three: Scenes) -> None:
    trained = [recipe for recipe in TRAINS if recipe not in KINDS]
    seen = [value(three, recipe)[0]["link"] is not None for recipe in trained]
    assert sum(seen) > len(trained) / 2
