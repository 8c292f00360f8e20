"""Writes metrics to TensorBoard, Prometheus, W&B, a function or a logger, after every n-th backward pass."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from gradwire.arguments import as_python

Metrics: TypeAlias = Mapping[str, float]
Write: TypeAlias = Callable[[Metrics, int], None]
"""Takes the metrics and the number of the step."""

_LOG = logging.getLogger("gradwire")
_EXPECTED = (
    'log_to takes a SummaryWriter, "prometheus" or a registry of prometheus_client, a Path for the textfile '
    "collector, a logging.Logger, wandb.log, an Accelerator, or a function of metrics and step="
)


def write_to(target: Any, rank: int) -> Write:
    """A function that writes metrics to `target`, as accepted by `Wire.log_to`; `rank` is Prometheus' label.

    Raises `TypeError` for any other target, and `ImportError` if prometheus_client is missing.

    >>> write_to(lambda metrics, step: print(step, metrics), rank=0)({"gradwire/ratio": 0.25}, 7)
    7 {'gradwire/ratio': 0.25}
    """
    if hasattr(target, "trackers"):
        return _to_trackers(target)
    if (run := _wandb_run(target)) is not None:
        return _to_wandb(run)
    if hasattr(target, "add_scalar"):
        return lambda metrics, step: _to_tensorboard(target, metrics, step)
    if isinstance(target, logging.Logger):
        return lambda metrics, step: target.info("step %d: %s", step, _in_words(metrics))
    if isinstance(target, Path):
        return lambda metrics, _step: write_textfile(target, metrics, rank)
    if target == "prometheus" or (hasattr(target, "register") and hasattr(target, "collect")):
        return _prometheus(None if target == "prometheus" else target, rank)
    if callable(target):
        return lambda metrics, step: target(metrics, step=step)
    raise TypeError(f"{_EXPECTED}, not {target!r}")


def _to_tensorboard(writer: Any, metrics: Metrics, step: int) -> None:
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)


def _wandb_run(target: Any) -> Any:
    """The run of Weights & Biases, if `target` is a run, `wandb.log` or the module; else `None`."""
    owner = getattr(target, "__self__", None)  # wandb.log is a method of the run, once that has begun
    for each in (target, owner, sys.modules.get("wandb")):
        if hasattr(each, "define_metric") and (each is target or getattr(each, "log", None) == target):
            return each
    return None


def _to_wandb(run: Any) -> Write:
    """A writer that leaves out W&B's step: W&B drops steps behind its own counter, which every `wandb.log`
    advances.
    """
    run.define_metric("gradwire/*", step_metric="gradwire/step")
    return lambda metrics, _step: run.log(dict(metrics))


def _to_trackers(accelerator: Any) -> Write:
    """A writer to all trackers of Accelerate. Only the main process has trackers; others write nothing."""
    writes: dict[int, Write] = {}

    def write(metrics: Metrics, step: int) -> None:
        for tracker in accelerator.trackers if accelerator.is_main_process else ():
            if id(tracker) not in writes:
                run = _wandb_run(getattr(tracker, "tracker", None))
                writes[id(tracker)] = partial(_to_tracker, tracker) if run is None else _to_wandb(run)
            writes[id(tracker)](metrics, step)

    return write


def _to_tracker(tracker: Any, metrics: Metrics, step: int) -> None:
    tracker.log(dict(metrics), step=step)


def _in_words(metrics: Metrics) -> str:
    return ", ".join(f"{name.removeprefix('gradwire/')} {value:.4g}" for name, value in metrics.items())


def _prometheus(registry: Any, rank: int) -> Write:
    try:
        import prometheus_client
    except ImportError as error:
        raise ImportError(
            'log_to("prometheus") needs prometheus_client: pip install prometheus_client. Without it, '
            'log_to(Path("gradwire.prom")) writes a file for the textfile collector of the node exporter'
        ) from error
    registry = prometheus_client.REGISTRY if registry is None else registry
    gauges: dict[str, Any] = {}

    def write(metrics: Metrics, _step: int) -> None:
        for name, value in metrics.items():
            if name not in gauges:
                gauges[name] = prometheus_client.Gauge(_legal(name), name, ["rank"], registry=registry)
            gauges[name].labels(rank=str(rank)).set(value)

    return write


def write_textfile(path: Path, metrics: Metrics, rank: int) -> None:
    """Replace the file at `path` by the metrics of `rank`, in Prometheus' text format; a reader never sees a
    partial file. Raises `OSError` if it cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(exposition(metrics, rank), encoding="utf-8")
    partial.replace(path)


def exposition(metrics: Metrics, rank: int) -> str:
    """Prometheus' text format, version 0.0.4: every metric is a gauge.

    >>> print(exposition({"gradwire/ratio": 0.25}, rank=3), end="")
    # TYPE gradwire_ratio gauge
    gradwire_ratio{rank="3"} 0.25
    """
    return "".join(
        f'# TYPE {_legal(name)} gauge\n{_legal(name)}{{rank="{rank}"}} {value!r}\n'
        for name, value in metrics.items()
    )


def _legal(name: str) -> str:
    return name.replace("/", "_")


class Listener:
    """Writer of metrics, called at the end of each backward pass; it writes at every n-th one.

    It never raises, because this rank would stop while its peers wait. A target that fails is not called
    again, and the log says so.
    """

    def __init__(self, metrics: Callable[[], Metrics], write: Write, every: int) -> None:
        """Prepare a listener that hands `metrics()` and the step to `write`, at every `every`-th backward
        pass. Raises `ValueError` unless `every` is a whole number from 1 on.
        """
        passes = as_python(every)
        if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
            raise ValueError(f"every={every!r}: expected a number of backward passes, at least 1")
        self._metrics, self._every, self._passes = metrics, passes, 0
        self._write: Write | None = write

    def __call__(self) -> None:
        """Count a backward pass that has ended, and write the metrics if they are due."""
        self._passes += 1
        if self._write is None or self._passes % self._every:
            return
        try:
            metrics = self._metrics()
            self._write(metrics, int(metrics["gradwire/step"]))
        except Exception as error:
            self._write = None
            _LOG.warning("metrics are logged no longer, training goes on: %r", error)
