"""Runs all settings side by side, alternating, and returns what was measured."""

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gradwire.measure.cache import cores, processor
from gradwire.recipes import recipe
from gradwire.version import __version__
from gradwire_lab.bench.measurement import Setting
from gradwire_lab.bench.peers import check_peer
from gradwire_lab.bench.process_set import BenchNetwork
from gradwire_lab.bench.rows import rows
from gradwire_lab.bench.settings import BenchEntry, Settings, stock
from gradwire_lab.bench.statistics import mixed
from gradwire_lab.bench.trainer import policy_of
from gradwire_lab.workloads.catalogue import workload

WARMUP = 25
"""Steps before any is counted."""
MORE_WARMUP, MOST_WARMUP = 10, 125
"""Steps by which warm-up goes on while a recipe measures or tries something out; and the most in all."""
MARGIN = 0.1
"""Share of the free memory to keep free: training takes more than set-up."""


def available_bytes() -> int | None:
    """Memory that could be taken without swapping; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else None


class TooLarge(ValueError):
    """The settings do not fit into this machine's memory."""


class Room:
    """Monitor of memory while `settings` settings, whose workers have all started, are set up one by one.

    A setting that is swapped out or killed would measure nothing.
    """

    def __init__(self, settings: int, available: Callable[[], int | None] = available_bytes) -> None:
        self._available, self._left = available, settings
        self._first = self._before = available()
        self._most = 0

    def after_one(self) -> None:
        """Note that another setting is set up. Raises `TooLarge` if the remaining ones will not fit, each as
        large as the largest so far.
        """
        now, self._left = self._available(), self._left - 1
        if now is None or self._first is None or self._before is None:
            return
        self._most, self._before = max(self._most, self._before - now), now
        left = self._left
        if left and self._most * left > now - MARGIN * self._first:
            raise TooLarge(
                f"all ranks of a setting take about {self._most / 1e9:.1f} GB, and {now / 1e9:.1f} GB are "
                f"left for {left} more settings: take fewer of them, or fewer workers"
            )


def machine() -> dict[str, Any]:
    """Processor, cores, memory (bytes), versions and the date (UTC)."""
    return {
        "processor": processor(),
        "cores": cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "gradwire": __version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


Say = Callable[[str], None]
MakeSetting = Callable[[BenchEntry], Setting]


def check(settings: Settings) -> None:
    """Raise `ValueError`, or `OSError` for data that cannot be read, where something could not be trained."""
    task = settings.task
    data = None if task.data is None else Path(task.data)
    found = workload(task.workload, data=data, batch_size=task.batch_size)
    found.batches(0, settings.network.workers, task.seed)  # first: a file of the user's may register recipes
    for entry in settings.entries:
        _check_entry(entry, sharded=task.sharded)
    if task.policy is not None:
        policy_of(task.policy)


def _check_entry(entry: BenchEntry, *, sharded: bool) -> None:
    if sharded:
        from gradwire_lab.bench import sharded as of_fsdp2

        of_fsdp2.check(entry)
    elif entry.kind == "peer":
        check_peer(entry)
    elif entry.gather is not None:
        raise ValueError(f"recipe {entry.name!r}: under DDP nothing is gathered; a pair goes with --sharded")
    else:
        recipe(entry.name)


def run(
    settings: Settings, network: BenchNetwork, say: Say, make: MakeSetting | None = None
) -> dict[str, Any]:
    """Measure every entry and both bounds. Returns the JSON document (settings, machine, rows).

    Arguments are those of `started`, and so are the errors.
    All process sets are alive at once and take turns: idle ones block in a read. Turning the order
    from round to round and pairing within rounds keeps the machine's slow drifts out of the ratios.
    """
    with started(settings, network, say, make) as running:
        warmup = measure(running, settings, say)
        for setting in running:
            if setting.measured.entry.kind != "bound":
                say(f"{setting.measured.entry.name}: comparing replicas, evaluating")
                setting.check()
                setting.evaluate()
        measured = [setting.measured for setting in running]
    return {
        "settings": {**settings.as_dict(), "warmup": warmup, "workload_facts": _workload_facts(running)},
        "machine": machine(),
        **rows(measured, settings.network.workers, stock(settings.as_dict())),
    }


@contextmanager
def started(
    settings: Settings, network: BenchNetwork, say: Say, make: MakeSetting | None = None
) -> Iterator[list[Setting]]:
    """Context in which every setting runs: its processes are started and set up; at the exit they are ended.

    Args:
        settings: entries to start, and their task.
        network: the emulated network that they share.
        say: is called with lines about the progress.
        make: starts the processes of an entry; by default worker processes in `network`.

    Yields the settings, in the order of their entries. Raises `TooLarge` if they do not fit into memory.
    """
    start = make or _starter(settings, network)
    with ExitStack() as stack:
        running: list[Setting] = []
        for entry in settings.every_entry:
            say(f"starting {entry.name}")
            running.append(start(entry))
            stack.callback(running[-1].end)
        for setting in running:
            setting.greet()
        room = Room(len(running))
        for setting in running:
            say(f"setting up {setting.measured.entry.name}")
            setting.setup(settings.task.seed)
            room.after_one()
        yield running


def measure(running: list[Setting], settings: Settings, say: Say) -> int:
    """Warm up, then alternate among the settings, as the schedule of `settings` says; `say` gets progress in
    words. Returns how many steps of each setting are not counted.
    """
    schedule = settings.schedule
    warmup = WARMUP if schedule.warmup is None else schedule.warmup
    _warm_up(running, warmup, say)
    while schedule.warmup is None and warmup < MOST_WARMUP and not all(each.settled for each in running):
        _warm_up(running, MORE_WARMUP, say)
        warmup += MORE_WARMUP
    for number in range(schedule.rounds):
        for setting in mixed(running, number):
            if setting.alive:
                say(f"round {number + 1}/{schedule.rounds}: {setting.measured.entry.name}")
                setting.train(schedule.steps)
    return warmup


def _warm_up(running: list[Setting], steps: int, say: Say) -> None:
    for setting in running:
        if steps and setting.alive:
            say(f"{setting.measured.entry.name}: {steps} warm-up steps")
            setting.train(steps, counted=False)


def _starter(settings: Settings, network: BenchNetwork) -> MakeSetting:
    def start(entry: BenchEntry) -> Setting:
        return Setting(entry, settings.task, network, settings.network.workers, settings.schedule.timeout_s)

    return start


def _workload_facts(running: list[Setting]) -> dict[str, Any]:
    """The workload's facts about itself, from the first setting that got as far as its set-up."""
    for setting in running:
        if setting.measured.setup:
            return {
                "parameters": setting.measured.setup.get("parameters"),
                **(setting.measured.setup.get("workload") or {}),
            }
    return {}
