"""Frozen predictions: `plan` and `simulate` on twelve clusters, and `auto` on facts of real runs.

    python -m tests.golden.predicted

writes the files of `predictions`, but for `facts.json`: that holds what dense steps measured on real ranks.
Numbers have seven digits. They change together with the model, in a commit that says why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import gradwire
from gradwire._api.simulate import Simulated
from gradwire._api.study import Candidate
from gradwire.comm import Comm, run_ranks
from gradwire.control.auto import AutoController
from gradwire.control.controller import controller_for
from gradwire.measure.clock import BackwardWatch
from gradwire.placement import Placement
from gradwire.planning.choice import LATE, Comparison
from gradwire.planning.costs import BackwardTiming, CodecCost, Cores, Line, Link, Network
from gradwire.planning.decoders import of_size
from gradwire.planning.facts import Facts
from gradwire.recipes import Composition, recipe
from gradwire.recipes.auto import comparison_of
from gradwire.recipes.dense import dense
from gradwire.recipes.parse import steady
from gradwire.step.environment import ReducerEnvironment
from gradwire.step.layout import Layout, build
from gradwire.unit.parameters import ParameterSpec

HERE = Path(__file__).parent / "predictions"
TARGET = 0.95

CODECS = {
    "int8": CodecCost(Line(1e-4, 1.3e-9), Line(5e-5, 2e-10)),
    "int4": CodecCost(Line(1e-4, 2.3e-9), Line(5e-5, 3e-10)),
    "topk(ratio=0.01)": CodecCost(Line(3e-4, 1.1e-9), Line(1e-4, 5e-12)),
    "powersgd(rank=2)": CodecCost(Line(4e-4, 1.5e-9), Line(2e-4, 7e-10)),
    "covap(interval=4)": CodecCost(Line(2e-5, 3e-10), Line(1e-5, 2e-10)),
}
SCALING = (
    "dense",
    "gcomp",
    "bf16",
    "int8",
    "int4",
    "efsignsgd",
    "topk(ratio=0.01)",
    "leader_topk(ratio=0.01)",
    "covap(interval=4)",
    "powersgd(rank=2)",
)
WORLDS = (2, 16, 256)


@dataclass(frozen=True)
class Case:
    """A model on a cluster: arguments of `plan`, and of `simulate` beside or instead of those."""

    model: Any
    plan: Mapping[str, Any]
    simulate: Mapping[str, Any]


def _case(model: Any, workers: int, rate: float, delay_s: float, step_s: float, **options: Any) -> Case:
    both = {"rate_bit_per_s": rate, "delay_s": delay_s, "step_s": step_s}
    both |= {name: options[name] for name in options if name not in ("target", "simulate")}
    simulated = {**both, "workers": WORLDS, "candidates": SCALING, **options.get("simulate", {})}
    target = {"target": options["target"]} if "target" in options else {}
    return Case(model, {**both, "workers": workers, **target}, simulated)


ALL: dict[str, Any] = {"candidates": None, "workers": (4, 64)}
CLUSTERS = {
    "two ranks, 1 Gbit/s": _case("resnet50", 2, 1e9, 1e-4, 0.18, simulate=ALL),
    "four ranks, 50 Mbit/s": _case("resnet18", 4, 5e7, 5e-4, 0.09, simulate={"stragglers": 0.05}),
    "eight ranks, 10 Gbit/s": _case("bert_base", 8, 1e10, 2e-5, 0.25),
    "nodes of eight": _case(
        "gpt2", 32, 2.5e10, 1e-5, 0.4, per_node=8, inside_bit_per_s=2e11, inside_delay_s=1e-6
    ),
    "sites far apart": _case("gpt2_medium", 4, 2e8, 2.5e-2, 0.8),
    "without overlap": _case("vgg16", 4, 2e8, 3e-4, 0.3, overlap=False),
    "a fast link": _case("resnet101", 64, 1e11, 5e-6, 0.3, simulate={"stragglers": 0.1, "seed": 3}),
    "seven billion": _case(
        "llama_7b", 8, 1e10, 5e-5, 4.0, simulate={"workers": (8,), "candidates": SCALING[::3]}
    ),
    "rounds": _case("gpt2", 2, 1e8, 5e-2, 0.5, every=30, simulate={"candidates": None}),
    "three ranks, long delay": _case("mobilenet_v2", 3, 1e9, 5e-3, 0.08, backward_s=0.05, target=0.8),
    "codecs that cost": _case(
        "mask_rcnn", 16, 1e9, 1e-4, 0.4, per_node=4, inside_bit_per_s=5e10, inside_delay_s=5e-6, codecs=CODECS
    ),
    "nodes of two": _case(
        of_size(350_000_000), 6, 1e9, 1e-3, 0.6, per_node=2, inside_bit_per_s=1.6e10, simulate=ALL
    ),
}
"""Twelve: few and many ranks, slow and fast links, short and long delays, nodes, local steps, codecs."""


def planned(name: str) -> dict[str, Any]:
    """What `plan` says of a cluster."""
    found = gradwire.plan(CLUSTERS[name].model, **CLUSTERS[name].plan)
    rows = {f"{each.recipe}{', two levels' * each.two_levels}": _row(each) for each in found.candidates}
    about = {"dense_s": found.dense_s, "ccr": found.ccr, "compute_s": found.compute_s}
    said = {"auto": found.auto, "worthwhile": found.worthwhile, "fastest": found.fastest.recipe}
    return {**_short(about), **said, **rows}


def _row(each: Candidate) -> dict[str, Any]:
    names = ("step_s", "exposed_s", "wire_bytes", "node_bytes", "day_bytes", "memory_bytes")
    return {**_short({name: getattr(each, name) for name in names}), "tried": each.tried}


def simulated(name: str) -> dict[str, Any]:
    """What `simulate` says of a cluster."""
    found = gradwire.simulate(CLUSTERS[name].model, **CLUSTERS[name].simulate)
    return {f"{each.recipe} on {each.workers}": _outcome(each) for each in found.outcomes}


def _outcome(each: Simulated) -> dict[str, Any]:
    names = ("step_s", "exposed_s", "wire_bytes", "node_bytes", "memory_bytes")
    found: dict[str, Any] = _short({name: getattr(each, name) for name in names})
    return {**found, "two_levels": each.two_levels, "warnings": list(each.warnings)}


@dataclass(frozen=True)
class Measured:
    """What dense steps found on real ranks, of a model of `specs`, with the costs of codecs by full text."""

    facts: Facts
    specs: tuple[ParameterSpec, ...]
    codecs: Mapping[str, CodecCost]


@cache
def measured() -> dict[str, Measured]:
    """The runs of `facts.json`, by name."""
    raw = json.loads((HERE / "facts.json").read_text(encoding="utf-8"))
    return {name: _measured(each) for name, each in raw["runs"].items()}


def _measured(raw: Mapping[str, Any]) -> Measured:
    specs = tuple(
        ParameterSpec(name, tuple(shape), torch.float32, torch.Size(shape).numel())
        for name, shape in raw["specs"]
    )
    numel = tuple(spec.numel for spec in specs)
    backward = BackwardTiming(raw["before_s"], tuple(raw["ready_s"]), numel, raw["backward_s"])
    links = {verb: Link(*each) for verb, each in raw["links"].items()}
    facts = Facts(
        raw["backward_s"],
        sum(raw["collectives_s"]),
        raw["world"],
        backward,
        Network(Link(*raw["link"]), links),
        collectives_s=tuple(raw["collectives_s"]),
        dense_s=raw["dense_s"],
        gradient_bytes=4.0 * sum(numel),
        buckets=tuple(raw["buckets"]),
        dense_noise=raw["dense_noise"],
        cores=Cores(*raw["cores"]),
        steps=raw["steps"],
    )
    codecs = {
        steady(text, "candidate").text: CodecCost(Line(*each[:2]), Line(*each[2:]))
        for text, each in raw["codecs"].items()
    }
    return Measured(facts, specs, codecs)


def forecast(name: str) -> dict[str, Any]:
    """What `auto` makes of the facts of a run: a step of every candidate, and the first trial."""
    run, seen = measured()[name], list[Facts]()

    def decide(facts: Facts) -> Composition:
        seen.append(facts)
        return dense()

    def cost(_exchange: object, text: str, *_: object, **__: object) -> CodecCost:
        return run.codecs[text]

    def layout_of(composition: Composition, where: torch.device) -> Layout:
        return build(run.specs, composition, None, where, run.facts.world)

    def rank(comm: Comm) -> None:
        placement = Placement("frozen", comm, comm, lambda _job: None)
        decision = recipe("auto").build().next
        assert decision is not None
        env, decision = (
            ReducerEnvironment(placement, controller_for=controller_for),
            replace(decision, decide=decide),
        )
        controller = AutoController(decision, run.specs, env, placement, BackwardWatch(), layout_of)
        controller.decide(run.facts)

    with patch("gradwire.control.auto.codec_cost", cost):
        run_ranks(1, rank)
    [facts] = seen
    comparison = comparison_of(facts, TARGET, LATE)
    rows = {
        text: {
            **_short({"step_s": each.step_s(), "work_s": each.work_s, "wire_bytes": each.wire_bytes}),
            "calls": each.calls,
            "runs as": facts.recut[text],
        }
        for text, each in facts.forecasts.items()
    }
    return {"trial": _named(comparison), **rows}


def _named(comparison: Comparison) -> dict[str, str | None]:
    first, best = comparison.next_trial(), comparison.foreseen()
    return {"first": first and first.recipe, "foreseen": best and best.recipe}


def _short(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{number:.7g}") for name, number in numbers.items()}


def write() -> None:
    """All files that are predicted."""
    found = {
        "plan": {name: planned(name) for name in CLUSTERS},
        "simulate": {name: simulated(name) for name in CLUSTERS},
        "auto": {name: forecast(name) for name in measured()},
    }
    for name, predictions in found.items():
        (HERE / f"{name}.json").write_text(_lines(predictions), encoding="utf-8")


def _lines(document: Mapping[str, Mapping[str, Any]]) -> str:
    """JSON with a line for each row."""
    parts = []
    for name, rows in document.items():
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
        parts.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    write()
