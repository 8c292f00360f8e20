"""ScaleCom's recipe against the paper's algorithm, and rates per layer by what a forward pass does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.comm import Comm, run_ranks
from gradwire.control.controller import controller_for
from gradwire.control.warmup import surveyed
from gradwire.exchange.leader import leader_in_turn
from gradwire.exchange.round_robin import Order
from gradwire.placement import host
from gradwire.planning.facts import Facts
from gradwire.recipes import Decision, recipe
from gradwire.step.environment import ReducerEnvironment
from gradwire.unit.context import ExchangeContext
from gradwire.unit.parameters import ParameterSpec
from tests.support.looped import looped
from tests.support.rig import Outcome, Rig, gradients

AUTO = "scalecom(rates='auto', warmup_steps=3)"


def _counting() -> Decision:
    decision = recipe(AUTO).build().next
    assert decision is not None
    assert decision.uses
    return decision


def test_rates_follow_from_uses_and_are_in_the_text() -> None:
    uses = {"conv.weight": 32 * 1024.0, "fc.weight": 32.0, "fc.bias": 0.0}
    chosen = _counting().decide(Facts(1.0, 1.0, 2, uses=uses))
    assert "rates={'conv.*': 25, 'fc.*': 400}" in chosen.text
    again = recipe(chosen.text).build()
    assert again.exchange == chosen.exchange


def test_ranks_with_other_batches_agree_on_the_most() -> None:
    def rank(comm: Comm) -> Facts:
        uses = {"a": 10.0 * (1 + comm.rank), "b": 100.0 / (1 + comm.rank), "vector": 5.0}
        shapes = {"a": (2, 5), "b": (2, 5), "c": (2, 5), "vector": (5,)}
        specs = [ParameterSpec(name, shape, torch.float32, 10) for name, shape in shapes.items()]
        placement = host(comm, print)
        env = ReducerEnvironment(placement, uses=lambda: uses, controller_for=controller_for)
        return surveyed(Facts(1.0, 1.0, comm.world), _counting(), env, placement, specs)

    for facts in run_ranks(3, rank):
        assert facts.uses == {"a": 30.0, "b": 100.0, "c": 0.0}


@looped("option", ["rates='all'", "rates='auto', beta=0.0", "rates='auto', rate=0"])
def test_wrong_options_are_refused_at_once(option: str) -> None:
    with pytest.raises(ValueError, match=r"rate|beta"):
        recipe(f"scalecom({option})")


def clt_k(x: Tensor, rate: int, keep: int | None) -> Tensor:
    """Which elements of x (n,) the leader chooses, as booleans: the largest of all, or one of each chunk."""
    chosen = torch.zeros(len(x), dtype=torch.bool)
    chunks = 1 if keep is None else -(-len(x) // rate) | 1
    for first in range(chunks):
        chunk = x[first::chunks].abs()
        chosen[first + chunks * chunk.topk(-(-len(chunk) // rate)).indices] = True
    return chosen


def algorithm_1(
    grads: list[Tensor], rate: int, beta: float, warmup_steps: int, keep: int | None, order: Order
) -> tuple[list[Tensor], Tensor]:
    """One layer (n,): the mean of every step and the memories (W, n) after the last; `grads` are (W, n)."""
    means, memory = [], torch.zeros_like(grads[0])
    for step, grad in enumerate(grads):
        x, sent = memory + grad, memory + grad
        if step >= warmup_steps:
            leader = (
                step % len(x) if order == "paper" else leader_in_turn(ExchangeContext(step, 0, 0, len(x)))
            )
            sent = x * clt_k(x[leader], rate, keep)
        memory = (1 - beta) * memory + beta * (memory + grad - sent)
        means.append(sent.mean(0))
    return means, memory


@looped(
    ("beta", "keep", "order", "layers"),
    [
        (0.1, None, "random", False),
        (1.0, None, "random", False),
        (0.3, 1, "random", False),
        (0.3, None, "paper", True),
    ],
)
def test_whole_steps_are_those_of_algorithm_1(
    beta: float, keep: int | None, order: Order, layers: bool
) -> None:
    text = f"scalecom({beta=}, warmup_steps=5, rate=50, rates={{'first.*': 7}}, {keep=}, {order=}, {layers=})"
    world, steps = 3, 12
    # One unit, as a boundary would divide layers, of which each part has a choice of its own; or one a layer.
    unit_elements = None if layers else 10_000

    def rank(comm: Comm) -> list[Outcome]:
        rig = Rig(comm, text, unit_elements=unit_elements)
        return [rig.step(gradients(comm.rank, step)) for step in range(steps)]

    ranks = run_ranks(world, rank)
    for name, rate in (("first.weight", 7), ("middle.weight", 50), ("last.weight", 50)):
        grads = [
            torch.stack([gradients(rank, step)[name].float() for rank in range(world)])
            for step in range(steps)
        ]
        means, memory = algorithm_1(grads, rate, beta, 5, keep, order)
        # On either side at most eight roundings a step, of numbers below 32.
        bound = steps * 2 * 8 * 32 * 2.0**-24
        for step, mean in enumerate(means):
            assert (ranks[0][step].mean[name] - mean).abs().max() <= bound
        left = torch.stack([of_rank[-1].memory[name] for of_rank in ranks])
        assert (left - memory).abs().max() <= bound


def test_units_of_whole_layers() -> None:
    sizes = (60_000, 20_000, 20_000)
    cutter = recipe("scalecom(layers=True)").build().cutter
    assert cutter is not None
    assert tuple(cutter(sizes)) == (60_000, 80_000)
    assert recipe("scalecom").build().cutter is None
