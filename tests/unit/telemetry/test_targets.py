"""Where metrics can go, and that a target that fails stops nothing."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from gradwire.telemetry.targets import Listener, exposition, write_to

METRICS = {"gradwire/step": 7.0, "gradwire/bytes_sent": 1e6}


def test_tensorboard_gets_a_scalar_for_each_metric() -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.scalars.append((tag, value, step))

    writer = Writer()
    write_to(writer, rank=0)(METRICS, 7)
    assert writer.scalars == [("gradwire/step", 7.0, 7), ("gradwire/bytes_sent", 1e6, 7)]


def test_a_logger_gets_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mine"):
        write_to(logging.getLogger("mine"), rank=0)(METRICS, 7)
    assert caplog.messages == ["step 7: step 7, bytes_sent 1e+06"]


def test_a_file_is_replaced_by_the_latest_metrics_as_text(tmp_path: Path) -> None:
    path = tmp_path / "gradwire.prom"
    write = write_to(path, rank=2)
    write({"gradwire/step": 6.0}, 6)
    write(METRICS, 7)
    assert path.read_text() == exposition(METRICS, 2)
    assert 'gradwire_bytes_sent{rank="2"} 1000000.0\n' in path.read_text()
    assert list(tmp_path.iterdir()) == [path]


def test_without_prometheus_client_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ImportError, match=r"pip install prometheus_client.*textfile collector"):
        write_to("prometheus", rank=0)


def test_prometheus_gets_gauges_labelled_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[tuple[str, str], float] = {}

    class Gauge:
        def __init__(self, name: str, _help: str, labels: list[str], registry: object) -> None:
            assert labels == ["rank"]
            assert registry == "the default one"
            assert name not in seen, "a registry refuses a name that it has"
            self.name = name

        def labels(self, rank: str) -> Gauge:
            self.rank = rank
            return self

        def set(self, value: float) -> None:
            seen[self.name, self.rank] = value

    fake: Any = ModuleType("prometheus_client")
    fake.Gauge, fake.REGISTRY = Gauge, "the default one"
    monkeypatch.setitem(sys.modules, "prometheus_client", fake)
    write = write_to("prometheus", rank=1)
    write({"gradwire/ratio": 0.5}, 1)
    write({"gradwire/ratio": 0.25}, 2)
    assert seen == {("gradwire_ratio", "1"): 0.25}


class Run:
    """As W&B's: what is logged with a step behind its own count is dropped; without one it counts on."""

    def __init__(self) -> None:
        self.kept: list[dict[str, float]] = []
        self.plotted_over: dict[str, str] = {}
        self.count = 0

    def define_metric(self, name: str, step_metric: str) -> None:
        self.plotted_over[name] = step_metric

    def log(self, data: dict[str, float], step: int | None = None) -> None:
        if step is not None and step < self.count:
            return
        self.kept.append(data)
        self.count = (self.count if step is None else step) + 1


class Tracker:
    """As Accelerate's; `tracker` is what the tracker writes to."""

    def __init__(self, tracker: object) -> None:
        self.tracker = tracker
        self.logged: list[tuple[dict[str, float], int | None]] = []

    def log(self, values: dict[str, float], step: int | None) -> None:
        self.logged.append((values, step))


class Accelerator:
    """As Accelerate's, of which two attributes are read."""

    def __init__(self, *trackers: Tracker, is_main_process: bool = True) -> None:
        self.trackers, self.is_main_process = trackers, is_main_process


@pytest.mark.parametrize("how", ["run", "run.log", "wandb.log"])
def test_weights_and_biases_keeps_its_own_count_of_steps(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, wandb = Run(), ModuleType("wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    if how == "wandb.log":  # before a run has begun: plain functions

        def log(data: dict[str, float], step: int | None = None) -> None:
            run.log(data, step)

        monkeypatch.setattr(wandb, "log", log, raising=False)
        monkeypatch.setattr(wandb, "define_metric", run.define_metric, raising=False)
    targets = {"run": run, "run.log": run.log, "wandb.log": getattr(wandb, "log", None)}
    write = write_to(targets[how], rank=0)
    for step in range(20):
        run.log({"loss": 1.0})
        run.log({"accuracy": 0.5})
        write({**METRICS, "gradwire/step": float(step)}, step)
    assert len(run.kept) == 60
    assert [each["gradwire/step"] for each in run.kept[2::3]] == list(range(20))
    assert run.plotted_over == {"gradwire/*": "gradwire/step"}


def test_accelerates_trackers_get_the_step_and_weights_and_biases_does_not() -> None:
    run = Run()
    board, biases = Tracker(object()), Tracker(run)
    write_to(Accelerator(board, biases), rank=0)(METRICS, 7)
    assert board.logged == [(METRICS, 7)]
    assert (biases.logged, run.kept, run.count) == ([], [METRICS], 1)


def test_accelerates_trackers_are_the_main_process_s_and_may_come_later() -> None:
    board = Tracker(object())
    write_to(Accelerator(board, is_main_process=False), rank=1)(METRICS, 7)
    assert board.logged == []
    accelerator = Accelerator()
    write = write_to(accelerator, rank=0)
    write(METRICS, 7)
    accelerator.trackers = (board,)
    write(METRICS, 8)
    assert board.logged == [(METRICS, 8)]


def test_what_is_no_target_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match=r"SummaryWriter.*a function.*not 'tensorboard'"):
        write_to("tensorboard", rank=0)


@pytest.mark.parametrize("every", [0, -1, 2.5])
def test_every_is_a_number_of_backward_passes(every: Any) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Listener(dict, lambda _metrics, _step: None, every)


def test_every_third_pass_is_written() -> None:
    written: list[int] = []
    passes = iter(range(100))
    listener = Listener(
        lambda: {"gradwire/step": next(passes)}, lambda _metrics, step: written.append(step), 3
    )
    for _ in range(7):
        listener()
    assert written == [0, 1]  # metrics were asked for twice, in passes 3 and 6


def test_a_target_that_raises_is_dropped_and_training_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []

    def full(_metrics: object, step: int) -> None:
        calls.append(step)
        raise OSError("no space left on device")

    listener = Listener(lambda: METRICS, full, 1)
    listener()
    listener()
    assert calls == [7]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "no space left on device" in caplog.messages[0]
