"""A user's own model, named as `package.module:make`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire.cli.cluster_options import model_of
from gradwire_lab.workloads.catalogue import workload
from tests.support.pages import blocks

HERE = "tests.unit.lab.test_workloads_own"


def epoch(rank: int, world: int) -> Iterator[Tensor]:
    """Three batches, which say whose they are."""
    yield from (torch.tensor([float(rank), float(world), float(step)]) for step in range(3))


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    out: Tensor = model(batch).sum()
    return out


def make() -> tuple[Any, ...]:
    return nn.Linear(3, 2), epoch, loss


def with_adam() -> tuple[Any, ...]:
    return *make(), torch.optim.Adam


def without_batches() -> tuple[Any, ...]:
    return nn.Linear(3, 2), lambda rank, world: [], loss


def alone() -> nn.Module:
    return nn.Linear(3, 2)


def data_for_a_function() -> tuple[Any, ...]:
    return nn.Linear(3, 2), [torch.ones(3)], loss


def test_batches_go_on_with_the_next_epoch() -> None:
    batches = workload(f"{HERE}:make").batches(1, 2, seed=0)
    assert [batch.tolist() for batch in islice(batches, 4)] == [[1, 2, 0], [1, 2, 1], [1, 2, 2], [1, 2, 0]]


def test_a_model_is_a_function_of_its_seed_and_what_is_lost_is_the_users() -> None:
    work = workload(f"{HERE}:make")
    first, again, other = (work.model(seed) for seed in (3, 3, 4))
    batch = torch.ones(3)
    assert work.loss(first, batch) == loss(first, batch) == work.loss(again, batch)
    assert work.loss(first, batch) != work.loss(other, batch)


def test_the_optimizer_is_sgd_or_the_users() -> None:
    for name, kind in (("make", torch.optim.SGD), ("with_adam", torch.optim.Adam)):
        work = workload(f"{HERE}:{name}")
        assert type(work.optimizer(work.model(0).parameters())) is kind


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("alone", "returned Linear: expected \\(model, batches, loss\\)"),
        ("data_for_a_function", "of which all but the model are functions"),
        ("nothing", "has no attribute 'nothing'"),
    ],
)
def test_what_make_returns_is_looked_at_before_the_run(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        workload(f"{HERE}:{name}").batches(0, 2, 0)


def test_an_epoch_without_batches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batches\(0, 2\) gave none"):
        next(workload(f"{HERE}:without_batches").batches(0, 2, 0))


def test_options_of_other_workloads_are_refused() -> None:
    with pytest.raises(ValueError, match="leave out data, shards and batch size"):
        workload(f"{HERE}:make", batch_size=4)


def test_what_the_page_writes_can_be_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (written,) = (each.text for each in blocks("python") if "def make():" in each.text)
    (tmp_path / "of_the_page.py").write_text(written)
    monkeypatch.chdir(tmp_path)
    work = workload("of_the_page:make")
    model, batches = work.model(0), work.batches(0, 2, 0)
    work.loss(model, next(batches)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_plan_takes_the_same_function() -> None:
    for name in ("make", "alone"):
        found = model_of(f"{HERE}:{name}", None)
        assert isinstance(found, nn.Linear)
        assert found.weight.is_meta
