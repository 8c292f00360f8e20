"""One world of gloo ranks for a run of pytest: scenes run there one after another, when tests ask for them.

A scene is a function of a module, which a test hands over with its arguments: `Ranks`. It returns numbers,
texts, lists of these and the like, or a dataclass of them, whose fields the test reads by name. A scene finds
what it would find on ranks of its own: a default process group of as many ranks as it is for, at most four in
nearly all of them, and nothing of earlier scenes. Random numbers of Python, NumPy and torch begin anew before
each. They are not compared afterwards, as scenes draw from them themselves: `tests/laws` hold that no step
does.

Groups end with a scene, whether it has made them or gradwire. By then gradwire must have got back those that
it has lent to models, unless the scene says that they are lost (`lose_groups`). A scene that leaves anything
else behind fails, too, and says what.

When a rank fails, or is not done in time, the next scene gets a new world. Scenes that kill ranks, or let
ranks wait for each other in vain, need ranks of their own: see `tests.support.ranks`.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import logging
import os
import pickle
import random
import shutil
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ParamSpec, TextIO, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import debug
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from gradwire.comm import groups
from gradwire.recipes.base import REGISTRY
from tests.support.ranks import FOLDER, FORKED, TIMEOUT_S, VARIABLES

GUARD_S = 90.0
"""A rank that is not done with a scene after so long hangs."""

GRACE_S = 5.0
"""Once a rank has failed, others may wait for it in vain, and get so long. So do threads that are to end."""


FOR_GOOD = Counter(
    [
        "hook before steps of all optimizers, from gradwire.step.optimizers",
        "hook after steps of all optimizers, from gradwire.step.optimizers",
        "thread gradwire-tables_0",
    ]
)
"""What is brought into a process once, by the first scene that needs it, and stays."""


P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Order:
    """A scene to run: a pickled call without arguments, and its name for messages. `number` tells its
    connections from those of other scenes.
    """

    call: bytes
    name: str
    ranks: int
    folder: Path
    timeout_s: float = TIMEOUT_S
    grace_s: float = GRACE_S
    number: int = 0


class Ranks:
    """`count` ranks for scenes, which share `folder`: `ranks(scene, argument)` is what `scene(argument)`
    returns on each of them. Equal calls run once.
    """

    def __init__(self, count: int, folder: Path, grace_s: float = GRACE_S) -> None:
        self.count, self._folder, self._grace_s = count, folder, grace_s
        self._found: dict[bytes, list[bytes] | str] = {}

    def __call__(self, scene: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> list[T]:
        """By rank; fails with the traceback of each rank that raised, or with what was left behind."""
        call = partial(scene, *arguments, **named)
        words = [
            *(getattr(each, "__name__", repr(each)) for each in call.args),
            *(f"{name}={value!r}" for name, value in call.keywords.items()),
        ]
        of: Any = call.func  # a scene may have some of its arguments already
        pickled = pickle.dumps(call)
        if pickled not in self._found:
            name = f"{of.__module__}: {of.__qualname__}({', '.join(words)})"
            order = Order(pickled, name, self.count, self._folder, grace_s=self._grace_s)
            self._found[pickled] = WORLD.play(order)
        found = self._found[pickled]
        assert isinstance(found, list), found
        return [pickle.loads(each) for each in found]


# -- where pytest runs


class World:
    """As many ranks as the scenes so far have wanted."""

    def __init__(self) -> None:
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._folder: Path | None = None
        self._port = self._number = 0

    def play(self, order: Order) -> list[bytes] | str:
        """What a scene returned on each rank, pickled; or in one text why there is no such thing."""
        while len(self._ranks) < order.ranks:
            self._start(len(self._ranks))
        found = self._played(order)
        if isinstance(found, str):
            self.end()
        return found

    def _start(self, rank: int) -> None:
        if self._folder is None:
            self._folder, self._port = Path(tempfile.mkdtemp(prefix="world-")), 0
            atexit.register(self.end)
        ours, theirs = FORKED.Pipe()
        process = FORKED.Process(target=_serve, args=(rank, self._port, self._folder, theirs), daemon=True)
        process.start()
        theirs.close()  # so that ours ends with the process
        self._ranks.append((process, ours))
        self._port = ours.recv()

    def _played(self, order: Order) -> list[bytes] | str:
        self._number += 1
        numbered = replace(order, number=self._number)
        returned, failures = self._told(order, numbered)
        if not failures:  # no rank needs another one any more
            left, failures = self._told(order, None)
            failures += [f"rank {rank} has {each}" for rank, each in enumerate(left) if each]
        return "\n".join([order.name, *failures]) if failures else returned

    def _told(self, order: Order, what: Order | None) -> tuple[list[Any], list[str]]:
        """What the order's ranks answer, and failures: with one of those not all have an answer."""
        asked = {connection: rank for rank, (_, connection) in enumerate(self._ranks[: order.ranks])}
        answers: list[Any] = [None] * order.ranks
        failures, deadline_s = list[str](), time.monotonic() + 2 * GUARD_S
        for connection in asked:
            connection.send(what)
        while asked and (ready := wait(list(asked), deadline_s - time.monotonic())):
            for connection in ready:
                rank = asked.pop(connection)
                try:
                    answers[rank], failure = connection.recv()
                except (EOFError, ConnectionError):
                    failure = f"it has ended\n{Path(str(self._folder), f'{rank}.trace').read_text()}"
                if failure:
                    failures.append(f"rank {rank}: {failure}")
                    deadline_s = min(deadline_s, time.monotonic() + order.grace_s)
        return answers, failures or [f"rank {rank} does not answer" for rank in asked.values()]

    def end(self) -> None:
        """Kill all ranks, if there are any; the next scene gets others."""
        if self._folder is None:
            return
        for process, _ in self._ranks:
            process.kill()
        for process, connection in self._ranks:
            process.join()
            connection.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        atexit.unregister(self.end)
        self._ranks, self._folder = [], None


