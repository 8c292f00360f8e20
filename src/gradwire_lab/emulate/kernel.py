"""Kernel calls that the standard library lacks, code in network namespaces, and iproute2.

Linux gives every *thread* its own network namespace. So a launcher enters a namespace by a short-lived
thread: sockets and processes made by the thread belong there, and the rest of the launcher stays outside.
Such a namespace has no name. It lives as long as a descriptor or a process holds it, and leaves nothing to
clean up.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1
MS_BIND = 4096
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends; a no-op off Linux."""
    if hasattr(_libc, "prctl"):
        _checked(_libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl")


def bind_mount(source: str, target: str) -> None:
    """Show `source` in the place of `target` to this mount namespace."""
    _checked(_libc.mount(source.encode(), target.encode(), None, MS_BIND, None), f"mount {target}")


def _in_thread(work: Callable[[], T]) -> T:
    result: list[T] = []
    error: list[BaseException] = []

    def body() -> None:
        try:
            result.append(work())
        except BaseException as caught:
            error.append(caught)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    if error:
        raise error[0]
    return result[0]


def new_netns() -> int:
    """A descriptor of a fresh network namespace, which lives while this is open or a process is inside."""

    def work() -> int:
        _checked(_libc.unshare(CLONE_NEWNET), "unshare(CLONE_NEWNET)")
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    return _in_thread(work)


def enter_netns(netns: int) -> None:
    """Move this thread, and everything it starts from now on, into the namespace."""
    _checked(_libc.setns(netns, CLONE_NEWNET), "setns")


def in_netns(netns: int, work: Callable[[], T]) -> T:
    """The result of `work()`, run by a thread inside the namespace; processes it starts are born there."""

    def inside() -> T:
        enter_netns(netns)
        return work()

    return _in_thread(inside)


# Ordinary users often lack the sbin directories in their PATH, although they may run the programs there.
_SBIN = "/usr/sbin:/sbin:/usr/local/sbin:/usr/bin:/bin"


def find(tool: str) -> str | None:
    """Path of `ip`, `tc` or `unshare`, or None."""
    return shutil.which(tool) or shutil.which(tool, path=_SBIN)


class ToolFailed(OSError):
    """`ip` or `tc` refused; the text is what it printed."""


def batch(tool: str, lines: Sequence[str]) -> None:
    """Run many `ip` or `tc` commands by one process, stopping at the first that fails."""
    path = find(tool)
    if path is None:
        raise ToolFailed(f"{tool} (iproute2) is not installed")
    text = "".join(line + "\n" for line in lines)
    done = subprocess.run([path, "-batch", "-"], input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ToolFailed(f"{tool}: {done.stderr.strip() or done.returncode}")
