"""Who travels how."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gradwire.codec.sparse import values
from gradwire.contrib.randomk import random_k
from gradwire.exchange.payloads import Reduce, reduce
from gradwire.memory import UNSENT
from gradwire.planning.tuning import Tuning
from gradwire.recipes import Composition, recipe
from gradwire.step.layout import Layout, build, by_size
from gradwire.unit.parameters import ParameterSpec

CPU = torch.device("cpu")


def _spec(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> ParameterSpec:
    return ParameterSpec(name, shape, dtype, torch.Size(shape).numel())


SPECS = (_spec("head.bias", 10), _spec("head.weight", 10, 512), _spec("norm", 512), _spec("body", 512, 64))


def _layout(text: str, policy: Any = None, specs: tuple[ParameterSpec, ...] = SPECS) -> Layout:
    composition = recipe(text).build()
    return build(specs, composition, policy, CPU, 2)


def test_vectors_and_tiny_matrices_travel_densely_beside_a_lossy_recipe() -> None:
    layout = _layout("topk(ratio=0.1)")
    assert set(layout.slots) == {"head.weight", "body"}
    assert set(layout.direct) == {"head.bias", "norm"}
    assert not layout.is_plain
    assert by_size()(_spec("tiny", 4, 4)) == "dense"
    assert by_size(smallest=16)(_spec("tiny", 4, 4)) is None


@pytest.mark.parametrize("text", ["dense", "fp16", "bf16"])
def test_a_recipe_without_memory_takes_whole_buckets(text: str) -> None:
    layout = _layout(text)
    assert layout.is_plain
    assert len(layout.direct) == 4
    assert len({id(exchange) for exchange in layout.direct.values()}) == 1, "neighbours travel together"
    assert layout.is_dense == (text == "dense")
    assert layout.memory_bytes == 0


def test_the_first_pattern_that_fits_wins() -> None:
    layout = _layout("topk(ratio=0.1)", {"head.*": "dense", "*": "topk(ratio=0.5)"})
    assert set(layout.direct) == {"head.bias", "head.weight"}
    (flat_buffer,) = layout.flat_buffers
    assert flat_buffer.slots[0].spec.name == "norm"


def test_what_a_policy_leaves_open_goes_the_recipes_way() -> None:
    assert set(_layout("topk(ratio=0.1)", {"head.*": "dense"}).slots) == {"norm", "body"}
    assert set(_layout("topk(ratio=0.1)", lambda spec: "fp16" if spec.name == "body" else None).direct) == {
        "body"
    }


def test_every_recipe_and_type_has_a_flat_buffer_of_its_own() -> None:
    specs = (*SPECS, _spec("double", 99, 99, dtype=torch.float64), _spec("half", 99, 99, dtype=torch.float16))
    layout = _layout("topk(ratio=0.1)", {"head.weight": "randomk(ratio=0.1)", "*": "topk(ratio=0.1)"}, specs)
    names = [[slot.spec.name for slot in flat_buffer.slots] for flat_buffer in layout.flat_buffers]
    assert names == [["head.bias", "norm", "body"], ["head.weight"], ["double"], ["half"]]
    assert [flat_buffer.number for flat_buffer in layout.flat_buffers] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("text", "plane", "narrow"),
    [
        ("topk(ratio=0.1)", torch.float32, torch.bfloat16),
        ("gcomp", torch.bfloat16, None),
        ("covap(interval=4, feedback='none')", torch.bfloat16, None),
        ("qsgd", torch.float32, torch.bfloat16),
        # Of what is sent nothing may be left: that is how its momentum knows.
        ("dgc(ratio=0.1)", torch.float32, None),
    ],
)
def test_what_holds_gradients_of_sixteen_bits_and_what_they_travel_in(
    text: str, plane: torch.dtype, narrow: torch.dtype | None
) -> None:
    specs = (_spec("half", 99, 99, dtype=torch.bfloat16), _spec("whole", 99, 99))
    first, second = _layout(text, None, specs).flat_buffers
    assert (first.dtype, first.x.dtype, first.narrow) == (plane, plane, narrow)
    assert (second.dtype, second.narrow) == (torch.float32, None)


def test_memory_is_a_view_of_the_committed_plane() -> None:
    layout = _layout("topk(ratio=0.1)")
    layout.memory("body").fill_(3.0)
    assert layout.flat_buffers[0].committed[UNSENT].sum() == 3.0 * 512 * 64
    assert layout.memory_bytes == 2 * 4 * (5120 + 512 * 64)


GPT2 = (_spec("head", 50_257, 768), *(_spec(f"layer{number}", 768, 9_216) for number in range(12)))
"""As many elements as GPT-2 has, in 124 million parameters."""


def _unit_sizes(text: str, policy: Any = None, *, on_device: bool) -> list[int]:
    composition, meta = recipe(text).build(), torch.device("meta")
    layout = build(GPT2, composition, policy, meta, 4, tuning=Tuning(on_device=on_device))
    return [unit.numel for flat_buffer in layout.flat_buffers for unit in flat_buffer.units]


@pytest.mark.parametrize("text", ["int8", "topk(ratio=0.01)"])
def test_what_stays_on_a_device_has_fewer_and_larger_units_that_overlap_still(text: str) -> None:
    there, here = (_unit_sizes(text, on_device=where) for where in (True, False))
    assert sum(there) == sum(here)
    assert len(there) < len(here) / 2
    first, *_, last = there
    assert max(first, last) < sum(there) / 5, "while they are on the wire, the others hide them"


def test_units_of_whole_matrices_are_fewer_on_a_device() -> None:
    assert len(_unit_sizes("powersgd", on_device=True)) < len(_unit_sizes("powersgd", on_device=False))


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("gcomp", None),
        ("covap(interval=2)", None),
        ("topk(ratio=0.01, fused=True)", None),
        ("int8", {"head": "threshold(threshold=0.1)"}),
    ],
)
def test_units_of_what_is_read_on_the_host_and_sizes_of_a_recipes_own_are_the_same_on_a_device(
    text: str, policy: Any
) -> None:
    assert _unit_sizes(text, policy, on_device=True) == _unit_sizes(text, policy, on_device=False)


def test_an_exchange_that_forgets_is_refused() -> None:
    forgetful = Composition(reduce(values(random_k(0.1))), text="forgetful")
    assert isinstance(forgetful.exchange, Reduce)
    with pytest.raises(ValueError, match=r"'forgetful' forgets what it does not send"):
        build(SPECS, forgetful, None, CPU, 2)


def test_what_is_no_policy_is_refused_in_a_sentence() -> None:
    with pytest.raises(TypeError, match="neither a mapping of name patterns to recipes"):
        _layout("topk(ratio=0.1)", "by_size()")


def test_a_policy_may_not_measure() -> None:
    with pytest.raises(ValueError, match="'auto' must measure before it can decide"):
        _layout("topk(ratio=0.1)", {"*": "auto"})


def _early(text: str = "topk(ratio=0.1)", boundary: int = 6000, few: int = 0, **other: int) -> Any:
    composition, tuning = recipe(text).build(), Tuning(early_bytes=few, **other)
    specs = (_spec("head.bias", 10), _spec("head.weight", 10, 512), _spec("norm", 512), *LATE)
    cut = replace(composition, cutter=lambda _sizes: [boundary])
    return build(specs, cut, None, CPU, 2, tuning=tuning).early


LATE = (_spec("body", 512, 64), _spec("stem.bias", 64), _spec("stem", 64, 64))


def test_early_are_the_small_ones_ahead_of_the_last_unit() -> None:
    assert _early() == {"head.bias", "norm"}
    assert _early(boundary=512 * 74) == {"head.bias", "norm", "stem.bias"}


def test_nothing_is_early_in_front_of_a_single_unit_or_where_nothing_is_remembered() -> None:
    assert _early(boundary=0) == _early("dense") == frozenset()


def test_too_few_bytes_wait_for_the_tail() -> None:
    assert _early(few=4 * 522) == {"head.bias", "norm"}
    assert _early(few=4 * 522 + 1) == frozenset()


def test_what_has_a_collective_of_its_own_is_not_early() -> None:
    assert _early(small_bytes=4 * 512) == {"head.bias"}
