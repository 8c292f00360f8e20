"""One rank alone: nothing is compressed, nothing that a loaded state holds is lost, and the plan is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire._api.switch import switch
from gradwire.checkpoint import state
from gradwire.comm import Comm, run_ranks
from gradwire.errors import GradwireWarning
from gradwire.memory import UNSENT
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE, REMEMBERING
from tests.support.rig import NAMES, Rig, flat, gradients
from tests.support.states import own_state

MORE = {
    "dgc, momentum": EVERY_RECIPE["dgc, momentum"],
    "signum": "signum",
    "signsgd, units": "signsgd(scale='none')",
    "inside": "mergecomp(inner='dgc', split='even')",
    "inside, planned": "mergecomp(inner='dgc')",
}
"""Recipes that do more than compress."""
REST = [name for name in EVERY_RECIPE if name not in MORE]


def _alone(comm: Comm, text: str, **options: Any) -> Rig:
    return Rig(comm, text, alone=True, **options)


def _in_pair(text: str, steps: int = 3) -> list[dict[str, Any]]:
    def rank(comm: Comm) -> dict[str, Any]:
        rig = Rig(comm, text)
        for step in range(steps):
            rig.step(gradients(comm.rank, step))
        return state.save(rig.reducer)

    return run_ranks(2, rank)


@looped("name", REST)
def test_gradients_are_what_they_are(name: str) -> None:
    def rank(comm: Comm) -> None:
        rig = _alone(comm, EVERY_RECIPE[name])
        for step in range(3):
            grads = gradients(0, step)
            outcome = rig.step(grads)
            assert all(torch.equal(outcome.mean[each], grads[each].float()) for each in NAMES)
        assert rig.reducer.layout.is_dense
        assert not rig.reducer.measuring
        assert rig.reducer.layout.main.watch is None
        assert rig.reducer.step == 3

    run_ranks(1, rank)


@pytest.mark.parametrize("name", MORE)
def test_what_does_more_than_compress_goes_on(name: str) -> None:
    def rank(comm: Comm) -> None:
        rig, company = _alone(comm, MORE[name]), Rig(comm, MORE[name])
        assert not rig.reducer.layout.alone
        assert rig.reducer.measuring == company.reducer.measuring
        for step in range(3):
            found, expected = (each.step(gradients(0, step)).flat() for each in (rig, company))
            assert torch.equal(found, expected)

    run_ranks(1, rank)


def test_a_policy_that_does_more_than_compress_goes_on() -> None:
    def rank(comm: Comm) -> None:
        rig = _alone(comm, "topk(ratio=0.1)", policy={"middle.*": "signsgd(scale='none')"})
        assert rig.step(gradients(0, 0)).mean["middle.weight"].abs().unique().tolist() == [1.0]

    run_ranks(1, rank)


def test_a_loaded_plan_counts_not_the_recipe() -> None:
    states = _in_pair("topk(ratio=0.1)")

    def rank(comm: Comm) -> None:
        rig = _alone(comm, MORE["dgc, momentum"])
        state.load(rig.reducer, states)
        assert rig.reducer.layout.alone

    with pytest.warns(GradwireWarning, match="not with the recipe dgc"):
        run_ranks(1, rank)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_too_the_first_gradient_takes_all_that_is_owed(dtype: torch.dtype) -> None:
    def pair(comm: Comm) -> dict[str, Any]:
        rig = Rig(comm, "topk(ratio=0.1)", dtype=dtype)
        rig.step(gradients(comm.rank, 0, dtype))
        return state.save(rig.reducer)

    states = run_ranks(2, pair)

    def rank(comm: Comm) -> None:
        rig = Rig(comm, "topk(ratio=0.1)", alone=True, dtype=dtype)
        state.load(rig.reducer, states)
        assert any(memory.any() for memory in rig.memory.values())
        rig.step(gradients(0, 1, dtype))
        assert not any(memory.any() for memory in rig.memory.values())

    run_ranks(1, rank)


def _owed(states: list[dict[str, Any]], weight: float) -> dict[str, Tensor]:
    """What two ranks had not sent, in the mean: (numel,) by name, zeros where nothing was remembered."""
    owed = {name: torch.zeros_like(grad) for name, grad in gradients(0, 0, torch.float32).items()}
    for name in states[0]["memory"]:
        both = torch.stack([each["memory"][name] for each in states])
        owed[name] = both.mean(0).view(-1) * weight
    return owed


LOW_PASS = ("leader_topk, low pass", "scalecom, low pass")
COMPRESSING = [name for name in REMEMBERING if name not in MORE]


@looped("name", COMPRESSING)
def test_what_a_loaded_state_holds_is_added_to_the_first_gradient(name: str) -> None:
    states = _in_pair(EVERY_RECIPE[name])
    owed = _owed(states, 4.0 if name in LOW_PASS else 1.0)
    assert any(memory.any() for memory in owed.values())

    def rank(comm: Comm) -> None:
        rig = _alone(comm, EVERY_RECIPE[name])
        state.load(rig.reducer, states)
        for step in (3, 4):
            grads = gradients(0, step, torch.float32)
            outcome = rig.step(grads)
            assert outcome.step.committed
            for each in NAMES:
                expected = owed[each] + grads[each] if step == 3 else grads[each]
                assert torch.equal(outcome.mean[each], expected)
        assert not any(plane.any() for (_name, kind), plane in rig.planes.items() if kind == "unsent")

    run_ranks(1, rank)


def test_what_is_owed_waits_for_a_gradient_and_for_a_step_that_counts() -> None:
    states = _in_pair("topk(ratio=0.1)")
    owed = _owed(states, 1.0)

    def rank(comm: Comm) -> None:
        rig = _alone(comm, "topk(ratio=0.1)")
        state.load(rig.reducer, states)
        grads = gradients(0, 3, torch.float32)
        bad = {**grads, "middle.weight": torch.full_like(grads["middle.weight"], torch.nan)}
        assert not rig.step(bad).step.committed
        idle = {**grads, "first.weight": torch.zeros_like(grads["first.weight"])}
        first, second = rig.step(idle), rig.step(grads)
        assert not first.mean["first.weight"].any()
        assert torch.equal(first.mean["last.weight"], owed["last.weight"] + grads["last.weight"])
        assert torch.equal(second.mean["first.weight"], owed["first.weight"] + grads["first.weight"])
        assert torch.equal(second.mean["last.weight"], grads["last.weight"])

    run_ranks(1, rank)


@pytest.mark.parametrize("name", ["topk", "leader_topk, low pass", "covap", "powersgd", "dgc"])
def test_a_state_goes_through_a_rank_alone_to_others_again(name: str) -> None:
    text = EVERY_RECIPE[name]
    states = _in_pair(text)

    def alone(comm: Comm) -> list[dict[str, Any]]:
        rig = _alone(comm, text)
        state.load(rig.reducer, states)
        before = state.save(rig.reducer)
        rig.step(gradients(0, 3))
        return [before, state.save(rig.reducer)]

    ((before, after),) = run_ranks(1, alone)
    for saved in (before, after):
        assert saved["plan"] == states[0]["plan"]
        assert saved["memory"].keys() == states[0]["memory"].keys()
        assert saved["planes"].keys() == states[0]["planes"].keys()
    for each, memory in before["memory"].items():
        assert torch.equal(memory, torch.stack([old["memory"][each] for old in states]).mean(0))
    assert not any(memory.any() for memory in after["memory"].values())

    def again(comm: Comm) -> None:
        for saved in (before, after):
            rig = Rig(comm, text)
            state.load(rig.reducer, [saved])
            assert rig.reducer.layout.main.text == states[0]["plan"]
            assert not rig.reducer.layout.alone
            assert all(torch.equal(rig.memory[each], saved["memory"][each].view(-1)) for each in rig.memory)
            assert rig.step(gradients(comm.rank, 4)).step.committed

    run_ranks(2, again)


def test_what_is_still_to_be_decided_is_so_among_others() -> None:
    def alone(comm: Comm) -> dict[str, Any]:
        rig = _alone(comm, "covap", policy={"first.weight": "topk(ratio=0.1)", "*": None})
        for step in range(7):
            rig.step(gradients(0, step))
        return state.save(rig.reducer)

    (saved,) = run_ranks(1, alone)
    assert saved["plan"] is None
    assert not saved["memory"]["first.weight"].any()

    def again(comm: Comm) -> bool:
        rig = Rig(comm, "covap", policy={"first.weight": "topk(ratio=0.1)", "*": None})
        state.load(rig.reducer, [saved])
        return rig.reducer.measuring

    assert run_ranks(2, again) == [True, True]


def test_a_plan_that_others_decided_on_is_kept() -> None:
    states = _in_pair("covap", 7)
    assert states[0]["plan"].startswith("covap(interval=")

    def alone(comm: Comm) -> dict[str, Any]:
        rig = _alone(comm, "covap")
        state.load(rig.reducer, states)
        assert rig.reducer.layout.alone
        rig.step(gradients(0, 7))
        return state.save(rig.reducer)

    (saved,) = run_ranks(1, alone)
    assert saved["plan"] == states[0]["plan"]
    assert saved["why"].endswith(states[0]["why"])


def _plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def _ddp() -> DistributedDataParallel:
    return DistributedDataParallel(_plain())


def _train(model: nn.Module, steps: int) -> dict[str, Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((2, 64), 1.0 + step)).pow(2).mean().backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("make", [_ddp, _plain])
@pytest.mark.parametrize("recipe", ["topk", "int8", "fp16", "powersgd", "signsgd", "mergecomp", "auto"])
def test_a_training_is_what_it_is_without_a_hook(recipe: str, make: Callable[[], nn.Module]) -> None:
    expected, model = _train(make(), 4), make()
    wire = gradwire.attach(model, recipe=recipe)
    found, report = _train(model, 4), wire.report()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert wire.settled
    assert report.why == "one rank: nothing to send, so gradients are dense"
    assert report.recipe.startswith(recipe)
    assert (report.step, report.memory_bytes) == (4, 0)


@pytest.mark.usefixtures("world_of_one")
def test_a_flush_hands_over_what_is_owed() -> None:
    ddp = _ddp()
    wire = gradwire.attach(ddp, recipe="topk(ratio=0.1)")
    saved = own_state(wire)
    saved["memory"]["0.weight"] += 0.5
    wire.load_state_dict(saved)
    wire.flush()
    handed = {name: parameter.grad for name, parameter in ddp.module.named_parameters()}
    assert handed["0.weight"] is not None
    assert (handed["0.weight"] == 0.5).all()
    assert not any(grad.any() for name, grad in handed.items() if grad is not None and name != "0.weight")
    assert not flat(own_state(wire)["memory"]).any()
    wire.detach()


def test_after_a_switch_to_what_only_compresses_the_next_gradient_takes_all_that_is_owed() -> None:
    def rank(comm: Comm) -> None:
        rig = _alone(comm, MORE["dgc, momentum"])
        for step in range(3):
            rig.step(gradients(0, step))
        owed = {
            name: rig.reducer.layout.memory(name).clone()
            for name in NAMES
            if name in rig.reducer.layout.slots
        }
        assert any(bool(each.any()) for each in owed.values())
        switch(rig.reducer, "topk(ratio=0.1)", lambda _layout: None)
        grads = gradients(0, 3)
        mean = rig.step(grads).mean
        for name in NAMES:
            expected = grads[name].float().flatten()
            if name in owed:
                expected = expected + owed[name]
            assert torch.equal(mean[name].flatten(), expected)
        assert not any(flat_buffer.committed[UNSENT].any() for flat_buffer in rig.reducer.layout.flat_buffers)

    run_ranks(1, rank)
