"""Compilation of kernels by another process, while training goes on: `python -m gradwire.kernels.background`.

There is one such process on a machine at a time, whoever needs it, because each holds a lock in the cache's
folder. What it has compiled is in the cache, where all processes of the machine find it. A thread would not
do: compiling holds the interpreter lock.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import weakref
from collections.abc import Collection
from pathlib import Path

from gradwire.kernels import compiler

_NICE = 5
"""Priority below that of training. On a machine whose cores are all busy it gets a quarter of one; at 19 it
would get a hundredth, and training would wait for hours."""


class BackgroundCompilation:
    """Compilation of the kernels of `subjects` into the cache `folder`, by another process.

    The process ends with the object, and at the latest when this one exits.
    """

    def __init__(self, subjects: Collection[str], folder: Path) -> None:
        self._lacking, self._lock = frozenset(subjects), folder / "compiling"
        self._processes: list[subprocess.Popen[bytes]] = []
        weakref.finalize(self, _stop, self._processes, os.getpid())
        self.has_ended()

    def has_ended(self) -> bool:
        """True if nothing more comes: all kernels are in the cache, or this machine cannot compile them
        beside training. A process is started when no other one compiles on this machine.
        """
        try:
            self._lacking = compiler.lacking(self._lacking)
            if self._lacking and not self._processes:
                self._start()
                return False
        except Exception:  # where it is compiled instead, all ranks hear of what is wrong
            return True
        if self._lacking and self._processes[0].poll() is None:
            return False
        _stop(self._processes, os.getpid())
        return True

    def _start(self) -> None:
        """Start a process, unless another one holds the lock. The lock goes to the process, and ends with it.

        Raises `OSError` where that is not possible.
        """
        lock = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The same modules as here, wherever these were found.
            found = os.pathsep.join(place or os.getcwd() for place in sys.path)
            command = [sys.executable, "-m", __name__, *sorted(self._lacking)]
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
        each.terminate()
        each.wait()
    processes.clear()


if __name__ == "__main__":
    os.nice(_NICE)
    compiler.prepare(sys.argv[1:])
