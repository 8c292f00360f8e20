"""Predict how recipes scale from two ranks to thousands, from numbers that the user states.

It makes the assumptions of `gradwire._api.study`, and two more:

- Each rank's computing time varies independently from step to step, log-normally. A step waits for the
  slowest rank.
- All of a step's all-gathers may be received before the first is decoded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from torch import nn

from gradwire._api.study import Candidate, Study, Told, candidates_of, late_text, link_inside, link_of
from gradwire.arguments import checked
from gradwire.planning.cluster import Cluster, straggler_factors
from gradwire.planning.costs import CodecCost
from gradwire.planning.shapes import Profile
from gradwire.quantities import columns, ms_text, table_text, wrapped
from gradwire.recipes import entries

WORKERS = tuple(1 << power for power in range(1, 13))
"""2 to 4096."""
STEPS = 32
"""Steps whose slowest ranks are drawn."""
MOST_SPREAD = 10.0
"""Largest `stragglers`, far beyond those of any cluster."""
MEMORY_BYTES = 16 << 30
TOLERATED = 1.05
"""Bytes may grow this much faster than an all-reduce's without a flag: units are padded to whole blocks."""
NO_FIT, GROWS, MORE = "does not fit", "bytes grow with workers", "sends more than dense"


@dataclass(frozen=True)
class Simulated(Candidate):
    """One recipe on `workers` workers.

    There are three `warnings`. A recipe "does not fit" into the stated memory, its "bytes grow with workers"
    where an all-reduce's hardly do, or it "sends more than dense". Where ranks share nodes, these two are
    about `node_bytes`. Whether recipes run on `two_levels` is decided as by `attach`.
    """

    workers: int
    warnings: tuple[str, ...]

    @property
    def efficiency(self) -> float:
        """The speed per rank against a rank alone."""
        return self.share_of_linear


