"""Flat buckets of our own: which parameters share one, and how gradients get in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire.sources.buckets import OwnBucket, assigned
from gradwire.unit.parameters import ParameterSpec

CPU = torch.device("cpu")


def specs(*sizes: int, dtype: Callable[[int], torch.dtype] = lambda _: torch.float32) -> list[ParameterSpec]:
    return [ParameterSpec(f"p{i}", (size,), dtype(i), size) for i, size in enumerate(sizes)]


def names(buckets: list[tuple[ParameterSpec, ...]]) -> list[str]:
    return [" ".join(spec.name for spec in bucket) for bucket in buckets]


def test_no_bucket_is_larger_than_the_cap_unless_it_is_one_parameter() -> None:
    assert names(assigned(specs(3, 5, 2, 20, 0, 1), cap_bytes=32)) == ["p0 p1", "p2", "p3", "p4 p5"]


def test_a_bucket_has_one_type_and_buckets_are_ordered_by_their_last_parameter() -> None:
    mixed = specs(1, 1, 1, 1, dtype=lambda i: torch.float64 if i in (0, 3) else torch.bfloat16)
    assert names(assigned(mixed, cap_bytes=100)) == ["p1 p2", "p0 p3"]


def test_gradients_are_copied_unless_they_lie_there_and_none_is_zero() -> None:
    bucket = OwnBucket(0, specs(2, 3), CPU)
    bucket.begin()
    bucket.fill("p1", torch.arange(3.0))
    bucket.fill("p1", bucket.views["p1"].add_(1))
    assert bucket.missing == {"p0"}
    bucket.buffer[:2] = 7
    bucket.fill("p0", None)
    assert bucket.gradient_bucket.buffer.tolist() == [0, 0, 1, 2, 3]
    assert bucket.gradient_bucket.failure is None


def test_the_order_in_memory_is_the_parameters() -> None:
    spec = ParameterSpec("w", (2, 3), torch.float32, 6, (1, 2))
    bucket = OwnBucket(0, [spec], CPU)
    bucket.fill("w", torch.arange(6.0).view(2, 3))
    assert bucket.buffer.tolist() == [0, 3, 1, 4, 2, 5]
    assert bucket.views["w"].stride() == (1, 2)


def test_rows_that_fill_up_a_shard_are_zero_in_every_step() -> None:
    bucket = OwnBucket(0, [ParameterSpec("w", (3, 2), torch.float32, 6)], CPU, rows={"w": 2})
    bucket.buffer.fill_(9)  # as a step may leave it
    bucket.fill("w", torch.ones(2, 2))
    assert bucket.buffer.tolist() == [1, 1, 1, 1, 0, 0]
    assert bucket.views["w"].shape == (2, 2)


def test_a_sparse_gradient_fails_the_step_and_not_the_hook() -> None:
    bucket = OwnBucket(0, specs(3), CPU)
    bucket.fill("p0", torch.zeros(3).to_sparse())
    assert "is sparse" in str(bucket.gradient_bucket.failure)


def _grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.usefixtures("world_of_one")
def test_one_rank_trains_as_without_gradwire_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    caplog.set_level("INFO", "gradwire")
    wire = gradwire.attach(model, recipe="topk(ratio=0.1)", replicas=dist.group.WORLD)
    model(torch.ones(2, 64)).sum().backward()
    expected = torch.autograd.grad(model(torch.ones(2, 64)).sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(_grads(model), expected, strict=True))
    assert "one rank: nothing to send of " in caplog.text
    assert wire.report().step == 1


@pytest.mark.usefixtures("world_of_one")
def test_gradients_are_views_of_few_buckets() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())
    gradwire.attach(model, recipe="dense", replicas=dist.group.WORLD)
    (model[0](torch.ones(2, 8)).sum() + model[1](torch.ones(2, 8).double()).sum()).backward()
    assert len({gradient.untyped_storage().data_ptr() for gradient in _grads(model)}) == 2


@pytest.mark.usefixtures("world_of_one")
def test_a_model_without_a_gradient_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter of the model needs a gradient"):
        gradwire.attach(nn.Linear(2, 2).requires_grad_(False), replicas=dist.group.WORLD)
