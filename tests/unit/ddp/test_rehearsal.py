"""After its rehearsal an exchange has all of its kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numba
import pytest
import torch

from gradwire.comm import Comm, run_ranks
from gradwire.ddp.rehearsal import rehearse
from gradwire.exchange import Exchange, run
from gradwire.exchange.late import LATE
from gradwire.kernels import cpu
from gradwire.moment import Moment
from tests.laws.cases import RECIPES, composed
from tests.laws.folding import Folding
from tests.laws.parts import parts_of
from tests.unit.kernels.test_prepare import paths_called_from_python

Call = tuple[str, ...]
"""Name and types of what a kernel is compiled for."""


@contextmanager
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Call]]:
    """Which kernels Python calls meanwhile, and with what."""
    noted: set[Call] = set()

    def noting(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def call(*arguments: Any) -> Any:
            noted.add((name, *(str(numba.typeof(each)) for each in arguments)))
            return kernel(*arguments)

        return call

    with monkeypatch.context() as patch:
        for path in paths_called_from_python():
            owner = functools.reduce(getattr, path[:-1], cpu)
            patch.setattr(owner, path[-1], noting(".".join(path), getattr(owner, path[-1])))
        yield noted


def train(exchange: Exchange, comm: Comm) -> None:
    """Some steps behind any warm-up, in which every rank leads, of a unit of several parameters."""
    sizes, total = (6_000, 3, 3_000), 9_003
    folding = None if exchange.memory is None else Folding(exchange.memory, total)
    at = Moment(LATE, 1, comm.rank, comm.world, parts=parts_of(*sizes))
    for step in range(LATE, LATE + 4):
        grad = torch.randn(total, generator=torch.Generator().manual_seed(8 * step + comm.rank))
        x = grad if folding is None else folding.fold(grad, step, comm.world)
        at = replace(at, step=step)
        if exchange.rounds(total, torch.float32, at):
            run(exchange, x, torch.empty_like(x), comm, at)
        at.kept.commit()
        if folding is not None:
            folding.commit()


@pytest.mark.parametrize("text", RECIPES)
def test_training_calls_no_kernel_that_was_not_rehearsed(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = composed(text).exchange
    for world in (1, 2, 4):
        with calls(monkeypatch) as rehearsed:
            rehearse(exchange, world)
        with calls(monkeypatch) as called:
            run_ranks(world, functools.partial(train, exchange))
        assert called <= rehearsed, f"{world} ranks"
