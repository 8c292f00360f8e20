"""What an attached model tells: metrics, lines in the log, ranges in a profile, a trace of the step."""

from __future__ import annotations

import gc
import json
import logging
import math
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import gradwire
from gradwire.comm import run_ranks
from gradwire.planning.costs import Link
from gradwire.recipes.parse import short
from gradwire.step.event_log import account
from tests.support.rig import Rig
from tests.support.states import own_state

pytestmark = pytest.mark.usefixtures("world_in_company")


def _ddp() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))


def _backward(ddp: DistributedDataParallel, times: float = 1.0) -> None:
    ddp.zero_grad()
    (ddp(torch.ones(2, 64)).pow(2).sum() * times).backward()


def test_metrics_are_flat_floats_that_agree_with_the_report_and_the_memory() -> None:
    ddp = _ddp()
    wire = gradwire.attach(ddp, recipe="topk(ratio=0.1)")
    assert "gradwire/bytes_sent" not in wire.metrics()
    for _ in range(3):
        _backward(ddp)
    metrics, report = wire.metrics(), wire.report()
    assert all(type(value) is float and name.startswith("gradwire/") for name, value in metrics.items())
    assert metrics["gradwire/step"] == 3.0
    assert metrics["gradwire/skipped_steps"] == 0.0
    assert metrics["gradwire/bytes_sent_mean"] == report.metered_bytes_per_step
    assert metrics["gradwire/memory_bytes"] == report.memory_bytes
    assert 0.0 < metrics["gradwire/share_of_linear"] < 1.0
    assert "gradwire/slowest_rank" not in metrics, "there is one"
    unsent = math.hypot(*(float(each.double().norm()) for each in own_state(wire)["memory"].values()))
    grads = math.hypot(*(float(p.grad.double().norm()) for p in ddp.parameters() if p.grad is not None))
    # Norms of a few thousand numbers in float64, added in another order.
    assert metrics["gradwire/residual_to_gradient"] == pytest.approx(unsent / grads, rel=1e-12)
    ddp.zero_grad()
    assert "gradwire/residual_to_gradient" not in wire.metrics()


def test_unsent_gradient_is_compared_with_gradients_as_they_are_without_a_loss_scale() -> None:
    told = []
    for scale in (1.0, 1024.0):
        ddp, scaler = _ddp(), torch.amp.GradScaler("cpu", init_scale=scale)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        wire = gradwire.attach(ddp, optimizer, recipe="topk(ratio=0.1)", scaler=scaler)
        _backward(ddp, scale)
        told.append(wire.metrics()["gradwire/residual_to_gradient"])
        wire.detach()
    # Powers of two scale numbers in float32 exactly.
    assert told[0] == told[1] > 0.0


def test_a_link_that_is_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = gradwire.attach(_ddp(), recipe="topk(ratio=0.1)")
    assert not any(name.startswith("gradwire/link_") for name in wire.metrics())
    monkeypatch.setattr("gradwire.measure.link.LinkTraffic.link", Link(alpha_s=1e-3, beta_s=4e-8))
    told = wire.metrics()
    assert (told["gradwire/link_bytes_per_s"], told["gradwire/link_latency_s"]) == (1.0 / 4e-8, 1e-3)


def test_a_listener_sees_the_gradient_that_the_optimizer_will_see() -> None:
    ddp, seen = _ddp(), []
    wire = gradwire.attach(ddp, recipe="topk(ratio=0.1)")

    def take(metrics: dict[str, float], step: int) -> None:
        seen.append((step, metrics["gradwire/residual_to_gradient"]))

    wire.log_to(take, every=2)
    told = []
    for _ in range(4):
        _backward(ddp)
        told.append(wire.metrics()["gradwire/residual_to_gradient"])
    assert seen == [(2, told[1]), (4, told[3])]


def test_listening_keeps_no_model_alive() -> None:
    ddp = _ddp()
    gradwire.attach(ddp, recipe="dense").log_to(lambda metrics, step: None)
    gone = weakref.ref(ddp)
    del ddp
    gc.collect()
    assert gone() is None


