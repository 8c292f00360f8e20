"""Predict which recipe is worth using on a cluster, from numbers that the user states.

Nothing is measured, and the same arguments always give the same plan. Assumptions:

- Ranks are alike, links are full-duplex, and collectives are those that gloo runs
  (`docs/engineering/costs.md`).
- Gradients are float32. They are ready when the arithmetic of their layers is done.
- Where no `cores` are stated, messages and calls take no processor time. Neither does a codec without a
  stated cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import fmean
from typing import Any

from torch import nn

from gradwire._api.plan_fsdp import CANDIDATES as OF_FSDP
from gradwire._api.plan_fsdp import forecast_fsdp
from gradwire.arguments import checked
from gradwire.control.forecast import ClusterForecasts, specs_of_profile
from gradwire.planning.choice import LATE, LEAD, Option
from gradwire.planning.cluster import Cluster
from gradwire.planning.collectives import Transfer
from gradwire.planning.costs import ENOUGH, BackwardTiming, CodecCost, Cores, Link
from gradwire.planning.facts import Facts
from gradwire.planning.interval import bucketed
from gradwire.planning.shapes import Layer, Profile, load, ready_of
from gradwire.planning.step_time import Forecast, Sent, step_time
from gradwire.quantities import bytes_text, columns, counted, ms_text, table_text, wrapped
from gradwire.recipes.auto import CANDIDATES as CHOICES
from gradwire.recipes.auto import comparison_of, may_be_within, why_dense
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

BETWEEN_ROUNDS = ("dense", "bf16", "int8", "int4", "topk(ratio=0.01)", "sparseloco")
"""Recipes that `plan` compares for rounds of local steps."""

DAY_S = 86400.0

BACKWARD_SHARE = 2 / 3
"""The share of backward in a step: gradients by inputs and weights take twice the arithmetic of forward."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for a recipe, by `plan` or by `simulate`.

    `step_s` is the mean time of a step. `share_of_linear` is the speed as a share of that without
    communication. `exposed_s` is what an exchange adds to its step. `wire_bytes` are the bytes per rank and
    exchange, and `day_bytes` those per rank in a day of training. `node_bytes` are those over the busiest
    node's link and exchange, 0 with a single node. `memory_bytes` come on top of DDP's memory. With
    `at_most`, a part of the bytes is assumed (`gradwire.control.forecast`). `codec` is "stated" if the user
    gave the codec's cost, else "free". With `two_levels`, the ranks of a node add up first
    (`attach(nodes=…)`). `assumed_late` is how much of the gradient the recipe is assumed to leave in its
    memory, in steps' worth, `None` if nothing is assumed; from trainings of other models. `auto` would have
    `tried` it by default, because that is little.
    """

    recipe: str
    step_s: float
    share_of_linear: float
    exposed_s: float
    wire_bytes: float
    node_bytes: float
    day_bytes: float
    memory_bytes: float
    at_most: bool
    codec: str
    two_levels: bool
    assumed_late: float | None = field(default=None, kw_only=True)
    tried: bool = field(default=False, kw_only=True)


def numbers_of(
    recipe: str,
    found: Forecast,
    every: int,
    *,
    stated: bool,
    two_levels: bool,
    late: Sequence[float] = (1.0,),
) -> dict[str, Any]:
    """The fields of a `Prediction`, by name.

    Args:
        recipe: name of the recipe.
        found: its forecast.
        every: steps from one exchange to the next.
        stated: whether the costs of its codec were given; else it counts as free.
        two_levels: whether ranks reduce inside nodes first.
        late: for each step of a sample, the computing time of the slowest rank as a multiple of the usual
            one.
    """
    step_s = fmean(found.mean_step_s(every, slowed) for slowed in late)
    return {
        "recipe": recipe,
        "step_s": step_s,
        "share_of_linear": found.compute_s / step_s,
        "exposed_s": found.exposed_s,
        "wire_bytes": found.wire_bytes,
        "node_bytes": found.node_bytes,
        "day_bytes": DAY_S / (every * step_s) * found.wire_bytes,
        "memory_bytes": found.memory_bytes,
        "at_most": found.at_most,
        "codec": "stated" if stated else "free",
        "two_levels": two_levels,
        "assumed_late": assumed_late(recipe),
        "tried": steady(recipe, "candidate").text in _tried(),
    }


@dataclass(frozen=True)
class Candidate(Prediction):
    """The prediction for one recipe on one cluster."""


@dataclass(frozen=True)
class Plan:
    """The candidates, the fastest first, with a recommendation. All of it is predicted.

    With `every` above 1, candidates exchange what as many local steps have changed; `dense_s`, `ccr` and
    `auto` are about an exchange in each step, to compare. `ccr` is the time of a dense all-reduce divided by
    that of the backward pass. `auto` is the choice that the recipe of that name should make, and `why` its
    reason. `worthwhile` is false if compression should gain nothing measurable. `advice` says that in a
    sentence. If `sharded`, all of it is about FSDP2's own traffic, which `auto` leaves as it is.
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
        nodes = "" if self.nodes == self.workers else f" on {counted(self.nodes, 'node')}"
        if self.every > 1:
            return self._of_rounds()
        if self.sharded:
            return self._of_fsdp()
        width = columns()
        told = [
            f"predicted, not measured: {self.model}, {self.parameters / 1e6:.1f} M parameters, "
            f"{counted(self.workers, 'rank')}{nodes}",
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
                "encoding and decoding are taken as free: their costs are not known. `gradwire probe "
                "--codecs` measures them"
            )
        lines = [wrapped(text, width, "  " if number else "", "    ") for number, text in enumerate(told)]
        for two_levels, title in ((False, ""), (True, LEVELS)):
            if found := [each for each in self.candidates if each.two_levels == two_levels]:
                lines += ["", *([wrapped(title, width)] if title else []), _table_of(found, width)]
        if any(each.at_most for each in self.candidates):
            frames = "* near-lossless frames depend on the values; their length is assumed"
            lines += ["", wrapped(frames, width)]
        return "\n".join(lines)

    def _of_fsdp(self) -> str:
        width = columns()
        shares_links = 1 < self.nodes < self.workers
        nodes = f" on {counted(self.nodes, 'node')}" if self.nodes < self.workers else ""
        told = [
            f"predicted, not measured: {self.model}, {self.parameters / 1e6:.1f} M parameters under FSDP2, "
            f"{counted(self.workers, 'rank')}{nodes}",
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
        lines = [wrapped(text, width, "  " if number else "", "    ") for number, text in enumerate(told)]
        rows = [_cells(each, over_node=shares_links)[:5] for each in self.candidates]
        head = ("scatter+gather", "step", "efficiency", "sent", "memory")
        return "\n".join([*lines, "", table_text(head, rows, width)])

    def _of_rounds(self) -> str:
        width = columns()
        told = [
            f"predicted, not measured: {self.model}, {self.parameters / 1e6:.1f} M parameters, "
            f"{counted(self.workers, 'replica')}, a round after {self.every} local steps",
            self.advice,
            self.source,
            f"step without communication {ms_text(self.compute_s)}; an exchange in each step: dense "
            f"{ms_text(self.dense_s)}, CCR {self.ccr:.2f}",
        ]
        lines = [wrapped(text, width, "  " if number else "", "    ") for number, text in enumerate(told)]
        rows = []
        for each in self.candidates:
            steps = math.ceil(each.exposed_s / self.compute_s)
            hidden = f"delay={steps}" if steps < self.every else "-"
            sent = bytes_text(each.wire_bytes), bytes_text(each.day_bytes)
            linear = f"{each.share_of_linear:.0%}"
            rows.append(
                (
                    each.recipe,
                    ms_text(each.step_s),
                    linear,
                    ms_text(each.exposed_s),
                    hidden,
                    *sent,
                    each.codec,
                )
            )
        head = ("recipe", "step", "efficiency", "round", "hidden by", "sent", "a day", "codec")
        marks = (
            "round: what it adds to its step; sent: per replica and round; a day: per replica",
            "local steps are another algorithm, whose loss is not predicted",
        )
        return "\n".join(
            [*lines, "", table_text(head, rows, width), "", *(wrapped(text, width) for text in marks)]
        )


LEVELS = "hierarchical: added up inside nodes first, attach(nodes=…); sent: over a node's link"

Told = Callable[[str, float], None]
"""Takes a finished row in words, and the share of the work that is done."""


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
        told: called with each finished row in words, and the share of the work that is done.

    Raises `ValueError` for an impossible number, an unknown model, and a recipe that must measure.

    >>> cheap = plan("resnet50", workers=32, rate_bit_per_s=100e9, step_s=0.18)
    >>> cheap.worthwhile, cheap.auto
    (False, 'dense')
    >>> slow = plan("resnet50", workers=4, rate_bit_per_s=1e9, step_s=0.18)
    >>> slow.worthwhile, round(slow.ccr, 1)
    (True, 10.2)
    >>> rounds = plan("gpt2", workers=2, rate_bit_per_s=1e8, delay_s=0.05, step_s=0.5, every=30)
    >>> [f"{each.recipe}: {each.step_s:.2f} s" for each in rounds.candidates[::5]]
    ['sparseloco: 0.51 s', 'dense: 1.83 s']
    """
    usual = OF_FSDP if sharded else CANDIDATES if every == 1 else BETWEEN_ROUNDS
    texts = usual if candidates is None else tuple(candidates)
    if workers < 2:
        raise ValueError(f"workers={workers}: on a single rank nothing is sent")
    if not 0.0 < target <= 1.0:
        raise ValueError(f"target={target} is outside (0, 1], the share of the no-communication speed")
    if every < 1 or (every > 1 and per_node > 1):
        raise ValueError(f"every={every}: from 1 on, and above 1 each worker is a replica, so per_node=1")
    if not texts:
        raise ValueError("candidates=[]: there is nothing to compare")
    if sharded and every > 1:
        raise ValueError(f"sharded=True is about what FSDP2 sends in every step, so every={every} is not")
    if not isinstance(cores, Cores):
        raise ValueError(f"cores={cores!r} are not gradwire.planning.costs.Cores")
    inside = link_inside(inside_bit_per_s, inside_delay_s)
    cluster = Cluster(workers, link_of(rate_bit_per_s, delay_s), per_node, inside)
    profile = profile_of(model)
    if sharded:
        return _sharded(profile, backward_of(profile, step_s, backward_s, overlap), cluster, target, texts)
    backward = backward_of(profile, step_s, backward_s, overlap)
    return _compared(profile, backward, cluster, target, every, texts, costs_of(codecs), cores, told)


def _compared(
    profile: Profile,
    backward: BackwardTiming,
    cluster: Cluster,
    target: float,
    every: int,
    candidates: Sequence[str],
    known: Mapping[str, CodecCost],
    cores: Cores,
    told: Told | None,
) -> Plan:
    specs = specs_of_profile(profile)
    on = partial(ClusterForecasts, specs, backward, cluster, cores=cores)
    flat = on()
    compared = [(False, flat if every == 1 else on(at_once=True))]
    if cluster.shares_links:
        compared.append((True, on(two_levels=True)))
    work = len(compared) * len(candidates) + len(CHOICES)
    rows: list[Candidate] = []
    for two_levels, forecasts in compared:
        for text in candidates:
            rows.append(_candidate(text, forecasts, known, every=every, two_levels=two_levels))
            if told is not None:
                told(f"{text}: {ms_text(rows[-1].step_s)}", len(rows) / work)
    rows.sort(key=lambda row: row.step_s)
    dense_s = flat.of_text("dense", known.get("dense")).step_s()
    attached = compared[-1][1] if cluster.shares_links else flat
    facts = _facts(attached, backward, cluster, known, told, len(rows) / work)
    comparison = comparison_of(facts, target, LATE)
    foreseen = comparison.foreseen()
    if foreseen is None:
        chosen, why = "dense", why_dense(comparison)
    else:
        chosen, why = foreseen.text, said_of(comparison, foreseen.recipe)
    best = _fastest(rows)
    # A user who names candidates asks about those, and not about what `auto` would do instead.
    if foreseen is not None and tuple(candidates) == CANDIDATES:
        best = _as_cut(foreseen, facts, best, two_levels=cluster.shares_links)
    worthwhile = facts.ccr >= 1.0 and best.step_s < (1.0 - LEAD) * dense_s
    return Plan(
        model=profile.model,
        source=profile.source,
        parameters=profile.parameters,
        workers=cluster.workers,
        nodes=cluster.nodes,
        every=every,
        compute_s=backward.before_s + backward.total_s,
        dense_s=dense_s,
        ccr=facts.ccr,
        target=target,
        auto=chosen,
        why=why,
        worthwhile=worthwhile,
        advice=_advice(worthwhile, facts, best, dense_s),
        candidates=tuple(rows),
    )


def _sharded(
    profile: Profile,
    backward: BackwardTiming,
    cluster: Cluster,
    target: float,
    candidates: Sequence[str],
) -> Plan:
    """The plan for FSDP2's own traffic.

    Args:
        profile: layers of the model.
        backward: elements and ready times, in seconds, of its parameters.
        cluster: the ranks and their links.
        target: the share of linear that the plan states.
        candidates: pairs of a scatter and a gather, such as "int4+int8".
    """
    compute_s = backward.before_s + backward.total_s

    def foreseen(text: str) -> Candidate:
        found = forecast_fsdp(text, profile, cluster, backward.before_s, backward.total_s)
        return Candidate(
            recipe=text,
            step_s=found.step_s,
            share_of_linear=compute_s / found.step_s,
            exposed_s=found.step_s - compute_s,
            wire_bytes=found.wire_bytes,
            node_bytes=found.node_bytes,
            day_bytes=DAY_S / found.step_s * found.wire_bytes,
            memory_bytes=found.memory_bytes,
            at_most=False,
            codec="free",
            two_levels=found.two_levels,
        )

    rows = sorted((foreseen(text) for text in candidates), key=lambda row: row.step_s)
    stock, best = foreseen("dense"), rows[0]
    worthwhile = best.step_s < (1.0 - LEAD) * stock.step_s
    gain = f"{stock.step_s / best.step_s:.1f} times as fast as FSDP2 as it is"
    return Plan(
        model=profile.model,
        source=profile.source,
        parameters=profile.parameters,
        workers=cluster.workers,
        nodes=cluster.nodes,
        every=1,
        compute_s=compute_s,
        dense_s=stock.step_s,
        ccr=stock.exposed_s / backward.total_s,
        target=target,
        auto="dense",
        why="auto does not choose among FSDP2's own traffic yet",
        worthwhile=worthwhile,
        advice=f"worth trying: {best.recipe}, {gain}"
        if worthwhile
        else f"do not bother: {best.recipe}, {gain}",
        candidates=tuple(rows),
        sharded=True,
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


def costs_of(codecs: Mapping[str, CodecCost] | None) -> dict[str, CodecCost]:
    """The stated costs, by the whole texts of their recipes. Raises `ValueError` for anything else."""
    for text, cost in (codecs or {}).items():
        if not isinstance(cost, CodecCost):
            raise ValueError(
                f"codecs: {text!r} costs {cost!r}, which is no gradwire.planning.costs.CodecCost"
            )
    return {steady(text, "codecs").text: cost for text, cost in (codecs or {}).items()}


def profile_of(model: str | Profile | nn.Module) -> Profile:
    """A profile by its name, as it is, or of a module's trainable parameters: a layer for each submodule.

    Raises `ValueError` for an unknown name, for a module without trainable parameters, and for anything else.

    >>> profile_of(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))).layers[0]
    Layer(name='0', macs=0, shapes=((2, 3), (2,)))
    """
    if isinstance(model, str):
        return load(model)
    if isinstance(model, Profile):
        return model
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={model!r} is neither a module, nor a profile or the name of one")
    layers: dict[str, list[tuple[int, ...]]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(name.rpartition(".")[0], []).append(tuple(parameter.shape))
    if not layers:
        raise ValueError(f"{type(model).__name__} has no trainable parameter")
    found = tuple(Layer(name, 0, tuple(shapes)) for name, shapes in layers.items())
    return Profile(type(model).__name__, "a module", found)


def backward_of(profile: Profile, step_s: float, backward_s: float | None, overlap: bool) -> BackwardTiming:
    """The ready time of each parameter.

    Args:
        profile: layers of the model, in forward order.
        step_s: seconds of a step on one rank without communication.
        backward_s: seconds of the backward pass within it; `None` for two thirds.
        overlap: whether gradients travel during the backward pass; otherwise all are ready at its end.

    Raises `ValueError` if the backward pass does not fit into the step.
    """
    backward_s = BACKWARD_SHARE * step_s if backward_s is None else backward_s
    if not 0.0 < backward_s <= step_s < float("inf"):
        raise ValueError(f"backward_s={backward_s} must be positive and within step_s={step_s}")
    return ready_of(profile, step_s - backward_s, backward_s, overlap)


def link_of(
    rate_bit_per_s: float, delay_s: float, names: tuple[str, str] = ("rate_bit_per_s", "delay_s")
) -> Link:
    """A link by its rate and its one-way delay; `names` are those of the two arguments.

    Raises `ValueError` unless the rate is positive, and the delay finite and not negative.
    """
    if not rate_bit_per_s > 0.0 or not 0.0 <= delay_s < float("inf"):
        rate, delay = names
        raise ValueError(f"{rate}={rate_bit_per_s}, {delay}={delay_s}: a link has a positive rate")
    return Link(delay_s, 8.0 / rate_bit_per_s)


def link_inside(inside_bit_per_s: float | None, inside_delay_s: float) -> Link | None:
    """The link inside a node, if its rate is stated. Raises what `link_of` raises."""
    if inside_bit_per_s is None:
        return None
    return link_of(inside_bit_per_s, inside_delay_s, ("inside_bit_per_s", "inside_delay_s"))


def exposed_dense_s(
    sums: Sequence[tuple[float, float]],
    backward_s: float,
    *,
    workers: int,
    rate_bit_per_s: float,
    delay_s: float = 0.0,
    per_node: int = 1,
) -> float:
    """Seconds for which all-reduces of gradients last after the end of the backward pass.

    Args:
        sums: when each is ready, in seconds from the start of the backward pass, and its bytes per rank.
        backward_s: time of the backward pass.
        workers: the number of ranks.
        rate_bit_per_s: rate of a rank's link, or with `per_node` above 1 of a node's link.
        delay_s: one-way delay between two ranks, or nodes.
        per_node: the number of ranks on each node; their links inside are taken to be free.

    Raises:
        ValueError: a number is impossible.

    Example:
        >>> exposed_dense_s([(0.1, 1e6)], 0.1, workers=2, rate_bit_per_s=8e6)
        1.0
    """
    cluster = Cluster(workers, link_of(rate_bit_per_s, delay_s), per_node, Link(0.0, 0.0))
    units = []
    for ready_s, size_bytes in sums:
        units.append((ready_s, 1, (Sent(cluster.seconds(Transfer("all_reduce", size_bytes))),)))
    return step_time(units, backward_s) - backward_s


FASTEST_BIT_PER_S = 1e13
"""The rate that stands for a link on which nothing is waited for."""


def rate_found(
    sums: Sequence[tuple[float, float]],
    backward_s: float,
    exposed_s: float,
    *,
    workers: int,
    delay_s: float = 0.0,
    per_node: int = 1,
) -> float:
    """The rate of the link over which all-reduces last `exposed_s` after the backward pass, in bit/s.

    The arguments are those of `exposed_dense_s`, whose inverse it is. `FASTEST_BIT_PER_S` where they would
    last as long on a link without a limit.

    Raises:
        ValueError: a number is impossible.

    Example:
        >>> round(rate_found([(0.1, 1e6)], 0.1, 1.0, workers=2) / 1e6, 3)
        8.0
    """
    lasting_s = partial(
        exposed_dense_s, sums, backward_s, workers=workers, delay_s=delay_s, per_node=per_node
    )
    slow, fast = 1e3, FASTEST_BIT_PER_S
    while fast > (1.0 + 1e-6) * slow:
        middle = math.sqrt(slow * fast)
        slow, fast = (middle, fast) if lasting_s(rate_bit_per_s=middle) > exposed_s else (slow, middle)
    return fast


def _candidate(
    text: str, forecasts: ClusterForecasts, codecs: Mapping[str, CodecCost], *, every: int, two_levels: bool
) -> Candidate:
    canonical = steady(text, "candidate").text
    codec = codecs.get(canonical)
    found = forecasts.of_text(text, codec)
    return Candidate(**numbers_of(text, found, every, stated=codec is not None, two_levels=two_levels))


@cache
def _tried() -> frozenset[str]:
    """The recipes that `auto` would try by default, with all options."""
    within = (text for text, assumed in CHOICES.items() if may_be_within(LATE, assumed))
    return frozenset(steady(text, "candidate").text for text in ("dense", *within))


@cache
def _assumed() -> dict[str, float]:
    """The assumed lateness of recipes with all options, in steps' worth of gradient."""
    return {steady(text, "candidate").text: late for text, late in {"dense": 0.0, **CHOICES}.items()}