@dataclass(frozen=True)
class Simulation:
    """Outcomes by recipe, then by workers. All of it is predicted.

    `alone` has, by workers, the efficiency with free communication: late ranks alone reduce it.
    """

    model: str
    source: str
    parameters: int
    every: int
    compute_s: float
    stragglers: float
    seed: int
    workers: tuple[int, ...]
    alone: tuple[float, ...]
    outcomes: tuple[Simulated, ...]

    @property
    def curves(self) -> dict[str, list[Simulated]]:
        """The outcomes of each recipe, by workers. Those that `auto` tries come first, if there is an
        exchange in each step; of both kinds the most efficient on most workers first.
        """
        found: dict[str, list[Simulated]] = {}
        for each in self.outcomes:
            found.setdefault(each.recipe, []).append(each)

        def place(outcomes: Sequence[Simulated]) -> tuple[bool, float]:
            last = outcomes[-1]
            return self.every == 1 and not last.tried, -last.efficiency

        return dict(sorted(found.items(), key=lambda item: place(item[1])))

    def as_dict(self) -> dict[str, Any]:
        """The simulation's numbers and texts, for JSON."""
        rows = [
            dict(vars(each), efficiency=each.efficiency, warnings=[*each.warnings]) for each in self.outcomes
        ]
        for row in rows:
            del row["share_of_linear"]  # which is the efficiency
        lists = {"workers": list(self.workers), "alone": list(self.alone), "outcomes": rows}
        return {**vars(self), **lists, "predicted": True}

    def __str__(self) -> str:
        width = columns()
        rounds = f", a round after {self.every} local steps" if self.every > 1 else ""
        late = f"{rounds}, stragglers {self.stragglers:g} (seed {self.seed})" if self.stragglers else rounds
        title = (
            f"predicted, not measured: {self.model}, {self.parameters / 1e6:.1f} M parameters, "
            f"{ms_text(self.compute_s)} without communication{late}"
        )
        rows = [("no communication", "", *(f"{100 * each:.0f} " for each in self.alone))]
        rows += [
            (recipe, late_text(outcomes[0].assumed_late), *map(_cell, outcomes))
            for recipe, outcomes in self.curves.items()
        ]
        # Rounds of local steps leave something else behind, and so do FSDP2's own scatters.
        says_late = self.every == 1 and any(each.assumed_late is not None for each in self.outcomes)
        named = 2 if says_late else 1
        head = ("", "residual (assumed)")[:named]
        names = max(len(row[0]) for row in rows) + sum(2 + len(each) for each in head[1:])
        at_once = max(1, (width - names) // (2 + max(5, len(str(self.workers[-1])))))
        lines = [wrapped(title, width, hanging="  "), "efficiency, % of a rank alone, by workers"]
        for first in range(0, len(self.workers), at_once):
            these = slice(first, first + at_once)
            worlds = (f"{world} " for world in self.workers[these])
            cells = [(*row[:named], *row[2:][these]) for row in rows]
            lines += [table_text((*head, *worlds), cells, width), ""]
        marks = "! does not fit into memory; ^ bytes grow with workers; + sends more than dense, too"
        return "\n".join([*lines[:-1], wrapped(marks, width)])


def _cell(each: Simulated) -> str:
    marks = {NO_FIT: "!", MORE: "+", GROWS: "^"}
    mark = next((mark for warning, mark in marks.items() if warning in each.warnings), " ")
    return f"{100 * each.efficiency:.0f}{mark}"


def fixed_recipes() -> tuple[str, ...]:
    """All recipes that need not measure first, with default options; `covap` at an interval of 4."""
    built = {entry.name: entry.build() for entry in entries()}
    fixed = [name for name, each in built.items() if each.next is None and each.watch is None]
    return (*fixed, "covap(interval=4)")


@checked
def simulate(
    model: str | Profile | nn.Module,
    *,
    rate_bit_per_s: float,
    step_s: float,
    workers: Iterable[int] = WORKERS,
    delay_s: float = 0.0,
    backward_s: float | None = None,
    per_node: int = 1,
    inside_bit_per_s: float | None = None,
    inside_delay_s: float = 0.0,
    overlap: bool = True,
    every: int = 1,
    sharded: bool = False,
    stragglers: float = 0.0,
    seed: int = 0,
    memory_bytes: float = MEMORY_BYTES,
    candidates: Iterable[str] | None = None,
    codecs: Mapping[str, CodecCost] | None = None,
    told: Told | None = None,
) -> Simulation:
    """Predict how each recipe scales with the number of workers; a pure function.

    Arguments with the names of those of `gradwire.plan` mean the same. Where ranks share nodes, each recipe
    is predicted on one level or on two, as `attach` decides by bytes (`docs/where-it-runs.md`).

    Args:
        workers: the number of ranks in each world. A world of up to `per_node` ranks is one node.
        stragglers: standard deviation of the logarithm of a rank's computing time, drawn anew in each step.
            Over `every` local steps such times add up, and their sum varies √every times less.
        seed: the seed of the draws.
        sharded: whether it is FSDP2's own traffic that is compressed, as for `plan`.
        memory_bytes: the memory that a rank has on top of what DDP takes.
        candidates: recipes with fixed options. All by default, or with `every` above 1 those that `plan`
            compares.

    Raises `ValueError` in the same cases as `plan`.

    >>> found = simulate(
    ...     "resnet50", rate_bit_per_s=1e10, step_s=0.18, workers=(2, 64), candidates=["dense", "efsignsgd"]
    ... )
    >>> [(each.recipe, each.workers, round(each.efficiency, 2)) for each in found.outcomes]
    [('dense', 2, 0.96), ('dense', 64, 0.81), ('efsignsgd', 2, 1.0), ('efsignsgd', 64, 0.8)]
    """
    worlds = tuple(sorted(set(workers)))
    if min(worlds, default=0) < 2:
        raise ValueError(f"workers={list(worlds)}: give numbers of ranks from 2 on")
    if not 0.0 <= stragglers <= MOST_SPREAD:
        raise ValueError(f"stragglers={stragglers} is outside 0 … {MOST_SPREAD:.0f}; 0.1 is usual")
    if seed < 0:
        raise ValueError(f"seed={seed} must not be negative")
    if not memory_bytes >= 0.0:
        raise ValueError(f"memory_bytes={memory_bytes} must not be negative")
    inside = link_inside(inside_bit_per_s, inside_delay_s)
    link = link_of(rate_bit_per_s, delay_s)
    clusters = [Cluster(world, link, min(per_node, world), inside) for world in worlds]
    texts = candidates_of(candidates, fixed_recipes(), every, sharded)
    study = Study(
        model,
        clusters,
        texts,
        step_s=step_s,
        backward_s=backward_s,
        overlap=overlap,
        every=every,
        sharded=sharded,
        codecs=codecs,
    )
    spread = stragglers / math.sqrt(every)
    slowed = [straggler_factors(spread, world, STEPS if stragglers else 1, seed) for world in worlds]
    dense = [study.predicted("dense", cluster) for cluster in clusters]
    outcomes: list[Simulated] = []
    for text in texts:
        for cluster, dense_here, factors in zip(clusters, dense, slowed, strict=True):
            here = study.predicted(text, cluster, slowed=factors)
            told_of = {NO_FIT: here.memory_bytes > memory_bytes}
            if not sharded:
                two = _two_of(cluster)
                of_two = _passed_bytes(study.predicted(text, two, here.two_levels), two)
                links = cluster.nodes if cluster.shares_links else cluster.workers
                all_reduce = 2 * (links - 1) / links  # of what it sends over two
                sent = _passed_bytes(here, cluster)
                told_of[GROWS] = sent > TOLERATED * all_reduce * of_two
                told_of[MORE] = sent > TOLERATED * _passed_bytes(dense_here, cluster)
            warnings = tuple(warning for warning, applies in told_of.items() if applies)
            outcomes.append(Simulated(**vars(here), workers=cluster.workers, warnings=warnings))
        if told is not None:
            cells = " ".join(f"{_cell(each):>4}" for each in outcomes[-len(worlds) :])
            told(f"{text}: {cells}", len(outcomes) / (len(texts) * len(worlds)))
    return Simulation(
        model=study.profile.model,
        source=study.profile.source,
        parameters=study.profile.parameters,
        every=every,
        compute_s=step_s,
        stragglers=stragglers,
        seed=seed,
        workers=worlds,
        alone=tuple(1.0 / fmean(factors) for factors in slowed),
        outcomes=tuple(outcomes),
    )


def _passed_bytes(found: Candidate, cluster: Cluster) -> float:
    """Bytes over the link that is slow: the busiest node's, or a rank's own."""
    return found.node_bytes if cluster.shares_links else found.wire_bytes


def _two_of(cluster: Cluster) -> Cluster:
    """Two nodes of `cluster`, or two ranks where each has a link of its own, or all share a node."""
    if not cluster.shares_links:
        return Cluster(2, cluster.link)
    return replace(cluster, workers=2 * cluster.per_node)
