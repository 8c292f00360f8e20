"""Emulated workloads: true shapes, fresh gradients, sleeps of the right length, links of the right rate."""

import importlib.util
import json
import math
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gradwire.planning.shapes import PROFILES, load, models
from gradwire.recipes import recipe
from gradwire.step.layout import build
from gradwire.unit.parameters import ParameterSpec
from gradwire_lab.bench.settings import TrainingTask
from gradwire_lab.bench.trainer import policy_for
from gradwire_lab.workloads.catalogue import workload
from gradwire_lab.workloads.emulated import EmulatedWorkload
from gradwire_lab.workloads.profile import shrunk, timing
from tests.support.looped import looped

PUBLISHED = {
    "alexnet": 61_100_840,
    "bert_base": 109_482_240,
    "bert_large": 335_141_888,
    "gpt2": 124_439_808,
    "gpt2_covap": 81_894_144,
    "gpt2_medium": 354_823_168,
    "gpt2_xl": 1_557_611_200,
    "llama_7b": 6_738_415_616,
    "mask_rcnn": 44_401_393,
    "mobilenet_v2": 3_504_872,
    "resnet18": 11_689_512,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "vgg16": 138_357_544,
    "vgg19": 143_667_240,
    "vit_b16": 86_567_656,
    "vit_l16": 304_326_632,
    "llama_3_8b": 8_030_261_248,
    "qwen2_5_7b": 7_615_616_512,
    "sdxl_unet": 2_567_463_684,
}
GENERATOR = Path(__file__).parents[3] / "benchmarks" / "shape_profiles"


def emulated(spec: str) -> EmulatedWorkload:
    work = workload(spec)
    assert isinstance(work, EmulatedWorkload)
    return work


def gradients(work, rank=0, step=0, seed=0):
    model = work.model(1)
    batch = next(batch for index, batch in enumerate(work.batches(rank, 4, seed)) if index == step)
    work.loss(model, batch).backward()
    return [parameter.grad for parameter in model.parameters()]


@looped("model", PUBLISHED)
def test_parameter_counts_are_the_published_ones(model):
    assert load(model).parameters == PUBLISHED[model]


def test_counts_that_no_paper_gives_exactly():
    # "65 M" in the paper, whose vocabulary is "about 37,000"; 30.6 M follow from the layers' sizes
    assert 62e6 < load("transformer_base").parameters < 65e6
    assert 30e6 < load("bilstm4").parameters < 31e6


@pytest.mark.parametrize("model", ["resnet18", "resnet50", "resnet101", "vgg19", "mobilenet_v2", "vit_b16"])
def test_multiply_adds_are_the_published_ones(model):
    published = {
        "resnet18": 1.81,
        "resnet50": 4.09,
        "resnet101": 7.80,
        "vgg19": 19.63,
        "mobilenet_v2": 0.30,
        "vit_b16": 17.56,
    }
    assert load(model).macs / 1e9 == pytest.approx(published[model], rel=0.01)


def test_stored_profiles_are_what_the_generator_writes(monkeypatch):
    if not GENERATOR.is_dir():
        pytest.skip("the generator is part of the repository, not of the package")
    monkeypatch.syspath_prepend(str(GENERATOR))
    spec = importlib.util.spec_from_file_location("shape_profile_writer", GENERATOR / "write.py")
    writer = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(writer)
        assert sorted(writer.MODELS) == models()
        for model, build in writer.MODELS.items():
            assert (PROFILES / f"{model}.json").read_text() == build().to_json(model)
    finally:
        for name in ("sketch", "vision", "sequence", "unet"):
            sys.modules.pop(name, None)


@looped("model", models())
@looped("factor", [2, 16])
def test_shrinking_divides_all_tensors_alike(model, factor):
    before, after = load(model), shrunk(load(model), factor)
    assert after.parameters * factor == pytest.approx(before.parameters, rel=0.01)
    for old, new in zip(before.layers, after.layers, strict=True):
        assert (old.name, old.macs) == (new.name, new.macs)
        for shape, smaller in zip(old.shapes, new.shapes, strict=True):
            assert len(shape) == len(smaller)
            if len(shape) == 1:
                assert smaller[0] == pytest.approx(shape[0] / factor, rel=0.01, abs=1)


def specs(profile):
    shapes = [shape for layer in profile.layers for shape in layer.shapes]
    return [
        ParameterSpec(str(number), shape, torch.float32, math.prod(shape))
        for number, shape in reversed(list(enumerate(shapes)))
    ]


def sent(profile, policy):
    """The share of all elements that covap(interval=3) sends in a step, in the mean."""
    layout = build(specs(profile), recipe("covap(interval=3)").build(), policy, torch.device("meta"), world=2)
    waiting = sum(flat_buffer.numel for flat_buffer in layout.flat_buffers) / profile.parameters
    return 1 - waiting * 2 / 3


@looped("model", models())
@looped("factor", [4, 32, 64])
def test_recipes_send_the_share_that_they_send_of_the_full_network(model, factor):
    work = emulated(f"emulated({model}, shrink={factor})")
    full = sent(load(model), None)
    assert sent(work.profile, policy_for(TrainingTask(work.name), work)) == pytest.approx(full, abs=0.001)
    assert policy_for(TrainingTask(work.name, policy="none"), work) == {}


