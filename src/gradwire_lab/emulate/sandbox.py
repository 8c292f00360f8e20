"""Possible ways to slow down a network on this machine, and a sandbox in which no process outlives its
command.

The command runs itself again as the first process of its own process namespace. When that process ends, for
any reason, the kernel kills every other process in the namespace, and the network namespaces vanish with the
processes that held them. `kill -9` of the user's process has the same effect: the kernel is asked to kill the
child with its parent.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

from gradwire_lab.emulate.kernel import die_with_parent, find
from gradwire_lab.emulate.topology import show_rank_names

MODES = ("root", "user", "backend")
# Everything a network needs, in one shell line; it vanishes with the namespace it is tried in.
_TRIAL = (
    "ip link add t0 type veth peer name t1 && "
    "ip link set t0 gso_max_size 20000 && "
    "tc qdisc add dev t0 root tbf rate 10mbit burst 20k limit 1m && "
    "echo 1 > /proc/sys/net/ipv4/ip_forward"
)


def sandbox_command(mode: str) -> list[str]:
    """The command prefix that runs a program in the sandbox of `root` or `user` mode."""
    unshare = find("unshare") or "unshare"
    user = ["--user", "--map-root-user"] if mode == "user" else []
    return [unshare, *user, "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc"]


@cache
def why_not(mode: str) -> str | None:
    """The reason why a mode is not possible on this machine, or None if it is."""
    if mode == "backend":
        return None
    if not sys.platform.startswith("linux"):
        return "network namespaces exist on Linux only"
    missing = [tool for tool in ("unshare", "ip", "tc") if find(tool) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (Debian packages iproute2 and util-linux)"
    if mode == "root" and os.geteuid() != 0:
        return "not running as root"
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    trial = [*sandbox_command(mode), "unshare", "--net", "sh", "-c", _TRIAL]
    try:
        done = subprocess.run(
            trial, capture_output=True, text=True, timeout=20, check=False, env={**os.environ, "PATH": path}
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the trial failed: {error}"
    if done.returncode == 0:
        return None
    return f"the trial failed: {done.stderr.strip() or f'exit code {done.returncode}'}"


def choose(mode: str = "auto") -> str:
    """The mode to use: the requested one, or the first that is possible. Prints why, if that is `backend`."""
    if mode not in ("auto", *MODES):
        raise ValueError(f"mode={mode!r}: must be one of auto, {', '.join(MODES)}")
    if mode == "auto":
        mode = next(candidate for candidate in MODES if why_not(candidate) is None)
        if mode == "backend":
            print(
                "gradwire net: no network namespaces here "
                f"(root: {why_not('root')}; user: {why_not('user')}). "
                "A delaying process group slows the collectives instead; there are no interface counters.",
                file=sys.stderr,
            )
        return mode
    reason = why_not(mode)
    if reason is not None:
        raise ValueError(f"mode={mode!r} is not possible here: {reason}. Try mode='auto'")
    return mode


INSIDE = "GRADWIRE_SANDBOX"
"""Environment variable that names the mode inside of the sandbox."""

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
PATIENCE_S = 20.0
"""The time that a run has to end after a signal, in seconds."""


def enter(mode: str = "auto") -> str:
    """Make the current command run where it may build networks; returns `root`, `user` or `backend`.

    The first call runs the same command line again inside the sandbox, waits for it and exits with its code.
    So code before the call runs twice: call early. Inside, and in backend mode, it returns at once, any
    number of times. Raises `ValueError`, with the reason, if the requested mode is not possible.
    """
    inside = os.environ.get(INSIDE)
    if inside is not None:
        if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            _behave_as_first_process()
        return "backend" if mode == "backend" else inside
    chosen = choose(mode)
    if chosen != "backend":
        raise SystemExit(_run_again(chosen))
    return chosen


def _behave_as_first_process() -> None:
    """Install handlers of signals, and end with the parent process.

    The kernel drops signals to the first process of a namespace unless it has a handler for them. Signals
    within a second of the last one are ignored: Ctrl-C arrives twice.
    """
    die_with_parent()
    with contextlib.suppress(OSError):  # names only; without them gloo warns and goes on
        show_rank_names()
    last_s = float("-inf")

    def once(number: int, frame: FrameType | None) -> None:
        # Ctrl-C reaches the whole foreground group and is forwarded as well: the echo must not interrupt
        # cleanup.
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s < 1.0:
            return
        last_s = now_s
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    _handle(once)


def _handle(handler: Callable[[int, FrameType | None], None]) -> None:
    """Take all signals that are not ignored: `nohup` and background jobs must stay what they are."""
    for number in _FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _same_command() -> list[str]:
    words = sys.orig_argv[1:]
    if not words or sys.argv[0] in ("", "-"):
        raise ValueError("a program typed or piped into python cannot be run again: save it to a file")
    return [sys.executable, *words]


def _run_again(mode: str) -> int:
    """Exit code of the same command inside of the sandbox."""
    launcher = os.getpid()

    def bind_to_launcher() -> None:
        die_with_parent()
        if os.getppid() != launcher:  # it died before the kernel was asked
            os._exit(128 + signal.SIGKILL)

    sys.stdout.flush()
    sys.stderr.flush()
    child = subprocess.Popen(
        [*sandbox_command(mode), *_same_command()],
        env={**os.environ, INSIDE: mode},
        preexec_fn=bind_to_launcher,
        close_fds=False,
    )
    return _wait_and_forward(child)


def _wait_and_forward(child: "subprocess.Popen[Any]") -> int:
    """Exit code of the sandbox; signals to this process go to the one inside, and after a while harder."""
    received: list[int] = []
    deadline_s: float | None = None
    killed = False

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal deadline_s, killed
        received.append(number)
        deadline_s = time.monotonic() + PATIENCE_S
        inner = _only_child(child.pid)
        # A child without a handler has built nothing yet, and the kernel drops its signals: kill it.
        if inner is None or not minds(inner, number) or len(received) > 2:
            killed = True
            child.kill()
        else:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(inner, number)

    _handle(forward)
    while True:
        try:
            # Python resumes a wait after a signal, and does not see one that comes just before it. So each
            # wait is short.
            code = child.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            if deadline_s is not None and time.monotonic() > deadline_s:
                killed = True
                child.kill()
            continue
        if code < 0:
            return 128 + (received[0] if killed else -code)
        return code


def minds(pid: int, number: int) -> bool:
    """True if the process handles or ignores a signal.

    >>> minds(os.getpid(), signal.SIGINT), minds(os.getpid(), signal.SIGKILL)
    (True, False)
    """
    minded = 0
    with (
        contextlib.suppress(OSError),
        open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as status,
    ):
        for line in status:
            if line.startswith(("SigIgn:", "SigCgt:")):
                minded |= int(line.split()[1], 16)
    return bool(minded >> (number - 1) & 1)


def _only_child(pid: int) -> int | None:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", encoding="ascii", errors="replace") as stat:
                    fields = stat.read().rpartition(")")[2].split()
            except OSError:
                continue  # it ended while we looked
            if int(fields[1]) == pid:
                return int(entry)
    return None
