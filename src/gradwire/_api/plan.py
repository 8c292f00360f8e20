"""Predict which recipe is worth using on a cluster, by the assumptions of `gradwire._api.study`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from gradwire._api.study import (
    Candidate,
    Study,
    Told,
    candidates_of,
    late_text,
    link_inside,
    link_of,
)
from gradwire.arguments import checked
from gradwire.control.forecast import ClusterForecasts
from gradwire.planning.choice import LATE, LEAD, Option
from gradwire.planning.cluster import Cluster
from gradwire.planning.collectives import Transfer
from gradwire.planning.costs import ENOUGH, BackwardTiming, CodecCost, Cores
from gradwire.planning.facts import Facts
from gradwire.planning.interval import bucketed
from gradwire.planning.shapes import Profile
from gradwire.quantities import bytes_text, columns, counted, ms_text, table_text, titled, wrapped
from gradwire.recipes.auto import CANDIDATES as CHOICES
from gradwire.recipes.auto import comparison_of, why_dense
from gradwire.recipes.parse import short, steady
from gradwire.recipes.trial import said_of

CANDIDATES = (
    "dense",
    "gcomp",
    "fp16",
    "bf16",
    "bf16(sum='fp32')",
    "int8",
    "int8(collective='all_gather')",
    "fp8",
    "int4",
    "int4(collective='all_gather')",
    "efsignsgd",
    "topk(ratio=0.1)",
    "topk(ratio=0.01)",
    "topk(ratio=0.001)",
    "leader_topk(ratio=0.1)",
    "leader_topk(ratio=0.01)",
    "leader_topk(ratio=0.001)",
    "covap(interval=2)",
    "covap(interval=3)",
    "covap(interval=4)",
    "powersgd(rank=1)",
    "powersgd(rank=2)",
    "powersgd(rank=4)",
    "acpsgd(rank=4)",
)
"""The recipes that `plan` compares: all that `auto` tries by default, and of every other kind a mild and a
strong one. `auto` sends values that are chosen in 16 bits."""


@dataclass(frozen=True)
class Plan:
    """The candidates, the fastest first, with a recommendation. All of it is predicted.

    With `every` above 1, candidates exchange what as many local steps have changed; `dense_s`, `ccr` and
    `auto` are about an exchange in each step, to compare. `ccr` is the time of a dense all-reduce divided by
    that of the backward pass. `auto` is the choice that the recipe of that name should make, and `why` its
    reason. `worthwhile` is false if compression should gain nothing measurable. `advice` says that in a
    sentence. If `sharded`, all of it is about FSDP2's own traffic, which `auto` leaves as it is, and `ccr`
    counts what a step waits for.
    """

    model: str
    source: str
    parameters: int
    workers: int
    nodes: int
    every: int
    compute_s: float
    dense_s: float
    ccr: float
    target: float
    auto: str
    why: str
    worthwhile: bool
    advice: str
    candidates: tuple[Candidate, ...]
    sharded: bool = False

    @property
    def fastest(self) -> Candidate:
        """Candidate of least time among those that `auto` would try by default; among all, if it would only
        try dense.
        """
        return _fastest(self.candidates)

    def as_dict(self) -> dict[str, Any]:
        """The plan's numbers and texts, for JSON."""
        rows = [dict(vars(each)) for each in self.candidates]
        return {**vars(self), "fastest": self.fastest.recipe, "predicted": True, "candidates": rows}

    def __str__(self) -> str:
        width = columns()
        told, tables = (
            self._of_rounds() if self.every > 1 else self._of_fsdp() if self.sharded else self._of_steps()
        )
        return "\n\n".join([titled(told, width), *tables])

    def _about(self, said: str) -> str:
        return f"predicted, not measured: {self.model}, {self.parameters / 1e6:.1f} M parameters{said}"

    def _ranks(self) -> str:
        nodes = "" if self.nodes == self.workers else f" on {counted(self.nodes, 'node')}"
        return f", {counted(self.workers, 'rank')}{nodes}"

    def _of_steps(self) -> tuple[list[str], list[str]]:
        width = columns()
        told = [
            self._about(self._ranks()),
            self.advice,
            self.source,
            f"without communication {ms_text(self.compute_s)}, dense {ms_text(self.dense_s)}, "
            f"CCR {self.ccr:.2f}",
            f"auto is expected to choose {short(self.auto)}: {self.why}",
            "residual: norm of the unsent gradient, as a share of the norm of one step's; assumed, from "
            f"trainings of other models. auto tries recipes with about {LATE:g} or less, and measures it on "
            "your model",
        ]
        if all(each.codec == "free" for each in self.candidates):
            told.append(
                "encoding and decoding are taken as free: their costs are not known. With them, auto may "
                "choose another recipe. `gradwire probe --codecs` measures them"
            )
        tables = []
        for two_levels, title in ((False, ""), (True, f"{wrapped(LEVELS, width)}\n")):
            if found := [each for each in self.candidates if each.two_levels == two_levels]:
                tables.append(title + _table_of(found, width))
        if any(each.at_most for each in self.candidates):
            frames = "* near-lossless frames depend on the values; their length is assumed"
            tables.append(wrapped(frames, width))
        return told, tables

    def _of_fsdp(self) -> tuple[list[str], list[str]]:
        shares_links = 1 < self.nodes < self.workers
        told = [
            self._about(f" under FSDP2{self._ranks()}"),
            *_memory_of(self.candidates, self.workers // self.nodes if shares_links else 1),
            self.advice,
            self.source,
            f"without communication {ms_text(self.compute_s)}, FSDP2 as it is {ms_text(self.dense_s)}",
            "auto does not choose among these yet; encoding and decoding are taken as free",
        ]
        if shares_links:
            told.append(
                "what is coded is added up inside nodes first, attach(nodes=…); sent: over a node's link"
            )
        rows = [_cells(each, over_node=shares_links)[:5] for each in self.candidates]
        head = ("scatter+gather", "step", "efficiency", "sent", "memory")
        return told, [table_text(head, rows, columns())]

    def _of_rounds(self) -> tuple[list[str], list[str]]:
        width = columns()
        told = [
            self._about(f", {counted(self.workers, 'replica')}, a round after {self.every} local steps"),
            self.advice,
            self.source,
            f"step without communication {ms_text(self.compute_s)}; an exchange in each step: dense "
            f"{ms_text(self.dense_s)}, CCR {self.ccr:.2f}",
        ]
        rows = []
        for each in self.candidates:
            steps = math.ceil(each.exposed_s / self.compute_s)
            rows.append(
                (
                    each.recipe,
                    ms_text(each.step_s),
                    f"{each.share_of_linear:.0%}",
                    ms_text(each.exposed_s),
                    f"delay={steps}" if steps < self.every else "-",
                    bytes_text(each.wire_bytes),
                    bytes_text(each.day_bytes),
                    each.codec,
                )
            )
        head = ("recipe", "step", "efficiency", "round", "hidden by", "sent", "a day", "codec")
        marks = (
            "round: what it adds to its step; sent: per replica and round; a day: per replica",
            "local steps are another algorithm, whose loss is not predicted",
        )
        return told, [table_text(head, rows, width), "\n".join(wrapped(text, width) for text in marks)]


LEVELS = "hierarchical: added up inside nodes first, attach(nodes=…); sent: over a node's link"


@checked
def plan(
    model: str | Profile | nn.Module,
    *,
    workers: int,
    rate_bit_per_s: float,
    step_s: float,
    delay_s: float = 0.0,
    backward_s: float | None = None,
    per_node: int = 1,
    inside_bit_per_s: float | None = None,
    inside_delay_s: float = 0.0,
    overlap: bool = True,
    target: float = 0.95,
    every: int = 1,
    sharded: bool = False,
    candidates: Iterable[str] | None = None,
    codecs: Mapping[str, CodecCost] | None = None,
    cores: Cores = ENOUGH,
    gpu: bool = False,
    told: Told | None = None,
) -> Plan:
    """Predict how long a step takes with each candidate recipe on a cluster; a pure function.

    Args:
        model: a profile's name (`gradwire.planning.shapes.models`), a profile, or a module, of which only the
            parameters' shapes are read.
        workers: the number of ranks.
        rate_bit_per_s: rate of a rank's link, or with `per_node` above 1 of a node's link, which its ranks
            share.
        step_s: time of a step on one rank without communication.
        delay_s: one-way delay between two ranks, or nodes.
        backward_s: time of the backward pass within `step_s`; two thirds of it by default.
        per_node: the number of ranks on each node.
        inside_bit_per_s: rate of a rank's link to the others of its node.
        inside_delay_s: one-way delay inside a node.
        overlap: whether gradients travel during the backward pass. Without overlap, all are ready at its end.
        target: the share of linear that `auto` aims at.
        every: local steps from one exchange to the next. Above 1, each worker is a whole replica, and its
            step includes all that its own ranks exchange. Nothing of a round is hidden.
        sharded: whether it is FSDP2's own traffic that is compressed. Candidates then name a scatter and a
            gather, such as "int4+int8", and `overlap`, `target` and `codecs` do not count.
        candidates: recipes with fixed options.
        codecs: the costs of encoding and decoding, by recipe.
        cores: the processor cores of a rank, which codecs and collectives share with the computation.
        gpu: whether ranks compute on GPUs. Recipes that stay on the device then send in its larger units, and
            FSDP2 sends over NCCL while a GPU computes. A codec's stated cost should be that of the GPU.
        told: called with each finished row in words, and the share of the work that is done.

    Raises `ValueError` for an impossible number, an unknown model, and a recipe that must measure.

    >>> cheap = plan("resnet50", workers=32, rate_bit_per_s=100e9, step_s=0.18)
    >>> cheap.worthwhile, cheap.auto
    (False, 'dense')
    >>> slow = plan("resnet50", workers=4, rate_bit_per_s=1e9, step_s=0.18)
    >>> slow.worthwhile, round(slow.ccr, 1)
    (True, 10.2)
    >>> there = plan("resnet50", workers=32, rate_bit_per_s=10e9, step_s=0.18, gpu=True, candidates=["int8"])
    >>> there.candidates[0].step_s < 0.2
    True
    >>> rounds = plan("gpt2", workers=2, rate_bit_per_s=1e8, delay_s=0.05, step_s=0.5, every=30)
    >>> [f"{each.recipe}: {each.step_s:.2f} s" for each in rounds.candidates[::5]]
    ['sparseloco: 0.51 s', 'dense: 1.83 s']
    """
    texts = candidates_of(candidates, CANDIDATES, every, sharded)
    if workers < 2:
        raise ValueError(f"workers={workers}: on a single rank nothing is sent")
    if not 0.0 < target <= 1.0:
        raise ValueError(f"target={target} is outside (0, 1], the share of the no-communication speed")
    if not isinstance(cores, Cores):
        raise ValueError(f"cores={cores!r} are not gradwire.planning.costs.Cores")
    inside = link_inside(inside_bit_per_s, inside_delay_s)
    cluster = Cluster(workers, link_of(rate_bit_per_s, delay_s), per_node, inside)
    study = Study(
        model,
        [cluster],
        texts,
        step_s=step_s,
        backward_s=backward_s,
        overlap=overlap,
        every=every,
        sharded=sharded,
        codecs=codecs,
        cores=cores,
        gpu=gpu,
    )

    # 1. A row for each recipe; where ranks share nodes, one on one level and one on two.
    levels = (None,) if sharded else (False, True) if cluster.shares_links else (False,)
    work = len(levels) * len(texts) + (0 if sharded else len(CHOICES))
    rows: list[Candidate] = []
    for two_levels in levels:
        for text in texts:
            rows.append(study.predicted(text, cluster, two_levels))
            if told is not None:
                told(f"{text}: {ms_text(rows[-1].step_s)}", len(rows) / work)
    rows.sort(key=lambda row: row.step_s)

    # 2. What `auto` would choose, and whether anything is worth using.
    if sharded:
        dense, best = study.predicted("dense", cluster), rows[0]
        dense_s, ccr = dense.step_s, dense.exposed_s / study.backward.total_s
        chosen, why = "dense", "auto does not choose among FSDP2's own traffic yet"
        worthwhile = best.step_s < (1.0 - LEAD) * dense_s
        gain = f"{best.recipe}, {dense_s / best.step_s:.1f} times as fast as FSDP2 as it is"
        advice = f"worth trying: {gain}" if worthwhile else f"do not bother: {gain}"
    else:
        attached = study.on(cluster, cluster.shares_links, False)
        facts = _facts(attached, study.backward, cluster, study.codecs, told, len(rows) / work)
        comparison = comparison_of(facts, target, LATE)
        foreseen = comparison.foreseen()
        if foreseen is None:
            chosen, why = "dense", why_dense(comparison)
        else:
            chosen = foreseen.text
            why = said_of(comparison, foreseen.recipe) + comparison.why_milder(foreseen)
        best = _fastest(rows)
        # A user who names candidates asks about those, and not about what `auto` would do instead.
        if foreseen is not None and texts == CANDIDATES:
            best = _as_cut(foreseen, facts, best, two_levels=cluster.shares_links)
        dense_s = study.on(cluster, False, False).of_text("dense", study.codecs.get("dense")).step_s()
        ccr, worthwhile = facts.ccr, facts.ccr >= 1.0 and best.step_s < (1.0 - LEAD) * dense_s
        advice = _advice(worthwhile, facts, best, dense_s, chosen)
    return Plan(
        model=study.profile.model,
        source=study.profile.source,
        parameters=study.profile.parameters,
        workers=cluster.workers,
        nodes=cluster.nodes,
        every=every,
        compute_s=study.compute_s,
        dense_s=dense_s,
        ccr=ccr,
        target=target,
        auto=chosen,
        why=why,
        worthwhile=worthwhile,
        advice=advice,
        candidates=tuple(rows),
        sharded=sharded,
    )


def _memory_of(rows: Sequence[Candidate], parts: int) -> list[str]:
    """Lines about what candidates remember or hold, if one does: on each rank one of `parts` of the model."""
    of = "the whole model" if parts == 1 else f"1/{parts} of the model"
    half = "half of that with memory_dtype=torch.bfloat16, half again with skipped='keep'"
    said = []
    for exact, what in ((False, f"int4 remembers a gradient of {of}"), (True, f"exact gathers hold {of}")):
        most = max((row.memory_bytes for row in rows if row.recipe.endswith("+exact") == exact), default=0.0)
        if most:
            rest = "what int4 remembers is part of it" if exact else half
            said.append(f"{what} on every rank: {bytes_text(most)}; {rest}")
    return said


def _fastest(rows: Sequence[Candidate]) -> Candidate:
    """See `Plan.fastest`."""
    tried = [row for row in rows if row.tried and row.recipe != "dense"]
    dense = [row for row in rows if row.recipe == "dense"]
    return min([*tried, *dense] if tried else rows, key=lambda row: row.step_s)


def _facts(
    forecasts: ClusterForecasts,
    backward: BackwardTiming,
    cluster: Cluster,
    codecs: Mapping[str, CodecCost],
    told: Told | None,
    done: float,
) -> Facts:
    """The facts that `auto` would measure before its first trial; on shards, if ranks share nodes.

    Args:
        forecasts: of the model on the cluster.
        backward: elements and ready times of the parameters.
        cluster: the ranks and their links.
        codecs: costs of codecs, by recipe.
        told: called with each recipe that has been forecast, and the share of the work that is done.
        done: the share that was done before.
    """
    buckets, levels = bucketed(backward.numel), cluster.shares_links
    ranks, parts = (cluster.nodes, cluster.per_node) if levels else (cluster.workers, 1)
    timed = cluster.between_s if levels else cluster.seconds
    sums = [timed(Transfer("all_reduce", 4.0 * numel / parts)) for numel in buckets]
    found = {}
    for text in CHOICES:
        found[text] = forecasts.as_cut(text, codecs.get(steady(text, "candidate").text))
        if told is not None:
            told(f"auto, {text}", done + (1.0 - done) * len(found) / len(CHOICES))
    dense_s = forecasts.of_text("dense").step_s()
    return Facts(
        backward.total_s,
        sum(sums),
        ranks,
        backward,
        cluster.network,
        collectives_s=tuple(sums),
        dense_s=dense_s - backward.before_s,
        gradient_bytes=4.0 * sum(backward.numel) / parts,
        buckets=buckets,
        forecasts={text: each for text, (_, each) in found.items()},
        recut={text: each.text for text, (each, _) in found.items()},
    )


def _as_cut(chosen: Option, facts: Facts, row: Candidate, *, two_levels: bool) -> Candidate:
    """Copy `row`, a candidate's row, for the recipe that `auto` chose: with its name, the time of its step
    and its levels. Its units may differ from those that the row was computed with.
    """
    fewer = " in fewer units" if chosen.text.startswith("mergecomp(") else ""
    step_s = facts.forecasts[chosen.recipe].step_s()
    return replace(row, recipe=f"{chosen.recipe}{fewer}", step_s=step_s, two_levels=two_levels)


def _advice(worthwhile: bool, facts: Facts, best: Candidate, dense_s: float, chosen: str) -> str:
    no = "do not bother" if chosen == "dense" else "little to gain"
    if facts.ccr < 1.0:
        left = f"{best.recipe} would save {max(1.0 - best.step_s / dense_s, 0.0):.0%} of a dense step"
        return f"{no}: an all-reduce takes less than the backward pass; {left}"
    dense, fast = ms_text(dense_s), f"{ms_text(best.step_s)} with {best.recipe}"
    fast += " hierarchically" if best.two_levels else ""
    if best.recipe == "dense":
        return f"auto should stay with dense, {dense} a step: it tries nothing that is predicted to be faster"
    if not worthwhile:
        said = f"nothing that auto tries is predicted to be faster than dense by {LEAD:.0%}"
        return f"{no}: {said}: a step takes {fast}, and {dense} with dense"
    gain = f"{dense_s / best.step_s:.1f} times as fast as dense"
    return f"worth trying: a step falls from {dense} to {fast}, {gain}"


def _table_of(found: Sequence[Candidate], width: int) -> str:
    """Table of the candidates in lines of at most `width` characters, those that `auto` tries first. The cost
    of the codec has a column only if some are known.
    """
    head = ("recipe", "step", "efficiency", "sent", "memory", "residual", "auto", "codec")
    last = None if any(each.codec != "free" for each in found) else -1
    rows = sorted(found, key=lambda each: (not each.tried, each.step_s))
    return table_text(head[:last], [_cells(each, over_node=each.two_levels)[:last] for each in rows], width)


def _cells(each: Candidate, *, over_node: bool) -> tuple[str, ...]:
    """Texts of a row's cells. With `over_node`, bytes are those over a node's link, else those of a rank."""
    sent = bytes_text(each.node_bytes if over_node else each.wire_bytes) + "*" * each.at_most
    linear, memory = f"{each.share_of_linear:.0%}", bytes_text(each.memory_bytes)
    tried = "tries" if each.tried else ""
    late = late_text(each.assumed_late)
    return (each.recipe, ms_text(each.step_s), linear, sent, memory, late, tried, each.codec)
