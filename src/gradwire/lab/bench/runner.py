"""Runs all settings side by side, alternating, and returns what was measured."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from gradwire.lab.bench.entries import Entry
from gradwire.lab.bench.machine import machine
from gradwire.lab.bench.memory import Room
from gradwire.lab.bench.peers import check_peer
from gradwire.lab.bench.policy import policy_of
from gradwire.lab.bench.process_set import Network
from gradwire.lab.bench.rows import rows
from gradwire.lab.bench.setting import Setting
from gradwire.lab.bench.settings import Settings
from gradwire.lab.bench.statistics import mixed
from gradwire.lab.workloads import workload
from gradwire.recipes import recipe

Say = Callable[[str], None]

MakeSetting = Callable[[Entry], Setting]


def check(settings: Settings) -> None:
    """Raise `ValueError`, or `OSError` for data that cannot be read, where something could not be trained."""
    task = settings.task
    for entry in settings.entries:
        check_peer(entry) if entry.kind == "peer" else recipe(entry.name)
    if task.policy is not None:
        policy_of(task.policy)
    data = None if task.data is None else Path(task.data)
    found = workload(task.workload, data=data, batch_size=task.batch_size)
    found.batches(0, settings.network.workers, task.seed)


def run(settings: Settings, network: Network, say: Say, make: MakeSetting | None = None) -> dict[str, Any]:
    """Measure every entry and both bounds; the JSON document of the issue (settings, machine, rows).

    All process sets are alive at once and take turns: idle ones block in a read. Turning the order
    from round to round and pairing within rounds keeps the machine's slow drifts out of the ratios.
    """
    with everyone(settings, network, say, make) as everybody:
        measure(everybody, settings, say)
        for setting in everybody:
            if setting.measured.entry.kind != "bound":
                say(f"{setting.measured.entry.name}: comparing replicas, evaluating")
                setting.check()
                setting.evaluate()
        measured = [setting.measured for setting in everybody]
    return {
        "settings": {**settings.as_dict(), "workload_facts": _workload_facts(everybody)},
        "machine": machine(),
        **rows(measured, settings.network.workers),
    }


@contextmanager
def everyone(
    settings: Settings, network: Network, say: Say, make: MakeSetting | None = None
) -> Iterator[list[Setting]]:
    """Start and set up every setting; end them all on the way out, whatever happened.

    `TooLarge` if they do not fit into memory.
    """
    start = make or _starter(settings, network)
    with ExitStack() as stack:
        everybody: list[Setting] = []
        for entry in settings.every_entry:
            say(f"starting {entry.name}")
            everybody.append(start(entry))
            stack.callback(everybody[-1].end)
        for setting in everybody:
            setting.greet()
        room = Room(len(everybody))
        for setting in everybody:
            say(f"setting up {setting.measured.entry.name}")
            setting.setup(settings.task.seed)
            room.after_one()
        yield everybody


def measure(everybody: list[Setting], settings: Settings, say: Say) -> None:
    """Warm up, then alternate."""
    schedule = settings.schedule
    if schedule.warmup:
        for setting in everybody:
            say(f"{setting.measured.entry.name}: {schedule.warmup} warm-up steps")
            setting.train(schedule.warmup, counted=False)
    for number in range(schedule.rounds):
        for setting in mixed(everybody, number):
            if setting.alive:
                say(f"round {number + 1}/{schedule.rounds}: {setting.measured.entry.name}")
                setting.train(schedule.steps)


def _starter(settings: Settings, network: Network) -> MakeSetting:
    def start(entry: Entry) -> Setting:
        return Setting(entry, settings.task, network, settings.network.workers, settings.schedule.timeout_s)

    return start


def _workload_facts(everybody: list[Setting]) -> dict[str, Any]:
    """What the workload says about itself, from the first setting that got so far."""
    for setting in everybody:
        if setting.measured.setup:
            return {
                "parameters": setting.measured.setup.get("parameters"),
                **(setting.measured.setup.get("workload") or {}),
            }
    return {}