def assumed_late(recipe: str) -> float | None:
    """How many steps' worth of gradient a recipe is assumed to leave in its memory; `None` if nothing is
    assumed.

    Chosen values leave the same behind in 16 bits and in 32.

    >>> assumed_late("int8"), assumed_late("topk(ratio=0.1)"), assumed_late("signsgd")
    (0.01, 1.2, None)
    """
    text = steady(recipe, "candidate").text
    return _assumed().get(text, _assumed().get(text.replace("values='full'", "values='fp16'")))


def late_text(late: float | None) -> str:
    """Text of an assumed lateness.

    >>> late_text(0.0), late_text(0.0004), late_text(0.18), late_text(26.0), late_text(None)
    ('0', '<0.01', '0.18', '26', '?')
    """
    return "?" if late is None else "<0.01" if 0.0 < late < 0.01 else f"{late:g}"


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


def _advice(worthwhile: bool, facts: Facts, best: Candidate, dense_s: float) -> str:
    if facts.ccr < 1.0:
        left = f"{best.recipe} would save {max(1.0 - best.step_s / dense_s, 0.0):.0%} of a dense step"
        return f"do not bother: an all-reduce takes less than the backward pass; {left}"
    dense, fast = ms_text(dense_s), f"{ms_text(best.step_s)} with {best.recipe}"
    fast += " hierarchically" if best.two_levels else ""
    if best.recipe == "dense":
        return f"auto should stay with dense, {dense} a step: it tries nothing that is predicted to be faster"
    if not worthwhile:
        said = f"nothing that auto tries is predicted to be faster than dense by {LEAD:.0%}"
        return f"do not bother: {said}: a step takes {fast}, and {dense} with dense"
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
