"""Predictions of recipes in worlds, which `plan` and `simulate` tabulate, from numbers that the user states.

Nothing is measured, and the same arguments always give the same numbers. Assumptions:

- Ranks are alike, links are full-duplex, and collectives are those that gloo runs
  (`docs/engineering/costs.md`).
- Gradients are float32. They are ready when the arithmetic of their layers is done.
- Where no `cores` are stated, messages and calls take no processor time. Neither does a codec without a
  stated cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean

from torch import nn

from gradwire._api.plan_fsdp import CANDIDATES as OF_FSDP
from gradwire._api.plan_fsdp import FSDPForecast, forecast_fsdp
from gradwire.control.forecast import ClusterForecasts, gains_by_two_levels, specs_of_profile
from gradwire.planning.choice import LATE
from gradwire.planning.cluster import Cluster
from gradwire.planning.costs import ENOUGH, BackwardTiming, CodecCost, Cores, Link
from gradwire.planning.shapes import Layer, Profile, load, ready_of
from gradwire.planning.step_time import Forecast
from gradwire.recipes.auto import CANDIDATES as CHOICES
from gradwire.recipes.auto import may_be_within
from gradwire.recipes.parse import steady

BETWEEN_ROUNDS = ("dense", "bf16", "int8", "int4", "topk(ratio=0.01)", "sparseloco")
"""Recipes that are compared for rounds of local steps."""

DAY_S = 86400.0

BACKWARD_SHARE = 2 / 3
"""The share of backward in a step: gradients by inputs and weights take twice the arithmetic of forward."""

Told = Callable[[str, float], None]
"""Takes a finished row in words, and the share of the work that is done."""


@dataclass(frozen=True)
class Candidate:
    """The prediction for one recipe on one cluster.

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
    assumed_late: float | None
    tried: bool


def candidates_of(
    asked: Iterable[str] | None, of_steps: Sequence[str], every: int, sharded: bool
) -> tuple[str, ...]:
    """The recipes that were `asked` for; else the usual ones, which are `of_steps` for an exchange in each
    step.
    """
    usual = OF_FSDP if sharded else of_steps if every == 1 else BETWEEN_ROUNDS
    return tuple(usual if asked is None else asked)


class Study:
    """Predictions for one model, by recipe and cluster.

    Args:
        model, step_s, backward_s, overlap, every, sharded, candidates, codecs, cores, gpu: as for
            `gradwire.plan`.
        clusters: the worlds that are compared.

    Raises `ValueError` for what does not fit together.
    """

    def __init__(
        self,
        model: str | Profile | nn.Module,
        clusters: Sequence[Cluster],
        candidates: tuple[str, ...],
        *,
        step_s: float,
        backward_s: float | None,
        overlap: bool,
        every: int,
        sharded: bool,
        codecs: Mapping[str, CodecCost] | None,
        cores: Cores = ENOUGH,
        gpu: bool = False,
    ) -> None:
        if every < 1 or (every > 1 and any(cluster.per_node > 1 for cluster in clusters)):
            raise ValueError(f"every={every}: from 1 on, and above 1 each worker is a replica, so per_node=1")
        if sharded and every > 1:
            raise ValueError(f"sharded=True is about what FSDP2 sends in every step, so every={every} is not")
        if not candidates:
            raise ValueError("candidates=[]: there is nothing to compare")
        self.codecs, self.every = costs_of(codecs), every
        self.profile = profile_of(model)
        self.backward = backward_of(self.profile, step_s, backward_s, overlap)
        self.compute_s = self.backward.before_s + self.backward.total_s
        self._sharded, self._gpu = sharded, gpu
        self._specs = specs = specs_of_profile(self.profile)
        self.on = cache(
            lambda cluster, two_levels, at_once: ClusterForecasts(
                specs,
                self.backward,
                cluster,
                two_levels=two_levels,
                at_once=at_once,
                cores=cores,
                on_device=gpu,
            )
        )

    def predicted(
        self,
        text: str,
        cluster: Cluster,
        two_levels: bool | None = None,
        slowed: Sequence[float] = (1.0,),
    ) -> Candidate:
        """The prediction for the recipe `text` on `cluster`.

        `two_levels` says whether ranks add up inside their nodes first; `None` decides as `attach` would.
        `slowed` has, for each step of a sample, the computing time of the slowest rank as a multiple of the
        usual one.
        """
        found: Forecast | FSDPForecast
        takes_s: Callable[[float], float]
        if self._sharded:
            before_s, total_s = self.backward.before_s, self.backward.total_s
            fsdp = partial(forecast_fsdp, text, self.profile, cluster, gpu=self._gpu)
            found = fsdp(before_s, total_s)

            def takes_s(each: float) -> float:
                return fsdp(each * before_s, each * total_s).step_s

            two_levels, is_stated, at_most, late, tried = found.two_levels, False, False, None, False
        else:
            composition = steady(text, "candidate")
            if two_levels is None:
                two_levels = cluster.shares_links and gains_by_two_levels(
                    composition, self._specs, cluster.workers, cluster.per_node
                )
            codec = self.codecs.get(composition.text)
            found = forecast = self.on(cluster, two_levels, self.every > 1).of_text(text, codec)
            takes_s, is_stated, at_most = forecast.step_s, codec is not None, forecast.at_most
            late, tried = assumed_late(text), composition.text in _tried()
        exposed_s = takes_s(1.0) - self.compute_s
        if self.every == 1:
            step_s = fmean(map(takes_s, slowed))
        else:  # one step in `every` ends in an exchange
            step_s = fmean(each * self.compute_s + exposed_s / self.every for each in slowed)
        return Candidate(
            recipe=text,
            step_s=step_s,
            share_of_linear=self.compute_s / step_s,
            exposed_s=exposed_s,
            wire_bytes=found.wire_bytes,
            node_bytes=found.node_bytes,
            day_bytes=DAY_S / (self.every * step_s) * found.wire_bytes,
            memory_bytes=found.memory_bytes,
            at_most=at_most,
            codec="stated" if is_stated else "free",
            two_levels=two_levels,
            assumed_late=late,
            tried=tried,
        )


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


def costs_of(codecs: Mapping[str, CodecCost] | None) -> dict[str, CodecCost]:
    """The stated costs, by the whole texts of their recipes. Raises `ValueError` for anything else."""
    for text, cost in (codecs or {}).items():
        if not isinstance(cost, CodecCost):
            raise ValueError(
                f"codecs: {text!r} costs {cost!r}, which is no gradwire.planning.costs.CodecCost"
            )
    return {steady(text, "codecs").text: cost for text, cost in (codecs or {}).items()}


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
