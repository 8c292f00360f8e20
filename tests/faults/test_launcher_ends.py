"""However the launcher ends, it leaves no process and no namespace behind."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from gradwire_lab import emulate
from tests.support.command import COMMAND, eventually, gradwire, namespaces, processes

pytestmark = [pytest.mark.network, pytest.mark.process, pytest.mark.rest]
WORKERS = 2
MODES = [mode for mode in ("root", "user") if emulate.why_not(mode) is None]
needs_namespaces = pytest.mark.skipif(
    not MODES, reason=f"no network namespaces here: {emulate.why_not('root')}; {emulate.why_not('user')}"
)


@contextlib.contextmanager
def launched(mode, *command, marker):
    """A launcher whose ranks have started; whatever a failing test leaves is ended by its id."""
    words = ["net", "run", "--workers", str(WORKERS), "--delay", "1ms", "--mode", mode, "--", *command]
    launcher = subprocess.Popen(
        [*COMMAND, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert eventually(lambda: len(ranks_of(marker)) == WORKERS), launcher.poll()
        yield launcher
    finally:
        for pid in processes(marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        launcher.wait(20)
        launcher.stderr.close()


def ranks_of(marker):
    """The ranks among the processes that carry the marker: launchers have it, too."""
    found = []
    for pid in processes(marker):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as environment:
            if any(entry.startswith(b"RANK=") for entry in environment.read().split(b"\0")):
                found.append(pid)
    return found


def homes(pids):
    """The network and process namespaces that these processes live in."""
    return {os.readlink(f"/proc/{pid}/ns/{kind}") for pid in pids for kind in ("net", "pid")}


def gone(marker, inhabited):
    return not processes(marker) and not inhabited & (namespaces("net") | namespaces("pid"))


def unique_duration():
    return f"{1000 + time.time_ns() % 10**6}.5"


# Both kinds of namespaces against the one that gives no warning; the warnings once each.
ENDINGS = [
    *((mode, signal.SIGKILL, -9) for mode in MODES),
    *((mode, signal.SIGINT, 130) for mode in MODES[:1]),
    *((mode, signal.SIGTERM, 143) for mode in MODES[-1:]),
]


@needs_namespaces
@pytest.mark.parametrize(("mode", "number", "code"), ENDINGS)
def test_a_signal_to_the_launcher_ends_everything(mode, number, code):
    marker, names = unique_duration(), named_namespaces()
    with launched(mode, "sleep", marker, marker=marker) as launcher:
        inhabited = homes(ranks_of(marker))
        assert len(inhabited) == WORKERS + 1
        os.kill(launcher.pid, number)
        assert launcher.wait(20) == code
        assert eventually(lambda: gone(marker, inhabited))
    assert named_namespaces() <= names


def named_namespaces():
    """What `ip netns` lists."""
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


def test_kill_9_in_backend_mode_is_noticed_by_the_ranks():
    marker = unique_duration()
    command = [sys.executable, "-c", "import sys, time; time.sleep(float(sys.argv[1]))", marker]
    with launched("backend", *command, marker=marker) as launcher:
        launcher.kill()
        assert eventually(lambda: not processes(marker))


@needs_namespaces
def test_a_failing_rank_ends_the_others_and_is_named():
    marker = unique_duration()
    before = namespaces("net")
    script = 'if [ "$RANK" = 1 ]; then exit 7; fi; exec sleep "$0"'
    done = gradwire("net", "run", "--workers", "3", "--grace", "0.2", "--", "sh", "-c", script, marker)
    assert done.returncode == 7
    assert "rank 1 failed with exit code 7" in done.stderr
    assert processes(marker) == []
    assert namespaces("net") <= before