def test_the_log_says_what_was_attached_and_which_step_was_skipped(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gradwire"):
        ddp = _ddp()
        gradwire.attach(ddp, recipe="topk(ratio=0.01)")
        for times in (1.0, math.nan, 1.0):
            _backward(ddp, times)
    attached, skipped = (text for text in caplog.messages if "compiling" not in text)
    assert attached.startswith(f"gradwire {gradwire.__version__}: topk, ")
    # Of 2 · (64 · 64 + 64) numbers of 4 bytes, and two planes of them.
    assert "units, " in attached
    assert "of 33.3 kB, memory 65.5 kB" in attached
    assert skipped.startswith("step 1 is skipped: NaN")
    assert skipped.endswith("(1 so far)")


def test_the_share_that_is_told_is_what_a_step_announces() -> None:
    shapes = {"a": (256, 256), "b": (256, 512)}
    texts = run_ranks(2, lambda comm: account(Rig(comm, "int8", shapes=shapes).reducer))
    # A byte an element and 4 bytes for a block of 256, of 4 bytes an element: 25.4 %.
    assert set(texts) == {"int8, 4 units, 25.4 % of 786 kB, memory 1.57 MB"}


def test_the_log_says_what_is_decided_and_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "gradwire"):
        ddp = _ddp()
        wire = gradwire.attach(ddp, recipe="auto")
        for _ in range(40):
            _backward(ddp)
    told = [text for text in caplog.messages if text.startswith(("gradwire ", "from step"))]
    assert f"{gradwire.__version__}: auto, " in told[0]
    assert told[0].endswith("measuring dense steps first")
    report = wire.report()
    assert len(told) == 2
    assert f"on: {short(report.recipe)}; {report.why}" in told[1]


def _names(*, all_threads: bool) -> list[str]:
    ddp = _ddp()
    gradwire.attach(ddp, recipe="topk(ratio=0.1)")
    _backward(ddp)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=all_threads)
    with profile(activities=[ProfilerActivity.CPU], experimental_config=config) as profiler:
        _backward(ddp)
    events = profiler.events()
    assert events is not None
    return [event.name for event in events if event.name.startswith("gradwire/")]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11's, of itself
def test_a_profile_of_all_threads_shows_what_is_encoded_sent_and_decoded() -> None:
    names = _names(all_threads=True)
    for what in ("encode", "wire", "decode"):
        assert any(name.startswith(f"gradwire/{what} topk flat buffer 0") for name in names), (what, names)
    assert "gradwire/wait" in names


def test_a_usual_profile_shows_how_long_the_backward_pass_waited() -> None:
    assert _names(all_threads=False) == ["gradwire/wait"]


def test_a_trace_holds_the_spans_of_the_timeline(tmp_path: Path) -> None:
    ddp = _ddp()
    wire = gradwire.attach(ddp, recipe="topk(ratio=0.1)")
    _backward(ddp)
    wire.trace(tmp_path / "step.json")
    trace = json.loads((tmp_path / "step.json").read_text())
    complete = [each for each in trace["traceEvents"] if each["ph"] == "X"]
    timeline = wire.report().timeline
    assert {"encode", "wire", "decode", "backward", "wait"} <= {each["cat"] for each in complete}
    assert [each["cat"] for each in complete] == [span["what"] for span in timeline]
    for event, span in zip(complete, timeline, strict=True):
        start_s, stop_s = span["start_s"], span["stop_s"]
        assert isinstance(start_s, float)
        assert isinstance(stop_s, float)
        # Microseconds and seconds of the same clock: rounding of two differences.
        assert event["ts"] == pytest.approx(start_s * 1e6, abs=1e-3)
        assert event["ts"] + event["dur"] == pytest.approx(stop_s * 1e6, abs=1e-3)
    rows = {(each["pid"], each["tid"]) for each in trace["traceEvents"] if each["name"] == "thread_name"}
    assert {(each["pid"], each["tid"]) for each in complete} <= rows
