"""Ranks forked from a process that has imported what they need, which takes longer than many a run."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any, cast

from gradwire.emulate.kernel import die_with_parent, enter_netns

_IS_LINUX = sys.platform == "linux"
# Elsewhere system libraries do not like to be forked.
_CONTEXT = multiprocessing.get_context("forkserver") if _IS_LINUX else multiprocessing.get_context("spawn")


def prepare(*modules: str) -> None:
    """Begin to import `modules` in the process that ranks will be forked from; returns at once.

    To be called before the first fork. Whoever forks without gets ranks that import by themselves.
    """
    if _IS_LINUX:
        _CONTEXT.set_forkserver_preload(list(modules))
        forkserver.ensure_running()


@dataclass(frozen=True)
class Birth:
    """What a new rank becomes before it calls anything: its environment, its cores, its network.

    Without `netns`, the delaying process group takes the place of gloo. `output` receives what it prints.
    """

    variables: Mapping[str, str]
    cores: frozenset[int]
    netns: Any
    output: Any

    def happen(self) -> None:
        """In the new process."""
        die_with_parent()
        os.setsid()  # so that Ctrl-C reaches the launcher only
        output = self.output.detach()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(self.variables)
        if self.cores:
            os.sched_setaffinity(0, self.cores)
        if self.netns is not None:
            enter_netns(self.netns.detach())
            return
        from gradwire.emulate.shim import take_the_place_of_gloo

        take_the_place_of_gloo()


class Forked:
    """A forked rank, as far as needed like a `subprocess.Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        assert process.pid is not None, "it has been started"
        self.pid: int = process.pid

    def poll(self) -> int | None:
        """The exit code once it has ended; minus the signal's number if one ended it."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, cast(float, timeout))
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """To this process alone; none if it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)


def fork(
    target: str,
    descriptors: Sequence[int],
    *,
    variables: Mapping[str, str],
    cores: set[int],
    netns: int | None,
    output: int,
) -> Forked:
    """A process that calls `target` ("module:function") with copies of the file `descriptors`."""

    def copied(descriptor: int) -> Any:
        return _Copied(descriptor)

    birth = Birth(dict(variables), frozenset(cores), None if netns is None else copied(netns), copied(output))
    process = _CONTEXT.Process(
        target=_live, args=(target, birth, [copied(each) for each in descriptors]), name=target, daemon=True
    )
    process.start()
    return Forked(process)


class _Copied:
    """A descriptor that is copied into the new process when it is pickled for it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __reduce__(self) -> Any:
        return _itself, (DupFd(self._descriptor),)


def _itself(copy: Any) -> Any:
    return copy


def _live(target: str, birth: Birth, descriptors: Sequence[Any]) -> None:
    birth.happen()
    module, _, name = target.partition(":")
    getattr(import_module(module), name)(*(each.detach() for each in descriptors))
