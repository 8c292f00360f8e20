"""Slots, boundaries, units and planes."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse
from gradwire.exchange.compose import remember
from gradwire.exchange.payloads import Gather, gather
from gradwire.laws import Laws
from gradwire.memory import UNSENT
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.unit.parameters import ParameterSpec, layout_hash, specs_of


def _spec(name: str, numel: int, dtype: torch.dtype = torch.float32) -> ParameterSpec:
    return ParameterSpec(name, (numel,), dtype, numel)


@dataclass(frozen=True)
class Grained(Gather):
    """An all-gather whose units are cut at multiples of `grain`."""

    grain: int = 1

    @property
    def laws(self) -> Laws:
        return replace(super().laws, grain=self.grain)


def _flat_buffer(sizes: list[int], boundaries: tuple[int, ...], grain: int = 1) -> FlatBuffer:
    exchange = remember(Grained(sparse(top_k(0.5)), grain))
    specs = [_spec(f"p{i}", size) for i, size in enumerate(sizes)]
    return FlatBuffer(0, specs, exchange, boundaries, torch.device("cpu"))


def test_parameters_come_in_reverse_registration_order() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    assert [spec.name for spec in specs_of(model)] == ["1.bias", "1.weight", "0.bias", "0.weight"]


def test_frozen_ignored_and_tied_parameters_count_never_and_once() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    model[2].weight = model[1].weight
    names = [spec.name for spec in specs_of(model, ignored=["2.bias"])]
    assert names == ["1.bias", "1.weight", "0.weight"]


@pytest.mark.parametrize(
    "other",
    [
        [_spec("b", 4), _spec("a", 3)],
        [_spec("a", 3), _spec("c", 4)],
        [_spec("a", 3), _spec("b", 5)],
        [_spec("a", 3), _spec("b", 4, torch.float64)],
        [_spec("a", 3)],
    ],
)
def test_the_layout_hash_sees_order_names_shapes_and_types(other: list[ParameterSpec]) -> None:
    assert layout_hash(other) != layout_hash([_spec("a", 3), _spec("b", 4)])


@pytest.mark.parametrize(
    ("sizes", "boundaries"),
    [([5], ()), ([3, 4, 5], (3, 7)), ([3, 4, 5], (1, 5, 11)), ([1, 1, 1], (1, 2)), ([7, 0, 2], (7,))],
)
def test_units_tile_the_flat_buffer_and_parts_tile_the_parameters(
    sizes: list[int], boundaries: tuple[int, ...]
) -> None:
    flat_buffer = _flat_buffer(sizes, boundaries)
    covered = list(itertools.chain.from_iterable(range(u.start, u.stop) for u in flat_buffer.units))
    assert covered == list(range(sum(sizes)))
    for slot in flat_buffer.slots:
        parts = [p for u in flat_buffer.units_of[slot.spec.name] for p in u.parts if p.name == slot.spec.name]
        elements = list(itertools.chain.from_iterable(range(p.start, p.stop) for p in parts))
        assert elements == list(range(slot.spec.numel))


def test_a_part_lies_where_its_unit_says() -> None:
    flat_buffer = _flat_buffer([3, 4, 5], (5,))
    begins = {slot.spec.name: slot.start for slot in flat_buffer.slots}
    for unit in flat_buffer.units:
        offset = unit.start
        for part in unit.parts:
            assert begins[part.name] + part.start == offset
            offset += part.numel
        assert offset == unit.stop


def test_boundaries_fall_on_the_grain_only() -> None:
    flat_buffer = _flat_buffer([100], (5, 16, 33, 63), grain=16)
    assert [(unit.start, unit.stop) for unit in flat_buffer.units] == [(0, 16), (16, 32), (32, 48), (48, 100)]


def test_boundaries_outside_the_flat_buffer_are_no_boundaries() -> None:
    assert len(_flat_buffer([4], (-1, 0, 4, 9)).units) == 1


def test_a_flat_buffer_of_empty_parameters_has_no_units() -> None:
    assert _flat_buffer([0, 0], ()).units == ()


def test_commit_takes_the_working_plane_and_adds_to_what_is_idle() -> None:
    flat_buffer = _flat_buffer([2, 3], ())
    flat_buffer.committed[UNSENT].copy_(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    flat_buffer.x.copy_(torch.tensor([0.0, 0.5, 30.0, 40.0, 50.0]))
    flat_buffer.commit(idle=[flat_buffer.slots[0]])
    assert flat_buffer.committed[UNSENT].tolist() == [1.0, 2.5, 30.0, 40.0, 50.0]


@pytest.mark.parametrize(
    ("dtype", "plane"),
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_short_gradients_accumulate_in_float32(dtype: torch.dtype, plane: torch.dtype) -> None:
    flat_buffer = FlatBuffer(
        0, [_spec("p", 6, dtype)], remember(gather(sparse(top_k(0.5)))), (), torch.device("cpu")
    )
    assert flat_buffer.committed[UNSENT].dtype == flat_buffer.x.dtype == plane
    assert flat_buffer.memory_bytes == 2 * 6 * plane.itemsize
    assert not flat_buffer.committed[UNSENT].any()
