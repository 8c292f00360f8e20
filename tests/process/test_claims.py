"""Real gloo ranks: a parameter goes by one wire, and what is sent by number has the same names everywhere."""

from __future__ import annotations

import pytest

from tests.process.scenes_claims import PAIRS
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """On two ranks."""
    return Scenes("tests.process.scenes_claims", 2, tmp_path_factory.mktemp("claims"))


KINDS = {
    "outer": "local steps",
    "plain": "plain parameters",
    "ddp": "DistributedDataParallel",
    "shards": "shards of FSDP2",
    "fsdp": "traffic of FSDP2",
}
NAMES = {
    "tied weights": "'out.weight' (there '0.weight')",
    "one encoder": "'encoder.bias' (there 'encoder.bias')",
    "one inside": "'bias' (there 'encoder.bias')",
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_parameter_in_two_wires_is_refused_with_its_names(world: Scenes, pair: str) -> None:
    what, first, _ = pair.split(", ")
    for each in value(world, "refused"):
        text = each[pair]
        assert text.startswith(
            f"ValueError: parameters of this model are carried already, by the {KINDS[first]} of another "
            "model, over ranks [0, 1]: "
        )
        assert NAMES[what] in text
        assert "torch.nn.ModuleList([one, other])" in text


@pytest.mark.rest
def test_another_wrapper_around_a_module_whose_rounds_run_is_refused(world: Scenes) -> None:
    for said in value(world, "refused for the same module"):
        assert said.startswith(
            "ValueError: this model is carried already, by its local steps, over ranks [0, 1]: for another "
        )


def test_a_refusal_on_one_rank_is_heard_by_all_and_the_first_wire_goes_on(world: Scenes) -> None:
    one, other = value(world, "refused on one rank")
    assert one["said"].startswith("ValueError: parameters of this model are carried already")
    assert other["said"].startswith("RanksDisagree: ranks disagree on the configuration: rank 0: refused")
    assert (one["alike"], other["alike"]) == (True, True)


@pytest.mark.rest
def test_rounds_go_on_as_if_nothing_had_been_asked(world: Scenes) -> None:
    assert value(world, "refused midway") == [{"same": True, "alike": True}] * 2


@pytest.mark.rest
def test_one_module_that_holds_both_is_one_wire(world: Scenes) -> None:
    assert value(world, "together") == [{"rounds": True, "means": True}] * 2


def test_what_shares_no_parameter_or_no_longer_does_is_accepted(world: Scenes) -> None:
    for each in value(world, "accepted"):
        assert all(each.values())
    assert value(world, "let go") == [{"said": ""}] * 2


NUMBERED = [
    *((what, kind) for what in ("buffers", "frozen") for kind in ("plain", "outer", "ddp")),
    *(("frozen, unequal", kind) for kind in ("plain", "outer")),  # DDP's own constructor would send them
]


@pytest.mark.parametrize(("what", "kind"), NUMBERED)
def test_tensors_that_are_sent_by_number_have_the_same_names_on_all_ranks(
    world: Scenes, what: str, kind: str
) -> None:
    named = "buffers" if what == "buffers" else "frozen parameters"
    for said, slow, fast in (each[f"{what}, {kind}"] for each in value(world, "in another order")):
        assert said.startswith(
            f"RanksDisagree: ranks disagree on {named}: rank 0: slow (3,) torch.float32;fast"
        )
        if kind != "ddp":  # whose constructor has swapped them on rank 1
            assert (slow, fast) == (1.0, 5.0)


@pytest.mark.rest
def test_members_put_buffers_by_name(world: Scenes) -> None:
    assert value(world, "members in another order") == [{"slow": [1.0] * 3, "fast": [5.0] * 3}] * 2


WRONG = {
    "every": "ValueError: every=0 is not a number of steps",
    "delay": "ValueError: delay=3 is not a number of steps below every=3",
    "placement": "ValueError: placement='nowhere' is neither",
    "outer": "ValueError: outer=3 is not a function",
    "every_seconds": "ValueError: resume= and every_seconds= are for members=",
    "ddp": "KeyError: 'no such group'",
    "plain": "KeyError: 'no such group'",
    "fsdp": "KeyError: 'no such group'",
    "rounds": "KeyError: 'no such group'",
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_on_one_rank_is_heard_by_all(world: Scenes, what: str) -> None:
    zero, one = (each[what] for each in value(world, "wrong on one rank"))
    assert one.startswith(WRONG[what])
    assert zero.startswith("RanksDisagree: ranks disagree on the configuration: rank 0: accepted")
    assert "rank 1: refused, " in zero
