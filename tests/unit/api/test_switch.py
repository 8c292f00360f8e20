"""What a switch refuses, on all ranks, and what it leaves as it was."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from gradwire._api.switch import mean_unsent, switch
from gradwire.checkpoint import state
from gradwire.comm import Comm, run_ranks
from gradwire.errors import PeerFailed
from gradwire.recipes import Composition, Recipe, recipe
from gradwire.recipes.base import Watch
from gradwire.step.layout import Layout
from gradwire.step.shards import Shard
from tests.support.rig import Rig, gradients


def _unchecked(_layout: Layout) -> None:
    """No optimizer to suit."""


def _refused(
    *asked: str | Recipe | Composition, fails: int | None = None, lacks_memory: int | None = None
) -> list[str]:
    """What each rank raises; afterwards all go on with what they had."""

    def rank(comm: Comm) -> str:
        rig = Rig(comm, "topk(ratio=0.1)")
        rig.step(gradients(comm.rank, 0))
        layout = rig.reducer.layout
        if comm.rank == lacks_memory:
            none = Mock(side_effect=MemoryError("none left"))
            rig.reducer.prepared = none  # type: ignore[method-assign]

        def check(_layout: Layout) -> None:
            if comm.rank == fails:
                raise ValueError("not with this optimizer")

        try:
            switch(rig.reducer, asked[comm.rank], check)
        except Exception as error:
            assert rig.reducer.layout is layout
            assert str(rig.reducer.recipe) == "topk(ratio=0.1)"
            assert rig.step(gradients(comm.rank, 1)).error is None
            return f"{type(error).__name__}: {error}"
        return ""

    return run_ranks(len(asked), rank)


def test_a_recipe_that_is_none_is_refused_on_all_ranks() -> None:
    first, second = _refused("int8", "intt8")
    assert first.startswith("PeerFailed: rank 1 could not switch: ValueError: unknown recipe 'intt8'")
    assert second.startswith("ValueError: unknown recipe 'intt8'; did you mean 'int8'?")


def test_ranks_that_name_different_recipes_are_told_so() -> None:
    first, second = _refused("int8", "int4")
    assert first == second
    assert first.startswith("RanksDisagree: ranks disagree on recipe: rank 0: int8")


def test_what_does_not_suit_the_optimizer_of_one_rank_is_refused_on_all() -> None:
    first, second = _refused("int8", "int8", fails=0)
    assert first == "ValueError: not with this optimizer"
    assert second.startswith("PeerFailed: rank 0 could not switch")


def test_a_rank_without_memory_for_what_is_switched_to_is_named_on_all() -> None:
    first, second = _refused("int8", "int8", lacks_memory=1)
    assert first == "PeerFailed: rank 1 could not switch: MemoryError: none left"
    assert second == "MemoryError: none left"


def test_a_node_without_memory_for_whole_parameters_is_named_before_any_are_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = Shard.room

    def rank(comm: Comm) -> str:
        rig = Rig(comm, "topk(ratio=0.1)", per_node=2)
        rig.step(gradients(comm.rank, 0))
        before = rig.memory
        with pytest.raises(PeerFailed if comm.rank % 2 else MemoryError) as caught:
            mean_unsent(rig.reducer, whole=True)
        assert all(torch.equal(before[name], memory) for name, memory in rig.memory.items())
        assert rig.step(gradients(comm.rank, 1)).error is None
        return str(caught.value)

    def only_for_the_second(shard: Shard, flat: Tensor) -> Tensor:
        if shard.number == 0:
            raise MemoryError("none left")
        return room(shard, flat)

    monkeypatch.setattr(Shard, "room", only_for_the_second)
    _first, second, _third, _fourth = run_ranks(4, rank)
    said = "could not make room for what is unsent: MemoryError: none left"
    assert second == f"rank 0 {said}; rank 2 {said}"


@pytest.mark.parametrize("text", ["int8", "topk(0.01)", "auto", "dense", "powersgd(rank=2)"])
def test_a_rank_alone_compresses_nothing_before_and_after(text: str) -> None:
    def rank(comm: Comm) -> None:
        rig = Rig(comm, "topk(ratio=0.1)", alone=True)
        for step in range(3):
            grads = gradients(0, step)
            outcome = rig.step(grads)
            assert all((outcome.mean[name] == grads[name]).all() for name in grads)
            if step == 1:
                switch(rig.reducer, text, _unchecked)
                assert rig.reducer.recipe == recipe(text)
        assert rig.reducer.layout.is_dense

    run_ranks(1, rank)


def test_a_composition_of_the_users_own_is_switched_to() -> None:
    own = replace(recipe("topk(ratio=0.5)").build(), text="mine")

    def rank(comm: Comm) -> str:
        rig = Rig(comm, "int8")
        rig.step(gradients(comm.rank, 0))
        switch(rig.reducer, own, _unchecked)
        return rig.step(gradients(comm.rank, 1)).step.recipe

    assert run_ranks(2, rank) == ["mine", "mine"]


def test_what_the_user_asks_for_replaces_what_a_controller_has_just_named() -> None:
    """A recipe with a memory is followed when the next step begins, and the switch comes before that."""

    def rank(comm: Comm) -> list[str]:
        rig, named = Rig(comm, "topk(ratio=0.1)"), recipe("randomk(ratio=0.5)").build()
        judged = replace(recipe("topk(ratio=0.2)").build(), watch=Watch(lambda _: lambda _shown: named, 1))
        rig.reducer.install(judged)
        rig.step(gradients(comm.rank, 0))
        assert not rig.reducer.is_caught_up, "what was named follows"
        switch(rig.reducer, "topk(ratio=0.3)", _unchecked)
        return [rig.step(gradients(comm.rank, step)).step.recipe for step in (1, 2)]

    assert run_ranks(2, rank) == [[recipe("topk(ratio=0.3)").build().text] * 2] * 2


def test_a_refused_switch_of_what_is_detached_does_not_bring_the_policy_back() -> None:
    def rank(comm: Comm) -> bool:
        rig = Rig(comm, "dense", policy={"first.weight": "topk(ratio=0.1)"})
        rig.step(gradients(comm.rank, 0))
        rig.reducer.restore(rig.reducer.retired())
        with pytest.raises(ValueError, match="unknown recipe"):
            switch(rig.reducer, "intt8", _unchecked)
        state.load(rig.reducer, state.save(rig.reducer))
        return rig.reducer.layout.is_plain

    assert run_ranks(2, rank) == [True, True]


def test_the_last_of_several_switches_counts() -> None:
    """Also where the first of them has to send what is unsent before anything else can run."""

    def rank(comm: Comm) -> list[str]:
        rig = Rig(comm, "topk(ratio=0.1)")
        rig.step(gradients(comm.rank, 0))
        for text in ("dense", "fp16", "bf16"):
            switch(rig.reducer, text, _unchecked)
        return [rig.step(gradients(comm.rank, step)).step.recipe for step in range(1, 4)]

    last = recipe("bf16").build().text
    assert run_ranks(2, rank) == [["local_every(interval=1)", last, last]] * 2
