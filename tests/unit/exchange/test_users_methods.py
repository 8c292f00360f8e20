"""Methods of users: the example of "Adding a method", and classes written for the release before."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire.codec.select.base import check_ratio, count_kept
from gradwire.codec.sparse import values
from gradwire.comm import Comm, Round, run_ranks
from gradwire.exchange.base import Decode
from gradwire.exchange.compose import every, remember, warm
from gradwire.exchange.payloads import reduce
from gradwire.kernels.draws import sample_indices
from gradwire.kernels.uploads import sent_to
from gradwire.laws import Laws
from gradwire.recipes.base import REGISTRY, Composition, register
from gradwire.unit.context import ExchangeContext
from tests.support.rig import Outcome, Rig, gradients

OLD_NAMES = {
    "CodecLaws": "gradwire.codec.base",
    "SelectorLaws": "gradwire.codec.select.base",
    "ExchangeLaws": "gradwire.exchange.base",
}
PAGE = Path(__file__).parents[3] / "docs" / "engineering" / "adding-a-method.md"


def old(name: str) -> Any:
    """What a module gives by a name of the release before."""
    with pytest.warns(DeprecationWarning, match=rf"{name} is now gradwire\.laws\.Laws"):
        return getattr(import_module(OLD_NAMES[name]), name)


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Recipes that a test registers are gone afterwards."""
    yield
    for name in ("half", "my_randomk"):
        REGISTRY.pop(name, None)


@pytest.mark.parametrize("name", OLD_NAMES)
def test_old_names_of_laws_are_importable(name: str) -> None:
    assert old(name) is Laws
    with pytest.warns(DeprecationWarning, match=name):
        exec(f"from {OLD_NAMES[name]} import {name}")


@pytest.mark.parametrize("module", OLD_NAMES.values())
def test_a_module_with_an_old_name_still_lacks_all_others(module: str) -> None:
    with pytest.raises(ImportError, match="Lwas"):
        exec(f"from {module} import Lwas")


class Half:
    """Half of every value, all-gathered. What follows is written as for the release before."""

    memory = None

    def start(self, x: Tensor, mean: Tensor, comm: Comm, ctx: ExchangeContext) -> Decode:
        x *= 0.5
        gathered = x.new_empty(comm.world, x.numel())
        pending = comm.all_gather(gathered, x)

        def decode() -> None:
            pending.wait()
            torch.mean(gathered, 0, out=mean)

        return decode

    def rounds(self, numel: int, dtype: torch.dtype, ctx: ExchangeContext) -> tuple[Round, ...]:
        return (Round("all_gather", numel, dtype),)


def by_attribute() -> Half:
    """States its laws as an attribute of the class."""

    class Stated(Half):
        laws = old("ExchangeLaws")(contractive=True)

    return Stated()


def by_property() -> Half:
    """States its laws as a property, anew each time it is asked."""
    stated = old("ExchangeLaws")

    @dataclass(frozen=True)
    class Stated(Half):
        grain: int = 1

        @property
        def laws(self) -> Laws:
            return stated(contractive=True, grain=self.grain)

    return Stated()


def steps(text: str, number: int) -> list[list[Outcome]]:
    """So many steps of a recipe on three ranks."""

    def rank(comm: Comm) -> list[Outcome]:
        rig = Rig(comm, text)
        return [rig.step(gradients(comm.rank, step)) for step in range(number)]

    return run_ranks(3, rank)


def average(step: int, name: str) -> Tensor:
    """The mean of all ranks' gradients."""
    return torch.stack([gradients(rank, step)[name] for rank in range(3)]).mean(0)


@pytest.mark.parametrize("make", [by_attribute, by_property])
def test_an_exchange_of_a_user_remembers_warms_up_and_rests(make: Any) -> None:
    exchange = make()

    @register
    def half(steps: int = 2) -> Composition:
        """Half of every value in every second step, after some dense ones."""
        return Composition(remember(every(2, warm(steps, exchange), order="paper")), lambda _sizes: ())

    ranks = steps("half(steps=3)", 6)
    name = "middle.weight"  # in the only unit, number 0, which travels in steps 0, 2 and 4
    means = [outcome.mean[name] for outcome in ranks[0]]
    late = torch.zeros_like(means[0])
    for step, mean in enumerate(means):
        assert all(torch.equal(of_rank[step].mean[name], mean) for of_rank in ranks)
        late += average(step, name)
        share = 0.0 if step % 2 else (1.0 if step < 3 else 0.5)
        torch.testing.assert_close(mean, share * late)
        late -= mean


@pytest.mark.parametrize("named", ["Laws", "SelectorLaws"])
def test_the_example_of_the_page_runs(named: str) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    text = "\n\n".join(blocks).replace("Laws(", f"{named}(").replace("def randomk", "def my_randomk")
    known: dict[str, Any] = {"__name__": __name__, named: Laws if named == "Laws" else old(named)}
    used = (
        Composition,
        check_ratio,
        count_kept,
        dataclass,
        lru_cache,
        reduce,
        register,
        remember,
        sample_indices,
    )
    known |= {each.__name__: each for each in (*used, sent_to, values)} | {"torch": torch}
    known["random_k"] = lambda ratio: known["RandomK"](check_ratio(ratio))
    exec(text, known)
    for mine, ours in zip(steps("my_randomk(ratio=0.2)", 2), steps("randomk(ratio=0.2)", 2), strict=True):
        for one, other in zip(mine, ours, strict=True):
            assert one.error is None
            assert torch.equal(one.flat(), other.flat())
