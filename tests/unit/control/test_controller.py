"""What is measured for a decision beside dense steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire.comm import Comm, ThreadComm, run_ranks
from gradwire.control.controller import controller_for
from gradwire.control.warmup import PROBED, links_for, surveyed
from gradwire.measure.probe import Probed
from gradwire.placement import host
from gradwire.planning.costs import CodecCost, Line, Link
from gradwire.planning.facts import Facts
from gradwire.planning.links import straight_line
from gradwire.planning.profiler import DISCARDED, MEASURED, ORDINARY
from gradwire.planning.step_time import sending_s
from gradwire.recipes import Decision, recipe
from gradwire.step.environment import ReducerEnvironment
from gradwire.unit.parameters import ParameterSpec
from tests.support.rig import Rig, gradients


def _decision(text: str) -> Decision:
    decision = recipe(text).build().next
    assert decision is not None
    return decision


INNER = {
    "topk": (),
    "int8": ("all_to_all",),
    "gcomp": ("shift",),
    "star_topk(algorithm='tree')": ("all_reduce/tree",),
    "var_topk(algorithm='star')": ("all_reduce/star",),
    "allreduce(algorithm='ring')": (),
    "covap(interval=4)": (),
}


@pytest.mark.parametrize("inner", INNER)
def test_what_the_inner_recipe_sends_is_probed_beside_the_usual(inner: str) -> None:
    about = _decision(f"mergecomp(inner={inner!r})").about
    assert about is not None
    assert links_for([about], 4) == (*PROBED, *INNER[inner])


def test_a_decision_about_no_recipe_gets_the_usual_links() -> None:
    assert links_for([], 4) == PROBED


def test_auto_probes_what_its_candidates_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only the last of them sends by it."""
    asked: dict[int, tuple[str, ...]] = {}

    def probe(comm: Comm, verbs: Sequence[str], **_where: object) -> tuple[Probed, ...]:
        asked[comm.rank] = tuple(verbs)
        fit = straight_line([(0.0, 1.0), (1.0, 2.0)])
        return tuple(Probed(verb, Link(1.0 + number, 1e-9), fit) for number, verb in enumerate(verbs))

    monkeypatch.setattr("gradwire.control.warmup.probe", probe)
    monkeypatch.setattr("gradwire.recipes.auto.CANDIDATES", {"fp16": 0.0, "int8": 0.01})

    def rank(comm: ThreadComm) -> Facts | None:
        rig = Rig(comm, "auto")
        for step in range(DISCARDED + ORDINARY + MEASURED):
            assert rig.step(gradients(comm.rank, step)).error is None
        return rig.reducer.facts

    facts = run_ranks(2, rank)
    assert asked == dict.fromkeys(range(2), (*PROBED, "all_to_all"))
    assert facts[0] is not None
    assert facts[0].network is not None
    assert facts[0].network.of("all_to_all").alpha_s == 3.0


def test_all_ranks_probe_the_same_and_plan_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[int, list[str]] = {}

    def probe(comm: Comm, verbs: Sequence[str], control: Comm, **_where: object) -> tuple[Probed, ...]:
        asked[comm.rank] = list(verbs)
        fit = straight_line([(0.0, 1.0), (1.0, 2.0)])
        return tuple(Probed(verb, Link(1.0 + number, 1e-9), fit) for number, verb in enumerate(verbs))

    cost = CodecCost(Line(0.0, 0.0), Line(0.0, 0.0))
    monkeypatch.setattr("gradwire.control.warmup.probe", probe)
    monkeypatch.setattr("gradwire.control.warmup.codec_cost", lambda *_: cost)
    decision = _decision("mergecomp(inner=\"star_topk(algorithm='tree')\")")
    assert decision.about is not None
    about = [decision.about]

    def rank(comm: ThreadComm) -> Facts:
        placement = host(comm, print)
        env = ReducerEnvironment(placement, controller_for=controller_for)
        return surveyed(Facts(1.0, 1.0, comm.world), decision, env, placement, (), about)

    facts = run_ranks(3, rank)
    assert facts[0] == facts[1] == facts[2]
    assert list(asked.values()) == 3 * [["all_reduce", "all_gather", "all_reduce/tree"]]
    assert facts[0].network is not None
    assert facts[0].network.calibrated["all_reduce/tree"].alpha_s == 3.0
    assert facts[0].network.of("all_reduce").alpha_s == 1.0


@pytest.mark.parametrize(("dense_s", "budget_s"), [(None, 0.25), (0.04, 0.02), (3.0, 0.25)])
def test_probes_of_two_verbs_together_are_no_longer_than_a_step(
    dense_s: float | None, budget_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []

    def probe(*_: object, budget_s: float, **_where: object) -> tuple[Probed, ...]:
        told.append(budget_s)
        return (Probed("all_reduce", Link(1.0, 1e-9), straight_line([(1.0, 2.0)])),)

    monkeypatch.setattr("gradwire.control.warmup.probe", probe)

    def rank(comm: ThreadComm) -> Facts:
        placement = host(comm, print)
        facts = Facts(1.0, 1.0, comm.world, dense_s=dense_s)
        return surveyed(
            facts,
            _decision("covap"),
            ReducerEnvironment(placement, controller_for=controller_for),
            placement,
            (),
        )

    run_ranks(2, rank)
    assert told == 2 * [budget_s]


@pytest.mark.parametrize(("is_host", "dear"), [(True, 2.0), (False, 1.0)])
def test_how_dear_collectives_are_is_measured_in_the_steps_that_are_taken_apart(
    is_host: bool, dear: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls in which each of two ranks sends a million bytes took twice the time that is assumed.

    Where gradients are on a device, whoever waits for it spins, so what a process spends tells nothing.
    """
    fit = straight_line([(0.0, 1.0), (1.0, 2.0)])
    probed = (Probed("all_reduce", Link(1.0, 1e-9), fit),)
    monkeypatch.setattr("gradwire.control.warmup.probe", lambda *_, **__: probed)
    specs = (ParameterSpec("w", (250_000,), torch.float32, 250_000),)
    seen = Facts(1.0, 1.0, 2, collectives_s=(0.5, 0.5), sending_s=2 * sending_s(2, 1e6))
    computes: Any = SimpleNamespace(is_host=is_host)

    def rank(comm: ThreadComm) -> Facts:
        placement = replace(host(comm, print), device=computes)
        return surveyed(
            seen,
            _decision("covap"),
            ReducerEnvironment(placement, controller_for=controller_for),
            placement,
            specs,
        )

    assert run_ranks(2, rank)[0].cores.overhead_factor == pytest.approx(dear, rel=1e-12)
