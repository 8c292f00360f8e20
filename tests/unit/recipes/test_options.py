"""Options of absurd types and sizes: what a user hears, and what works all the same."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from gradwire.comm import Comm, run_ranks
from gradwire.exchange.dense import dense
from gradwire.recipes import Composition, Recipe, entries, recipe, register
from gradwire.recipes.base import REGISTRY
from gradwire.recipes.topk import topk
from tests.support.looped import looped
from tests.support.rig import Outcome, Rig, gradients

if TYPE_CHECKING:
    from decimal import Decimal

BEYOND = "1" + "0" * 30


@looped(
    ("text", "message"),
    [
        (f"int8(block={BEYOND})", f"block={BEYOND} is outside -2^63 … 2^63 - 1"),
        (f"local_every(interval={BEYOND})", "interval=1000000000000000000000000000000 is outside"),
        (f"efsignsgd(block={BEYOND})", f"block={BEYOND} is outside -2^63 … 2^63 - 1"),
        ("efsignsgd(block=1e30)", "block=1e+30 is not a whole number"),
        (f"covap(ccr_decimals={BEYOND})", f"ccr_decimals={BEYOND} is outside"),
        ("covap(interval=1001)", "interval=1001 is outside 1 … 1000 steps"),
        ("covap(interval=4, unit_mb=1e400)", "unit_mb=inf must be positive, and at most 10^6"),
        ("covap(edges='')", "edges='' is not a sequence"),
        ("covap(edges=(0.5, 'all'))", "covap(edges=(0.5, 'all'))': an option has the wrong type: edges="),
        ("powersgd(rank=True)", "rank=True is not a whole number"),
        ("topk(ratio=True)", "ratio=True is not a number"),
        ("topk(ratio=nan)", "ratio=nan is outside (0, 1]"),
        (f"covap(interval={2**63})", f"interval={2**63} is outside 1 … 1000 steps"),
        (f"powersgd(warmup_steps={2**63})", f"warmup_steps={2**63} is outside -2^63 … 2^63 - 1"),
        ("topk(values={})", "values={} is none of full, fp16"),
        ("auto(late=1e400)", "late=inf is not finite"),
        ("dgc(clip=1e400)", "clip=inf is not finite"),
        ("terngrad(clip=1e-300)", "clip=1e-300 is below 1e-06"),
        ("mstopk(rounds=1001)", "rounds=1001 is outside 1 … 1000"),
        ("sidco(stages=1001)", "stages=1001 is outside 1 … 1000"),
        ("flexible(low=1e-9)", "low=1e-09 is below 1e-06"),
        ("flexible(factor=1.0000000001)", "factor=1.0000000001: more than 100 ratios"),
        ("mergecomp(cuts=0)", "cuts=0 is not a sequence"),
        ("mergecomp(cuts=(1, 'x'), elements=2)", "cuts=(1, 'x'), of which 'x' is not a whole number"),
        ("mergecomp(elements=-1)", "elements=-1 must not be negative"),
        ("scalecom(rates=())", "rates=() is not a mapping"),
        ("scalecom(rates={1: 2})", "rates={1: 2}, of which 1 is not a word"),
        ("adacomp(at_most=2)", "recipe 'adacomp(at_most=2)': "),
        ("powersgd(warmup_steps=-1)", "recipe 'powersgd(warmup_steps=-1)': "),
        ("topk({[]: 1})", "'{[]: 1}' is not a plain value"),
        (f"topk({'(' * 300}0.1{')' * 300})", "cannot read recipe"),
    ],
)
def test_an_option_that_no_recipe_can_have_is_refused_by_its_name(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011, the text is compared below without escapes
        recipe(text)
    assert message in str(caught.value)


SMALL, LARGE = 5e-324, 2**63 - 1
ABSURD = (10**30, LARGE, SMALL, math.inf, -math.inf, math.nan, 0, -1, True, "", (), {})

BESIDE: dict[str, dict[str, Any]] = {
    "acpsgd": {"warmup_steps": 0},
    "covap": {"interval": 3},
    "dgc": {"warmup_steps": 0, "sample": 0.5},
    "mergecomp": {"split": "even"},
    "powersgd": {"warmup_steps": 0},
    "scalecom": {"warmup_steps": 0, "keep": 2},
}
"""Options with which the others count in the first step."""


def _asked(values: tuple[Any, ...]) -> Iterator[Recipe]:
    """Every recipe with each of its options at each of `values`."""
    for entry in entries():
        beside = BESIDE.get(entry.name, {})
        yield from (Recipe(entry.name, beside | {key: value}) for key in entry.options for value in values)


def _refusal(asked: Recipe) -> str | None:
    try:
        recipe(asked)
    except ValueError as error:
        return str(error)
    return None


@looped("asked", _asked(ABSURD))
def test_an_absurd_option_is_refused_or_its_text_is_the_same_recipe(asked: Recipe) -> None:
    refused = _refusal(asked)
    if refused is None:
        found = recipe(asked)
        assert recipe(str(found)) == found
    else:
        assert str(asked) in refused


def _step(comm: Comm, text: str) -> Outcome:
    return Rig(comm, text).step(gradients(comm.rank, 0))


@looped("asked", _asked((SMALL, LARGE)))
def test_an_absurd_option_that_is_accepted_makes_a_step(asked: Recipe) -> None:
    if _refusal(asked) is not None:
        return
    outcomes = run_ranks(2, lambda comm: _step(comm, str(asked)))
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert all(mean.isfinite().all() for outcome in outcomes for mean in outcome.mean.values())


def _register(monkeypatch: pytest.MonkeyPatch, annotation: Any, default: Any) -> None:
    def mine(option: Any = default) -> Composition:
        """Not a recipe of the library."""
        return Composition(dense())

    mine.__annotations__["option"] = annotation
    register(mine)
    monkeypatch.setitem(REGISTRY, "mine", REGISTRY.pop("mine"))


@looped("number", [10**12 + 1, -(10**15), 2**63 - 1, -(2**63)])
def test_a_users_option_may_be_any_whole_number_of_64_bits(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _register(monkeypatch, int, 0)
    assert recipe(f"mine(option={number})").build().text == f"mine(option={number})"


@looped("number", [2**63, -(2**63) - 1, 10**30])
def test_a_whole_number_of_more_bits_is_refused_by_name(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _register(monkeypatch, int, 0)
    with pytest.raises(ValueError, match=rf"option={number} is outside -2\^63 … 2\^63 - 1"):
        recipe(f"mine(option={number})")


SEVERAL = (
    Sequence[str],
    Sequence,
    Iterable[str],
    Collection[str],
    list[str],
    tuple[str, ...],
    tuple[str, str],
    set[str],
)


@looped("annotation", [*SEVERAL, "Sequence[str]", "list[str] | None"])
@looped("text", ["mine(option='ab')", "mine(option=ab)"])
def test_a_word_is_not_read_as_letters(annotation: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _register(monkeypatch, annotation, ())
    with pytest.raises(ValueError, match=r"option='ab' is not a sequence; a single one is written \['ab'\]"):
        recipe(text)


@looped("annotation", [*SEVERAL, "Sequence[str]"])
def test_several_words_are_a_sequence_however_it_is_annotated(
    annotation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _register(monkeypatch, annotation, ())
    assert recipe("mine(option=['a', 'b'])").build().text == "mine(option=['a', 'b'])"


@looped("annotation", [Mapping, dict, dict[str, int]])
def test_a_word_is_no_mapping(annotation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _register(monkeypatch, annotation, {})
    with pytest.raises(ValueError, match="option='ab' is not a mapping"):
        recipe("mine(option=ab)")


def test_an_annotation_for_type_checkers_alone_leaves_the_others_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mine(names: Sequence[str] = (), share: Decimal | None = None) -> Composition:
        """Not ours."""
        return Composition(dense())

    register(mine)
    monkeypatch.setitem(REGISTRY, "mine", REGISTRY.pop("mine"))
    with pytest.raises(ValueError, match="names='ab' is not a sequence"):
        recipe("mine(names=ab)")


@looped("default", [math.inf, -math.inf, (1.0, -math.inf)])
def test_a_default_without_bounds_is_read_again(default: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _register(monkeypatch, Any, default)
    text = recipe("mine").build().text
    again = recipe(text)
    assert (again.options, again.build().text) == ({"option": default}, text)


@looped("value", [torch.float16, object(), np.float64, {"a": object()}])
def test_a_value_that_no_text_can_hold_is_refused(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _register(monkeypatch, Any, None)
    with pytest.raises(ValueError, match=r"is not a plain value|cannot read recipe"):
        recipe(Recipe("mine", {"option": value}))


@looped(
    ("value", "same"),
    [(np.float64(0.5), 0.5), (np.float32(0.5), 0.5), (torch.tensor(0.5), 0.5), (np.int64(1), 1)],
)
def test_numbers_of_other_libraries_count_as_pythons(value: Any, same: float) -> None:
    text = f"topk(ratio={same!r})"
    assert str(recipe(Recipe("topk", {"ratio": value}))) == text
    assert topk(value) == topk(ratio=value) == topk(same)
    assert recipe(topk(value)) == Recipe("topk", recipe(topk(same)).options)


def test_a_set_stays_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    _register(monkeypatch, set[int], {1})
    assert recipe("mine").build().text == "mine(option={1})"
    assert recipe("mine(option={1, 2})").options == {"option": {1, 2}}


@looped(
    ("name", "options"), [(None, {}), (3, {}), ("topk", None), ("topk", [("ratio", 0.1)]), ("topk", {1: 2})]
)
def test_a_recipe_has_a_name_and_options_by_name(name: Any, options: Any) -> None:
    with pytest.raises(ValueError, match=r"Recipe: (name|options)="):
        Recipe(name, options)


def test_a_users_recipe_that_trips_over_a_word_refuses_it_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(rates: Mapping[str, int] | None = None) -> Composition:
        """Not ours."""
        return Composition(dense(), why=str(rates and rates.items()))

    register(mine)
    monkeypatch.setitem(REGISTRY, "mine", REGISTRY.pop("mine"))
    with pytest.raises(ValueError, match="rates='ab' is not a mapping"):
        recipe("mine(rates=ab)")


def test_a_users_recipe_may_have_options_of_other_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours(pair: tuple[int, str] = (1, "a"), share: complex = 1j, anything=None) -> Composition:  # type: ignore[no-untyped-def]
        """Not a recipe of the library."""
        return Composition(dense())

    register(ours)
    monkeypatch.setitem(REGISTRY, "ours", REGISTRY.pop("ours"))
    text = "ours(pair=(2, 'b'), share=2j, anything=[1])"
    assert str(recipe(text)) == text


def test_options_of_a_users_recipe_are_checked_beside_annotations_for_type_checkers_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def mine(steps: int = 1, share: Decimal | None = None) -> Composition:
        """Not ours."""
        return Composition(dense())

    register(mine)
    monkeypatch.setitem(REGISTRY, "mine", REGISTRY.pop("mine"))
    assert recipe("mine(steps=2, share=0.5)").build().text == "mine(steps=2, share=0.5)"
    with pytest.raises(ValueError, match=r"recipe 'mine\(steps=2.5\)': steps=2.5 is not a whole number"):
        recipe("mine(steps=2.5)")


def test_annotations_that_are_no_types_fit_every_value(monkeypatch: pytest.MonkeyPatch) -> None:
    def worded(share: Any = 0.5, unit: Any = 1, steps: int = 1) -> Composition:
        """Not ours."""
        return Composition(dense())

    worded.__annotations__ |= {"share": "of all elements", "unit": "math.Elsewhere"}
    register(worded)
    monkeypatch.setitem(REGISTRY, "worded", REGISTRY.pop("worded"))
    text = "worded(share=0.25, unit=2, steps=3)"
    assert recipe(text).build().text == text
    with pytest.raises(ValueError, match=r"steps=2\.5 is not a whole number"):
        recipe("worded(steps=2.5)")


def test_the_text_of_a_users_recipe_is_read_again_whatever_its_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unset: Any = None

    def loose(share: float = unset, limit: float = False) -> Composition:
        """Not ours."""
        return Composition(dense())

    register(loose)
    monkeypatch.setitem(REGISTRY, "loose", REGISTRY.pop("loose"))
    text = recipe("loose").build().text
    assert text == "loose(share=None, limit=False)"
    assert recipe(text).build().text == text
