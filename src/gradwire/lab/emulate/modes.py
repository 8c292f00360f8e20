"""Which of the three ways of making a network slow is possible here, found out by trying."""

import os
import subprocess
import sys
from functools import cache

from gradwire.lab.emulate.tools import find

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
    """The mode to use: the requested one, or the first that is possible. A delaying backend is said aloud."""
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
