"""Where a training step's time goes, by a clock that goes on by a second whenever it is read."""

from __future__ import annotations

from itertools import count, repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gradwire_lab.bench.trainer import GradientClock, Trainer


def _trainer(*, with_clock: bool) -> Trainer:
    model = nn.Linear(3, 2)  # two parameters, of which each reads the clock when its gradient is there
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload: Any = SimpleNamespace(loss=lambda module, batch: module(batch).sum())
    return Trainer(
        workload=workload,
        model=model,
        module=model,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0),
        batches=repeat(torch.ones(3)),
        clock=GradientClock(model.parameters()) if with_clock else None,
        wire=None,
        hook_clock=None,
    )


@pytest.mark.parametrize(
    ("with_clock", "backward_s", "exposed_comm_s"), [(True, 2.0, 1.0), (False, 1.0, None)]
)
def test_the_parts_of_a_step_add_up_to_it(
    with_clock: bool, backward_s: float, exposed_comm_s: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(with_clock=with_clock)
    seconds = map(float, count())
    clock = SimpleNamespace(perf_counter=lambda: next(seconds), process_time=lambda: 0.0)
    monkeypatch.setattr("gradwire_lab.bench.trainer.time", clock)
    for _ in range(2):
        step = trainer.step()
        assert (step.data_s, step.forward_s, step.optimizer_s) == (1.0, 1.0, 1.0)
        assert (step.backward_s, step.exposed_comm_s) == (backward_s, exposed_comm_s)
        assert step.step_s == 3.0 + backward_s + (exposed_comm_s or 0.0)