def test_a_full_network_has_the_default_policy():
    assert emulated("emulated(vgg19)").policy is None
    assert emulated("emulated(vgg19, shrink=32)").policy == "by_size(smallest=64)"
    assert emulated("emulated(vgg19, shrink=32)").describe()["suggested_policy"] == "by_size(smallest=64)"


def test_gradients_have_the_true_shapes_and_are_finite():
    work = emulated("emulated(resnet18, time_scale=0.01)")
    shapes = [shape for layer in load("resnet18").layers for shape in layer.shapes]
    grads = gradients(work)
    assert [tuple(grad.shape) for grad in grads] == shapes
    assert all(torch.isfinite(grad).all() for grad in grads)
    assert all(float(grad.std()) > 0 for grad in grads)


@pytest.mark.rest
def test_gradients_differ_between_ranks_steps_seeds_and_tensors_and_repeat_otherwise():
    work = emulated("emulated(mobilenet_v2, shrink=4, time_scale=0.01)")
    reference = gradients(work)
    assert all(torch.equal(a, b) for a, b in zip(reference, gradients(work), strict=True))
    for other in (gradients(work, rank=1), gradients(work, step=1), gradients(work, seed=1)):
        assert not any(torch.equal(a, b) for a, b in zip(reference, other, strict=True))
    vectors = [grad.flatten()[:32] for grad in reference]
    assert not any(torch.equal(a, b) for a, b in pairwise(vectors))


def test_gradients_are_heavy_tailed_and_own_their_memory():
    work = emulated("emulated(alexnet, shrink=16, time_scale=0.01)")
    model = work.model(0)
    batch = next(work.batches(0, 1, 0))
    work.loss(model, batch).backward()
    first = [parameter.grad.clone() for parameter in model.parameters()]
    big = max(first, key=torch.Tensor.numel).flatten().double()
    # a product of two normals has kurtosis 9, a normal number 3
    assert 6 < float((big**4).mean() / (big**2).mean() ** 2) < 12
    for parameter in model.parameters():
        parameter.grad.fill_(7.0)  # what an optimizer or DDP does in place must not reach the next draw
        parameter.grad = None
    work.loss(model, batch).backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), first, strict=True))


@pytest.mark.rest
def test_forward_and_backward_take_the_published_time():
    work = emulated("emulated(vgg19, shrink=64)")
    model = work.model(0)
    batches = work.batches(0, 1, 0)
    forward, backward = [], []
    for _ in range(3):
        start = time.perf_counter()
        loss = work.loss(model, next(batches))
        middle = time.perf_counter()
        loss.backward()
        forward.append(middle - start)
        backward.append(time.perf_counter() - middle)
    # a sleep never ends early; a loaded machine may end it late
    assert 0.105 <= min(forward) < 0.15
    assert 0.210 <= min(backward) < 0.27


def test_gradients_become_ready_in_proportion_to_the_work_behind_them():
    work = emulated("emulated(vgg19, shrink=64)")
    model = work.model(0)
    arrived = {}
    start = 0.0
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: arrived.update({name: time.perf_counter() - start})
        )
    loss = work.loss(model, next(work.batches(0, 1, 0)))
    start = time.perf_counter()
    loss.backward()
    order = list(arrived.values())
    assert order == sorted(order)
    # the three linear layers hold 86 % of the parameters and 0.6 % of the work: they are ready at once
    assert arrived["layers.16.tensors.0"] < 0.1
    assert arrived["layers.0.tensors.0"] >= 0.2


def test_time_scale_stretches_sleeps_and_leaves_the_ratio():
    once, twice = (
        emulated("emulated(bert_base, shrink=8)"),
        emulated("emulated(bert_base, shrink=8, time_scale=2)"),
    )
    assert (once.before_s, once.backward_s, once.allreduce_s) == (0.080, 0.170, 0.520)
    assert twice.backward_s == 2 * once.backward_s
    assert twice.suggested_rate_bit_per_s(4) * 2 == pytest.approx(once.suggested_rate_bit_per_s(4))
    assert twice.describe()["ccr"] == once.describe()["ccr"]


def test_the_suggested_link_takes_the_published_time():
    work = emulated("emulated(vgg19, shrink=16)")
    for world in (2, 4, 8):
        bits = 2 * (world - 1) / world * work.profile.parameters * 32
        assert bits / work.suggested_rate_bit_per_s(world) == pytest.approx(0.842)


def test_buckets_shrink_with_the_model():
    assert emulated("emulated(vgg19)").bucket_cap_mb is None
    assert emulated("emulated(vgg19, shrink=16)").bucket_cap_mb == 25 / 16


@looped("model", models())
def test_every_network_says_where_its_times_are_from(model):
    times = timing(load(model))
    assert 0 < times.before_s < times.backward_s < 10
    assert 0 < times.allreduce_s < 60  # LLaMA-7B has 27 GB of gradient
    described = emulated(f"emulated({model}, shrink=4)").describe()
    assert json.loads(json.dumps(described)) == described
    assert any(described["compute_from"].startswith(word) for word in ("COVAP", "MergeComp", "estimated"))


def test_covap_table_one():
    rows = {
        "resnet101": (0.055, 0.135, 0.280),
        "vgg19": (0.105, 0.210, 0.842),
        "bert_base": (0.080, 0.170, 0.520),
    }
    for model, row in rows.items():
        times = timing(load(model))
        assert (times.before_s, times.backward_s, times.allreduce_s) == row


def test_nothing_to_evaluate():
    work = emulated("emulated(mobilenet_v2)")
    assert work.evaluate(work.model(0)) == {}
