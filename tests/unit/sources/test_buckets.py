"""From DDP's buckets to parameter names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from gradwire.placement import HostDevice
from gradwire.sources.ddp.source import BucketMap
from gradwire.unit.parameters import specs_of

HOST = HostDevice()


@dataclass
class FakeBucket:
    """`GradBucket` has no constructor."""

    number: int
    members: Sequence[Tensor]
    flat: Tensor
    last: bool = False

    def index(self) -> int:
        return self.number

    def buffer(self) -> Tensor:
        return self.flat

    def parameters(self) -> Sequence[Tensor]:
        return self.members

    def is_last(self) -> bool:
        return self.last


def _model() -> tuple[nn.Module, BucketMap]:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    return model, BucketMap(model, specs_of(model))


def test_entries_lie_one_after_the_other() -> None:
    model, buckets = _model()
    gradient_bucket = buckets.gradient_bucket(
        FakeBucket(0, [model[1].weight, model[0].bias], torch.zeros(6), last=True), HOST
    )
    places = [(entry.spec.name, entry.start, entry.stop) for entry in gradient_bucket.entries]
    assert places == [("1.weight", 0, 3), ("0.bias", 3, 6)]
    assert gradient_bucket.index == 0


def test_rebuilt_buckets_are_looked_at_anew() -> None:
    model, buckets = _model()
    buckets.gradient_bucket(FakeBucket(0, [model[0].bias, model[1].weight], torch.zeros(6)), HOST)
    gradient_bucket = buckets.gradient_bucket(
        FakeBucket(0, [model[1].weight, model[0].bias], torch.zeros(6)), HOST
    )
    assert [entry.spec.name for entry in gradient_bucket.entries] == ["1.weight", "0.bias"]


def test_a_bucket_without_parameters_is_the_one_seen_last() -> None:
    model, buckets = _model()
    expected = buckets.gradient_bucket(FakeBucket(0, [model[1].weight], torch.zeros(3)), HOST).entries
    assert buckets.gradient_bucket(FakeBucket(0, [], torch.zeros(3)), HOST).entries == expected


def test_a_buffer_of_another_size_is_refused() -> None:
    model, buckets = _model()
    with pytest.raises(ValueError, match="bucket 0 of 7 elements is sparse or does not match"):
        buckets.gradient_bucket(FakeBucket(0, [model[1].weight], torch.zeros(7)), HOST)


def test_a_sparse_buffer_is_refused() -> None:
    model, buckets = _model()
    with pytest.raises(ValueError, match="sparse=False"):
        buckets.gradient_bucket(FakeBucket(0, [model[1].weight], torch.zeros(3).to_sparse()), HOST)


def test_a_tied_parameter_goes_by_its_first_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    buckets = BucketMap(model, specs_of(model))
    gradient_bucket = buckets.gradient_bucket(FakeBucket(0, [model[1].weight], torch.zeros(4)), HOST)
    [entry] = gradient_bucket.entries
    assert (entry.spec.name, entry.start, entry.stop) == ("0.weight", 0, 4)
