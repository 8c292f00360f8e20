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