WORLD = World()


# -- where a rank runs


def lose_groups() -> None:
    """For the end of a scene after which a user would start all ranks again.

    gradwire never gets back a group on which a step has failed.
    """
    for group in groups.lent():
        groups.give_back(group)


def _serve(rank: int, port: int, folder: Path, orders: Connection) -> None:
    os.environ.update(VARIABLES)
    with (folder / f"{rank}.out").open("wb") as out:
        os.dup2(out.fileno(), 1)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    orders.send(store.port)
    with (folder / f"{rank}.trace").open("w") as trace, suppress(EOFError):
        faulthandler.enable(trace)  # an aborted rank says where it was, in Python and in all native threads
        with suppress(AttributeError):  # torch has it on some systems alone
            torch._C._set_print_stack_traces_on_fatal_signal(True)
        while True:
            order = orders.recv()
            os.environ[FOLDER] = str(order.folder)
            before = _state()
            orders.send(_in_time(trace, partial(_play, order, rank, store)))
            orders.recv()  # all ranks have returned
            orders.send(_in_time(trace, partial(_leave, before, order.grace_s)))
    os._exit(0)  # an orderly end would wait for peers


def _in_time(trace: TextIO, call: Callable[[], T]) -> tuple[T | None, str]:
    """What it returns, and why it has not."""
    faulthandler.dump_traceback_later(GUARD_S, exit=True, file=trace)
    try:
        return call(), ""
    except BaseException:
        return None, traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()


def _play(order: Order, rank: int, store: dist.Store) -> bytes:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(str(order.number), store),
        rank=rank,
        world_size=order.ranks,
        timeout=timedelta(seconds=order.timeout_s),
    )
    return pickle.dumps(pickle.loads(order.call)())


def _leave(before: Counter[str], grace_s: float) -> str:
    """End all groups, as every rank has returned; what is left then, and has gone, in words."""
    said = _once_quiet(partial(_changes, before), grace_s)
    if said:
        return said
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_meshes()
    said = _once_quiet(_groups, grace_s)
    gc.freeze()  # modules that scenes imported, caches: not to be gone through after each scene
    return said


def _once_quiet(look: Callable[[], str], grace_s: float) -> str:
    """Nothing, as soon as `look` says nothing; what it still says after `grace_s`."""
    deadline_s, pause_s = time.monotonic() + grace_s, 0.01
    gc.collect()
    while (said := look()) and time.monotonic() < deadline_s:
        time.sleep(pause_s)
        pause_s *= 2
        gc.collect()
    return said


def _changes(before: Counter[str]) -> str:
    after = _state()
    more, gone = after - (before | FOR_GOOD), before - after
    if not more and not gone:
        return ""
    return f"left behind {sorted(more.elements())}, and taken away {sorted(gone.elements())}"


def _forget_meshes() -> None:
    """Caches of torch's for DTensors keep their meshes for good, and a mesh keeps its groups."""
    debug._clear_sharding_prop_cache()  # or a result in a later scene could have a mesh of this one
    for each in gc.get_objects():
        if type(each) is DeviceMesh:
            each._pg_registry.clear()


def _groups() -> str:
    """The threads of process groups that have been ended, and live on. Only Linux tells.

    They spin once the other ranks have let go, and would take the cores in the end.
    """
    names = []
    for each in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # it has just ended
            names.append(each.read_text().strip())
    left = sorted(name for name in names if name.startswith(("gloo", "pt_gloo")))
    return f"left behind groups with threads {left}" if left else ""


def _state() -> Counter[str]:
    """What scenes must leave as it was, in words."""
    hooks = {
        "before steps of all optimizers": optimizers._global_optimizer_pre_hooks,
        "after steps of all optimizers": optimizers._global_optimizer_post_hooks,
        "before forward passes of all modules": modules._global_forward_pre_hooks,
        "after forward passes of all modules": modules._global_forward_hooks,
        "before backward passes of all modules": modules._global_backward_pre_hooks,
        "after backward passes of all modules": modules._global_backward_hooks,
    }
    logs = (logging.getLogger(name) for name in (None, "gradwire"))
    return Counter(
        [
            *["group lent by gradwire"] * len(groups.lent()),
            *(f"thread {each.name}" for each in threading.enumerate()),
            *(f"hook {when}, from {each.__module__}" for when, of in hooks.items() for each in of.values()),
            *(f"{handler} of log {each.name}" for each in logs for handler in each.handlers),
            *(f"recipe {name}" for name in REGISTRY),
            *(f"variable {name}={text}" for name, text in os.environ.items()),
            f"folder {Path.cwd()}",
            f"{torch.get_num_threads()} threads of torch's",
            f"numbers of {torch.get_default_dtype()}",
        ]
    )
