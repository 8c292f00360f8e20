"""Compilation of kernels by another process, while training goes on: `python -m gradwire.kernels.background`.

There is one such process on a machine at a time, whoever needs it, because each holds a lock in the cache's
folder. What it has compiled is in the cache, where all processes of the machine find it. A thread would not
do: compiling holds the interpreter lock.
"""

from __future__ import annotations

import fcntl
import logging
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from pathlib import Path

from gradwire.kernels import compiler

_LOG = logging.getLogger("gradwire")

_NICE = 5
"""Priority below that of training. On a machine whose cores are all busy it gets a quarter of one; at 19 it
would get a hundredth, and training would wait for hours."""

PATIENCE_S = 300.0
"""Time in which one more kernel has to come, of whatever subject: the process that holds the lock may compile
those of another run first. Without it, a process that was stopped would hold all others without a limit."""

_LOOK_S = 1.0
"""Time between two looks of the process whether the one that started it is alive."""


class BackgroundCompilation:
    """Compilation of the kernels of `subjects` into the cache `folder`, by another process.

    The process ends with the object, and soon after the process that started it has ended, however that was.
    """

    def __init__(self, subjects: Collection[str], folder: Path, now_s: Callable[[], float]) -> None:
        """Start the process, if no other one compiles. `now_s` reads a clock, in seconds."""
        self._lacking, self._folder, self._now_s = frozenset(subjects), folder, now_s
        self._has_ended = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._changed, self._since_s = -1, 0.0
        """The folder's time at the last look that found more in it, and the time of that look. A start does
        not count: ranks would wait one after the other."""
        weakref.finalize(self, _stop, self._processes, os.getpid())
        self.has_ended()

    def has_ended(self) -> bool:
        """True if nothing more comes: all kernels are in the cache, this machine cannot compile them beside
        training, or none has come for `PATIENCE_S`. That is final, so that ranks whose processes fail at
        different times come to agree.

        A process is started when no other one compiles on this machine.
        """
        if not self._has_ended:
            try:
                self._has_ended = self._look()
            except Exception as error:
                self._fail(repr(error))
        return self._has_ended

    def _look(self) -> bool:
        # Before the look at the cache, to which the process adds kernels until it ends.
        code = self._processes[0].poll() if self._processes else None
        self._lacking = compiler.lacking(self._lacking)
        if (changed := self._folder.stat().st_mtime_ns) != self._changed:
            self._changed, self._since_s = changed, self._now_s()
        if self._lacking:
            if code is None and self._now_s() - self._since_s < PATIENCE_S:
                if not self._processes:
                    self._start()
                return False
            self._fail(
                f"none has come for {PATIENCE_S:.0f} s: the process that compiles may have been stopped"
                if code is None
                else f"exit code {code}"
            )
        _stop(self._processes, os.getpid())
        return True

    def _fail(self, why: str) -> None:
        """Where kernels are compiled instead, all ranks hear of what is wrong."""
        self._has_ended = True
        _LOG.warning(
            "kernels could not be compiled beside training (%s). A step compiles them, for which all ranks "
            "wait; `gradwire warmup` compiles them beforehand",
            why,
        )

    def _start(self) -> None:
        """Start a process, unless another one holds the lock. The lock goes to the process, and ends with it.

        Raises `OSError` where that is not possible.
        """
        lock = os.open(self._folder / "compiling", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The same modules as here, wherever these were found: not those of the working directory first.
            found = os.pathsep.join(place or os.getcwd() for place in sys.path)
            command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), *sorted(self._lacking)]
            self._processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, "PYTHONPATH": found},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=(lock,),
                )
            )
        except BlockingIOError:
            return
        finally:
            os.close(lock)


def _stop(processes: list[subprocess.Popen[bytes]], owner: int) -> None:
    """End `processes`, but only in the process that started them: a forked one may collect a copy."""
    for each in processes if owner == os.getpid() else ():
        each.kill()  # a stopped one would not end otherwise
        each.wait()
    processes.clear()


def _end_after(owner: int) -> None:
    """End this process once `owner`, which has started it, is no longer its parent."""
    never = threading.Event()
    while os.getppid() == owner:
        never.wait(_LOOK_S)
    os._exit(1)


if __name__ == "__main__":
    os.nice(_NICE)
    threading.Thread(target=_end_after, args=(int(sys.argv[1]),), daemon=True).start()
    compiler.prepare(sys.argv[2:])
