"""`Wire.switch`, and how a wire shows itself, on an attached model in a world of one."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.errors import GradwireWarning

pytestmark = pytest.mark.usefixtures("world_in_company")


def _ddp() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))


def _backward(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    ddp.zero_grad()
    ddp(torch.ones(2, 64)).pow(2).sum().backward()
    return [p.grad.clone() for p in ddp.parameters() if p.grad is not None]


def test_the_next_step_runs_what_was_switched_to_and_nothing_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, ours = _ddp(), _ddp()
    whole = _backward(plain)
    wire = gradwire.attach(ours, recipe="dense")
    _backward(ours)
    with caplog.at_level(logging.INFO, "gradwire"):
        wire.switch("topk(0.1)")
        first = _backward(ours)
    assert [each for each in caplog.messages if "from step" in each] == [
        "from step 1 on: topk(ratio=0.1); switched to at step 1"
    ]
    assert wire.report().recipe.startswith("topk(ratio=0.1")
    wire.switch("dense")
    second = _backward(ours)
    for grad, *sent in zip(whole, first, second, strict=True):
        # Two gradients in float32, of which one is left and added again.
        assert torch.allclose(sent[0] + sent[1], 2 * grad, rtol=4 * torch.finfo(torch.float32).eps)
    _backward(ours)
    assert wire.report().recipe == "dense"
    wire.detach()


def test_what_attach_would_refuse_is_refused_and_changes_nothing() -> None:
    ddp = _ddp()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    wire = gradwire.attach(ddp, optimizer, "topk(0.1)")
    with pytest.raises(ValueError, match="did you mean 'int8'"):
        wire.switch("intt8")
    with pytest.raises(ValueError, match="applies momentum itself"):
        wire.switch("dgc(momentum=0.9)")
    _backward(ddp)
    assert wire.report().recipe.startswith("topk")
    wire.detach()


def test_momentum_that_is_applied_no_longer_is_said() -> None:
    ddp = _ddp()
    wire = gradwire.attach(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), "dgc(momentum=0.9)")
    _backward(ddp)
    with pytest.warns(GradwireWarning, match="momentum is no longer applied"):
        wire.switch("int8")
    wire.detach()


def test_buckets_are_fitted_to_what_is_switched_to() -> None:
    ddp = _ddp()
    wire = gradwire.attach(ddp, recipe="dense")
    _backward(ddp)
    usual = ddp.bucket_bytes_cap
    for text, finer in (("topk(0.1)", True), ("dense", True), ("dense", False)):
        wire.switch(text)
        _backward(ddp)
        assert (ddp.bucket_bytes_cap < usual) == finer
    wire.detach()


def test_a_notebook_shows_the_report_and_repr_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ddp = _ddp()
    wire = gradwire.attach(ddp, recipe="topk(0.1)")
    _backward(ddp)
    shown = replace(wire.report(), wire_bytes_per_step=37.0, dense_bytes_per_step=100.0)
    running = wire.attached.backward.reducer
    monkeypatch.setattr("gradwire._api.wire.report_of", lambda *_: replace(shown, recipe=running.running))
    assert repr(wire) == "Wire(topk, step 1, 37 % of dense)"
    assert wire._repr_html_() == wire.report()._repr_html_()
    wire.detach()
    assert repr(wire) == "Wire(dense, step 1)"
