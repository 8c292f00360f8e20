"""Real gloo ranks: exact checkpoints, other worlds, and what `attach` refuses."""

from __future__ import annotations

import pytest

from tests.process.scenes_state import RECIPES
from tests.support.looped import looped
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes, on three ranks."""
    return Scenes("tests.process.scenes_state", 3, tmp_path_factory.mktemp("state"))


@pytest.mark.parametrize("recipe", rest(RECIPES, but=["topk(ratio=0.05)", "covap(interval=4)"]))
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(world: Scenes, recipe: str) -> None:
    found = value(world, recipe)
    assert {each["resumed"] for each in found} == {each["through"] for each in found}
    assert len({each["through"] for each in found}) == 1


@pytest.mark.parametrize("recipe", rest(RECIPES, but=["topk(ratio=0.05)", "covap(interval=4)"]))
def test_a_resumed_run_compresses_from_its_first_step(world: Scenes, recipe: str) -> None:
    # A dense step would send everything; a quarter of the elements or less is what these recipes send,
    # besides the vectors and the small last matrix.
    assert all(each["first_share"] < 0.5 for each in value(world, recipe))


def test_from_three_ranks_to_two_the_mean_memory_stays(world: Scenes) -> None:
    for found in value(world, "three to two")[:2]:
        assert "a list of all ranks'" in found["refused"]
        assert found["mean"]
        assert found["from_mean"]
        assert found["left out"], "of the first step, which no optimizer makes, nothing is left"
        assert found["step"] == 5


def test_a_dcp_checkpoint_keeps_every_ranks_memory_and_goes_to_another_world(world: Scenes) -> None:
    for found in value(world, "dcp"):
        assert found["again"], "bit for bit, on as many ranks"
        assert found["mean"]
        assert found["compared"] == 2 * 6, "what is unsent and the momentum of three layers"
        assert found["step"] == 4


def test_a_rank_that_cannot_load_by_dcp_is_named_on_all_and_training_goes_on(world: Scenes) -> None:
    found = value(world, "dcp, one rank")
    for name, could_not in (
        ("lost", "read the metadata of its checkpoint: FileNotFoundError"),
        ("damaged", "read the metadata of its checkpoint: "),
        ("no memory", "put its state together: MemoryError: none left"),
    ):
        said = [each["said"][name] for each in found]
        assert [kind for kind, _ in said][::2] == ["PeerFailed"] * 2
        assert all(text.startswith(f"rank 1 could not {could_not}") for _, text in said[::2])
        assert said[1][0] not in ("PeerFailed", "nothing"), "its cause"
    assert all(each["intact"] for each in found)
    assert len({each["digest"] for each in found}) == 1


REFUSALS = {
    "not ddp": "Sequential is a plain module: wrap it in DistributedDataParallel first, or pass replicas=",
    "second attach": "is carried already, by its DistributedDataParallel, over ranks [0, 1, 2]: for another "
    "recipe, call wire.switch(recipe)",
    "attach after detach": "call wire.switch(recipe)",
    "second hook": "has a communication hook already",
    "unknown recipe": "did you mean 'covap'?",
    "unknown key": "did you mean 'ratio'?",
    "ratio": "ratio=1.5 is outside (0, 1]",
    "type": "an option has the wrong type",
    "interval type": "interval=2.5",
    "target": "target=1.5 is outside (0, 1]",
    "policy": "did you mean 'topk'?",
    "policy that matches nothing": "no parameter matches '*.wieght'",
    "foreign optimizer": "has no parameter of this model",
    "policy that measures": "'covap' must measure before it can decide",
    "sparse": "module '0' has sparse gradients",
    "complex": "'weight' is complex",
}


@pytest.mark.parametrize(("case", "text"), REFUSALS.items())
def test_attach_refuses_what_is_wrong_and_says_what_to_do(world: Scenes, case: str, text: str) -> None:
    for refused in value(world, "refusals"):
        assert refused[case][0] == "ValueError"
        assert text in refused[case][1]


def test_every_refusal_is_checked(world: Scenes) -> None:
    assert value(world, "refusals")[0].keys() == REFUSALS.keys()


def test_after_refusals_on_some_ranks_they_still_train(world: Scenes) -> None:
    first, second, aside = value(world, "refused on a pair")
    assert first == second
    assert first[:2] == ["ValueError"] * 2
    assert aside == []


def test_after_a_refusal_the_right_arguments_still_work(world: Scenes) -> None:
    assert value(world, "right") == [True, True, True]


FIELDS = (
    "recipe", "seed", "parameter names", "parameter dtypes", "policy", "scaler", "memory_dtype",
    "gradwire version", "optimizer", "optimizer group 0 lr",
)  # fmt: skip


@pytest.mark.parametrize("field", FIELDS)
def test_ranks_that_differ_are_told_so_on_all_of_them(world: Scenes, field: str) -> None:
    for kind, text in (found[field] for found in value(world, "disagreements")):
        assert kind == "RanksDisagree"
        assert f"ranks disagree on {field}: rank 0: " in text
        assert "; rank 2: " in text


def test_a_refusal_on_one_rank_reaches_the_others(world: Scenes) -> None:
    first, refused, last = (found["the configuration"] for found in value(world, "disagreements"))
    assert refused[0] == "ValueError"
    assert "did you mean 'topk'" in refused[1]
    for kind, text in (first, last):
        assert kind == "RanksDisagree"
        assert "rank 1: refused, unknown recipe 'topkk'" in text


def test_a_recipe_in_the_optimizers_place_on_one_rank_reaches_the_others(world: Scenes) -> None:
    first, refused, last = (found["the optimizer's place"] for found in value(world, "disagreements"))
    assert refused == [
        "ValueError",
        "the second argument is the optimizer, got a str; write attach(model, optimizer, 'topk')",
    ]
    for kind, text in (first, last):
        assert kind == "RanksDisagree"
        assert "rank 1: refused, the second argument is the optimizer" in text


@looped(
    ("name", "said"),
    [
        ("no seed", "seed=None is not a whole number"),
        ("no scaler", "scaler=1.0 is not a torch.amp.GradScaler"),
    ],
)
def test_an_argument_that_one_rank_must_refuse_reaches_the_others(
    world: Scenes, name: str, said: str
) -> None:
    first, refused, last = (found[name] for found in value(world, "disagreements"))
    assert refused == ["ValueError", said]
    for kind, text in (first, last):
        assert kind == "RanksDisagree"
        assert f"rank 1: refused, {said}" in text


def test_a_hook_on_one_rank_reaches_the_others(world: Scenes) -> None:
    first, refused, last = (found["a hook"] for found in value(world, "disagreements"))
    assert refused[0] == "ValueError"
    for kind, text in (first, last):
        assert kind == "RanksDisagree"
        assert "rank 1: refused, this DDP module has a communication hook already" in text


def test_attach_without_a_process_group_says_what_to_call(world: Scenes) -> None:
    for kind, text in value(world, "no process group"):
        assert kind == "ValueError"
        assert "init_process_group" in text


def test_a_rank_that_cannot_read_a_state_tells_the_others(world: Scenes) -> None:
    first, *others = value(world, "read one by one")
    assert first == {"said": "FileNotFoundError: wire-1.pt", "step": 2}
    for each in others:
        assert each["said"].startswith("PeerFailed: rank 0 could not read the states")
        assert each["step"] == 2
