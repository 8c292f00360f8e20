"""Ranks forked from a process that has already imported their modules: importing takes longer than many runs.

As with all of `multiprocessing`, a rank runs the main module of its launcher once more, under another name.
So a script needs its `if __name__ == "__main__"`, and ranks may not start `multiprocessing` processes.
"""

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
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess, parent_process
from multiprocessing.reduction import DupFd
from threading import Thread
from typing import Any, cast

from gradwire_lab.emulate.kernel import enter_netns
from gradwire_lab.emulate.link import WIRE_VARIABLE

_IS_LINUX = sys.platform == "linux"
# Elsewhere system libraries do not like to be forked.
_CONTEXT = multiprocessing.get_context("forkserver") if _IS_LINUX else multiprocessing.get_context("spawn")


def prepare_ranks(*modules: str) -> None:
    """Begin to import `modules` in the process from which ranks are forked; returns at once.

    Call it once, before the first fork: later calls change nothing. Without it, and on systems without such a
    process, ranks import these modules themselves.
    """
    if _IS_LINUX:
        _CONTEXT.set_forkserver_preload(list(modules))
        forkserver.ensure_running()


@dataclass(frozen=True)
class Birth:
    """Environment, cores and network of a new rank, set before it calls anything.

    If the environment names a wire, the delaying process group replaces gloo. `output` receives what the rank
    prints.
    """

    variables: Mapping[str, str]
    cores: frozenset[int]
    netns: Any
    output: Any

    def happen(self) -> None:
        """Take them on; called in the new process."""
        os.setsid()  # so that Ctrl-C reaches the launcher only
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output = self.output.detach()
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        os.environ.clear()
        os.environ.update(self.variables)
        if self.cores:
            os.sched_setaffinity(0, self.cores)
        if self.netns is not None:
            netns = self.netns.detach()
            enter_netns(netns)
            os.close(netns)
        if WIRE_VARIABLE in self.variables:
            from gradwire_lab.emulate.shim import take_the_place_of_gloo

            take_the_place_of_gloo()
        Thread(target=_end_with_launcher, daemon=True).start()


def _end_with_launcher() -> None:
    """Kill this rank when the launcher has ended. Blocks until then.

    The launcher is not this process's parent, but it alone holds the other end of the sentinel's pipe.
    """
    launcher = parent_process()
    assert launcher is not None, "only a forked rank has one"
    wait([launcher.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


class Forked:
    """A forked rank, as far as needed like a `subprocess.Popen`."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process
        self._code: int | None = None
        assert process.pid is not None, "it has been started"
        self.pid: int = process.pid

    def poll(self) -> int | None:
        """The exit code once it has ended; minus the signal's number if one ended it."""
        if self._code is None and (code := self._process.exitcode) is not None:
            self._code = code
            self._process.close()  # which holds two descriptors
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        if self._code is None:
            self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, cast(float, timeout))
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to this process alone; does nothing if it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
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
    """Fork a process that calls a function.

    Args:
        target: "module:function".
        descriptors: file descriptors, of which the function gets copies.
        variables: the environment of the process.
        cores: processor cores on which it may run.
        netns: descriptor of its network namespace; `None` stays in the present one.
        output: descriptor for standard output and error.

    Raises `EOFError` or `OSError` if the process to fork from has ended.
    """
    home = None if netns is None else _Copied(netns)
    birth = Birth(dict(variables), frozenset(cores), home, _Copied(output))
    copies = [_Copied(each) for each in descriptors]
    process = _CONTEXT.Process(target=_live, args=(target, birth, copies), name=target, daemon=True)
    process.start()
    return Forked(process)


class _Copied:
    """A descriptor that pickling copies into the new process."""

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
