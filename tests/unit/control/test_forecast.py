"""What a step should take, before anything is measured."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from gradwire.control.forecast import (
    ClusterForecasts,
    gains_by_two_levels,
    main_buffer,
    predicted_step_s,
    specs_of_profile,
)
from gradwire.planning.boundaries import even_boundaries
from gradwire.planning.cluster import Cluster
from gradwire.planning.costs import FREE, NOMINAL_CODEC, CodecCost, Line, Link
from gradwire.planning.facts import Facts
from gradwire.planning.interval import bucketed
from gradwire.planning.shapes import load, ready_of
from gradwire.planning.step_time import Forecast
from gradwire.recipes import recipe
from gradwire.step.layout import build
from gradwire.unit.context import ExchangeContext
from gradwire.unit.parameters import ParameterSpec
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE

PROFILE = load("resnet50")
SPECS = specs_of_profile(PROFILE)
BACKWARD = ready_of(PROFILE, 0.06, 0.12)
LINK, INSIDE = Link(1e-4, 8e-9), Link(1e-6, 8e-11)
FLAT = Cluster(4, LINK)
NODES = Cluster(4, LINK, per_node=2, inside=INSIDE)
FIXED = (
    "dense",
    "bf16",
    "gcomp",
    "int8",
    "topk(ratio=0.01)",
    "leader_topk(ratio=0.01)",
    "covap(interval=4)",
    "powersgd(rank=2)",
)
CODEC = CodecCost(Line(1e-4, 1e-9), Line(2e-4, 2e-10))


def found(text: str, cluster: Cluster = FLAT, codec: CodecCost | None = None, **options: bool) -> Forecast:
    return ClusterForecasts(SPECS, BACKWARD, cluster, **options).of(recipe(text).build(), codec)


@pytest.mark.parametrize("text", FIXED)
def test_it_is_what_a_report_predicts_from_the_same_facts(text: str) -> None:
    facts = Facts(BACKWARD.total_s, 0.1, 4, BACKWARD, FLAT.network, buckets=bucketed(BACKWARD.numel))
    layout = build(SPECS, recipe(text).build(), None, torch.device("meta"), FLAT.workers)
    reported_s = predicted_step_s(facts, layout, SPECS)
    assert reported_s == found(text).step_s()


FAR = Cluster(4, Link(1e-2, 8e-9))
"""A delay of 10 ms: as many bytes as 1.25 MB."""


@pytest.mark.parametrize("text", ["scalecom", "leader_topk(ratio=0.01)", "powersgd(rank=2)"])
def test_where_a_round_is_mostly_delay_recipes_are_cut_into_fewer_units(text: str) -> None:
    composition, cut = ClusterForecasts(SPECS, BACKWARD, FAR).as_cut(text)
    assert composition.text.startswith("mergecomp(")
    assert cut.step_s() < 0.9 * found(text, FAR).step_s()
    assert cut.calls < found(text, FAR).calls
    # It says what a run of that text is predicted to take.
    assert cut == found(composition.text, FAR)


def test_boundaries_of_an_unknown_codec_are_compared_as_if_it_took_time() -> None:
    """Or what happens to hide in few units would count for nothing."""
    near = ClusterForecasts(SPECS, BACKWARD, Cluster(4, Link(1e-3, 3e-8)))
    unknown, free = (near.as_cut("signsgd", each) for each in (None, FREE))
    nominal, _ = near.as_cut("signsgd", NOMINAL_CODEC)
    assert unknown[0].text == nominal.text != free[0].text
    assert unknown[1] == near.of(unknown[0])


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("topk(ratio=0.001)", Cluster(4, Link(1e-6, 8e-10))),  # hides as it is
        ("int8", FLAT),  # mostly bytes
        ("topk(ratio=0.01)", FAR),  # latencies of one round each pass side by side
        ("covap(interval=4)", FAR),  # units take turns
        ("dense", FAR),  # DDP's buckets
    ],
)
def test_elsewhere_a_recipe_is_cut_as_it_would_be_by_itself(text: str, cluster: Cluster) -> None:
    composition, cut = ClusterForecasts(SPECS, BACKWARD, cluster).as_cut(text)
    assert (composition.text, cut) == (recipe(text).build().text, found(text, cluster))


def test_a_dense_step_sends_what_the_ring_sends() -> None:
    assert found("dense").wire_bytes == 2 * 3 / 4 * 4 * PROFILE.parameters
    assert found("bf16").wire_bytes == 2 * 3 / 4 * 2 * PROFILE.parameters


@pytest.mark.parametrize("text", FIXED)
def test_more_bandwidth_or_less_latency_never_makes_a_step_slower(text: str) -> None:
    links = (
        LINK,
        replace(LINK, beta_s=LINK.beta_s / 2),
        Link(LINK.alpha_s / 2, LINK.beta_s / 2),
        Link(0.0, 0.0),
    )
    steps_s = [found(text, Cluster(4, link)).step_s() for link in links]
    assert steps_s == sorted(steps_s, reverse=True)
    assert steps_s[-1] == pytest.approx(BACKWARD.before_s + BACKWARD.total_s, rel=1e-12)


@pytest.mark.parametrize("text", FIXED)
def test_a_codec_and_a_late_worker_cost_time(text: str) -> None:
    free = found(text)
    assert free.step_s(2.0) > free.step_s() > free.compute_s
    assert found(text, codec=CODEC).step_s() > free.step_s()


def test_what_a_gather_receives_grows_with_the_ranks_and_a_leaders_choice_does_not() -> None:
    ranks = (4, 8, 16)
    own = [found("topk(ratio=0.01)", Cluster(world, LINK)) for world in ranks]
    led = [found("leader_topk(ratio=0.01)", Cluster(world, LINK)) for world in ranks]
    assert own[1].wire_bytes / own[0].wire_bytes > 2 > 1.2 > led[1].wire_bytes / led[0].wire_bytes
    assert own[0].memory_bytes < own[1].memory_bytes < own[2].memory_bytes
    assert led[0].memory_bytes == led[2].memory_bytes


@pytest.mark.parametrize("interval", [2, 4, 38, 41, 64])
def test_units_that_rest_send_a_share(interval: int) -> None:
    text = f"covap(interval={interval})"
    flat_buffer = build(SPECS, recipe(text).build(), None, torch.device("meta"), 4).flat_buffers[0]
    beside = PROFILE.parameters - flat_buffer.numel
    sent = found(text)
    assert len(sent.cycle) == interval
    assert all(sum(bool(unit.sent) for unit in units) == 1 for units in zip(*sent.cycle, strict=True))
    assert sent.wire_bytes == pytest.approx(
        2 * 3 / 4 * 4 * (flat_buffer.numel / interval + beside), rel=1e-12
    )


def test_frames_are_counted_as_long_as_they_usually_are() -> None:
    assert found("gcomp").at_most
    assert not found("dense").at_most
    near, dense = found("gcomp").wire_bytes, found("dense").wire_bytes
    # Frames are announced a little longer than what they hold.
    assert 0.45 < near / dense < 0.46 < 0.87 < found("gcomp(mode='lossless')").wire_bytes / dense < 0.89


@pytest.mark.parametrize(
    ("text", "share"), [("dense", 2 / 3), ("int8", 1 / 1.75), ("topk(ratio=0.1)", 1 / 3)]
)
def test_two_levels_send_less_between_nodes(text: str, share: float) -> None:
    """Per node of two, of a payload M per rank. Ring: 3/2 M flat, M on two levels. Codes: all-to-all M and
    all-gather 3/4 M flat, half of M each on two levels. Gathered choices: 3 M flat, M on two levels."""
    flat, levels = (found(text, NODES, two_levels=two).node_bytes for two in (False, True))
    # Norms and the status vote, at most 1 % of all bytes here, are summed densely.
    assert levels / flat == pytest.approx(share, rel=0.02)


def test_two_levels_divide_what_is_remembered() -> None:
    planes = found("leader_topk(ratio=0.01)", NODES).memory_bytes
    divided = found("leader_topk(ratio=0.01)", NODES, two_levels=True).memory_bytes
    # Boundaries between rows add at most 1/32 of the rows.
    assert 1 / 2 <= divided / planes <= (1 + 1 / 32) / 2


def test_two_levels_factorise_the_shard() -> None:
    """A matrix of n by m sends n/2 and m times the rank on two levels, each rank of a node its own."""
    flat, levels = (found("powersgd(rank=2)", NODES, two_levels=two).node_bytes for two in (False, True))
    assert 2 / 3 < levels / flat < 1.5


def test_two_levels_gain_where_much_is_sent() -> None:
    """Of M bytes of gradient on two nodes of two: dense spares M/2 and int8 3/16 M, of a sum that sends M."""
    gain = {text: gains_by_two_levels(recipe(text).build(), SPECS, 4, 2) for text in FIXED}
    few = ("topk(ratio=0.01)", "leader_topk(ratio=0.01)", "powersgd(rank=2)")
    assert gain == {text: text not in few for text in FIXED}


def test_a_recipe_that_will_choose_counts_as_the_choice_that_gains_most() -> None:
    """On 16 nodes of eight a ring's dense sums pass a node's link nearly once on one level, too."""
    built = {text: recipe(text).build() for text in ("dense", "int8", "auto", "covap")}
    gain = {text: gains_by_two_levels(each, SPECS, 128, 8) for text, each in built.items()}
    assert gain == {"dense": False, "int8": True, "auto": True, "covap": False}


def test_a_policy_counts_in_what_two_levels_spare() -> None:
    dense = recipe("dense").build()
    few, much = {"*": "topk(ratio=0.001)"}, {"stage0.*": "topk(ratio=0.001)"}
    assert [gains_by_two_levels(dense, SPECS, 4, 2, policy) for policy in (None, few, much)] == [
        True,
        False,
        True,
    ]


def test_means_are_gathered_after_the_last_decode() -> None:
    slow = replace(INSIDE, beta_s=1e-9)
    gathered_s = 4 * PROFILE.parameters / 2 * (slow.beta_s - INSIDE.beta_s)
    ends_s = [
        found("int8", Cluster(4, LINK, per_node=2, inside=inside), two_levels=True).tail.vote.seconds
        for inside in (INSIDE, slow)
    ]
    # Shards are filled up by at most 1/32.
    assert gathered_s <= ends_s[1] - ends_s[0] <= (1 + 1 / 32) * gathered_s


def test_without_overlap_everything_waits_for_the_end() -> None:
    late = ready_of(PROFILE, 0.06, 0.12, overlap=False)
    step = ClusterForecasts(SPECS, late, FLAT).of(recipe("dense").build())
    sent_s = sum(unit.sent[0].seconds for unit in step.cycle[0]) + step.tail.vote.seconds
    assert step.step_s() == pytest.approx(0.18 + sent_s, rel=1e-12)
    assert step.step_s() > found("dense").step_s()


ALIKE = tuple(
    ParameterSpec(f"{layer}.{name}", shape, torch.float32, torch.Size(shape).numel())
    for layer in range(6)
    for name, shape in (("wide", (512, 2048)), ("bias", (2048,)), ("square", (1024, 1024)))
)
"""Layers alike, of which units of a quarter of a million elements hold parts."""


@looped("label", EVERY_RECIPE)
def test_units_that_are_alike_have_the_rounds_that_each_of_them_has(label: str) -> None:
    composition = replace(
        recipe(EVERY_RECIPE[label]).build(), cutter=partial(even_boundaries, unit_elements=1 << 18)
    )
    layout = build(ALIKE, composition, None, torch.device("meta"), 4)
    main, exchange = main_buffer(layout, ALIKE, ()), layout.main.exchange
    for step in (0, 1003):
        ctx = ExchangeContext(step, 0, 0, 4)
        found = main.rounds(ctx)
        for unit, rounds in zip(
            () if main.flat_buffer is None else main.flat_buffer.units,
            found,
            strict=main.flat_buffer is not None,
        ):
            own = replace(ctx, unit=unit.index, parts=unit.parts, narrow=None)
            assert rounds == exchange.rounds(unit.numel, torch.float32, own)
