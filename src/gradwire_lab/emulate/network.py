"""Emulated network of ranks on this machine, their processes, and one command run on all of them."""

import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from gradwire.environment import RANKS_HERE
from gradwire_lab.emulate.fork import Forked, fork
from gradwire_lab.emulate.kernel import in_netns
from gradwire_lab.emulate.link import Counters, EmulatedLink, WireFile
from gradwire_lab.emulate.ranks import (
    backend_variables,
    cores_of,
    namespace_variables,
    node_variables,
    on_cores_of,
    sharing,
    through_shim,
)
from gradwire_lab.emulate.topology import INTERFACE, LARGEST_WORLD, Topology, address

Process = subprocess.Popen[Any] | Forked
DEFAULT_PORT = 29500
_GRACE_S = 2.0


class EmulatedNetwork:
    """Emulated network of ranks behind slow links, for as long as the `with` block lasts.

    In the modes "root" and "user" every node is a network namespace, and its link is slowed. In the mode
    "backend" ranks share the machine's loopback, and a process group delays their messages. Only Python
    programs can run there, and there are no counters. Several sets of workers may use the network at once,
    each with its own `master_port`. Leaving the block ends all processes that were started through it.

    Args:
        workers: number of ranks.
        link: rate and delay of every link.
        mode: the mode that `enter` returned.
        nodes: number of nodes; by default every rank is a node. Ranks are numbered node by node. Ranks of a
            node share its link, and reach each other over a loopback that is not slowed. The mode "backend"
            has no nodes.
        servers: so many of the last nodes have no limit of rate: a server's link is not what is slow.

    Raises `ValueError` for a number of workers, a mode or a number of nodes that cannot be.

    Example::

        with EmulatedNetwork(2, EmulatedLink(200e6), enter()) as network:
            ranks = [network.popen(rank, [sys.executable, "train.py"]) for rank in range(2)]
    """

    def __init__(
        self, workers: int, link: EmulatedLink, mode: str, nodes: int | None = None, *, servers: int = 0
    ) -> None:
        if not 1 <= workers <= LARGEST_WORLD:
            raise ValueError(f"workers={workers}: must lie between 1 and {LARGEST_WORLD}")
        if mode not in ("root", "user", "backend"):
            raise ValueError(f"mode={mode!r}: must be root, user or backend, as returned by enter()")
        check_nodes(nodes, workers)
        if (nodes is not None or servers) and mode == "backend":
            raise ValueError(
                f"nodes={nodes}, servers={servers}: mode backend slows every rank by itself; nodes need "
                "network namespaces"
            )
        self.workers, self.mode = workers, mode
        self.nodes = workers if nodes is None else nodes
        self.per_node = workers // self.nodes
        self.link = link
        self._processes: list[Process] = []
        self._topology: Topology | None = None
        self._wire: WireFile | None = None
        self._default_port = DEFAULT_PORT
        if mode == "backend":
            self._wire = WireFile.create(link)
            self._default_port = free_port()
        else:
            self._topology = Topology(self.nodes, link, servers)

    def popen(
        self,
        rank: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        master_port: int | None = None,
        **popen_kwargs: Any,
    ) -> "subprocess.Popen[Any]":
        """Start the program `argv` as `rank`; like `subprocess.Popen`, with the rank's variables added to
        `env`. `master_port` is the port at which its ranks meet.

        The process has its own share of the cores. It leads its own session, so that Ctrl-C reaches the
        launcher only and all of its children can be ended. Raises `ValueError` in backend mode if the program
        is not Python.
        """
        self._check(rank)
        base = dict(os.environ if env is None else env)
        popen_kwargs.setdefault("start_new_session", True)
        port = self._default_port if master_port is None else master_port

        variables = self._variables(base, rank, port)

        def start(command: Sequence[str]) -> "subprocess.Popen[Any]":
            with on_cores_of(rank, self.workers):
                return subprocess.Popen(command, env=variables, **popen_kwargs)

        if self._topology is None:
            process = start(through_shim(argv))
        else:
            process = in_netns(self._topology.nodes[rank // self.per_node], lambda: start(argv))
        self._processes.append(process)
        return process

    def fork(
        self, rank: int, target: str, descriptors: Sequence[int], *, output: int, master_port: int
    ) -> Forked:
        """Call `target` ("module:function") as `rank`, with copies of the file `descriptors`.

        The process is forked from one that has imported its modules (`fork.py`). Otherwise it is like that of
        `popen`. Its output goes to the file descriptor `output`.
        """
        self._check(rank)
        forked = fork(
            target,
            descriptors,
            variables=self._variables(os.environ, rank, master_port),
            cores=cores_of(rank, self.workers),
            netns=None if self._topology is None else self._topology.nodes[rank // self.per_node],
            output=output,
        )
        self._processes.append(forked)
        return forked

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.workers:
            raise ValueError(f"rank={rank}: must lie between 0 and {self.workers - 1}")

    def _variables(self, base: Mapping[str, str], rank: int, port: int) -> dict[str, str]:
        """Environment of a rank: `base`, and the variables by which it finds the others at `port`."""
        if self._topology is None:
            assert self._wire is not None
            variables = backend_variables(base, rank, self.workers, port, self._wire.path)
        else:
            variables = namespace_variables(base, rank, self.workers, port, address(0), INTERFACE)
            variables |= node_variables(rank, self.workers, self.per_node)
        return {**variables, RANKS_HERE: str(sharing(self.workers))}

    def counters(self) -> list[Counters] | None:
        """Bytes at every node's interface since the network exists; `None` in backend mode.

        If a rank is alone on its node, the interface is its own.
        """
        return None if self._topology is None else self._topology.counters()

    def reshape(self, link: EmulatedLink) -> None:
        """Change rate and delay for all ranks while processes run."""
        if self._topology is not None:
            self._topology.reshape(link)
        else:
            assert self._wire is not None
            self._wire.write(link)
        self.link = link

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what still runs (SIGTERM, two seconds, SIGKILL) and take the network down."""
        try:
            end_all(self._processes)
        finally:
            if self._topology is not None:
                self._topology.close()
            if self._wire is not None:
                self._wire.close()


def check_nodes(nodes: int | None, workers: int) -> None:
    """Raise `ValueError` for nodes that `workers` ranks do not fill evenly."""
    if nodes is not None and (nodes < 1 or workers % nodes != 0):
        raise ValueError(f"nodes={nodes}: {workers} workers cannot be shared out evenly")


def end_all(processes: Sequence[Process], grace_s: float = _GRACE_S) -> None:
    """End the processes that still run, with their sessions; returns when all of them have been reaped."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        running = [process for process in processes if process.poll() is None]
        for process in running:
            _signal_family(process, number)
        deadline_s = time.monotonic() + grace_s
        for process in running:
            try:
                process.wait(timeout=max(deadline_s - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                continue


def _signal_family(process: Process, number: int) -> None:
    try:
        # Only we reap our processes, so the id of one cannot belong to another process yet. Forked ones are
        # reaped by the fork server; `poll` has just found this one alive.
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
    except ProcessLookupError:
        pass  # it ended by itself meanwhile


def free_port() -> int:
    """A port that no process on this machine listens on right now.

    It is below the kernel's ports for connections: those of a rank's namespace are not visible here. Raises
    `OSError` if a hundred ports are taken.
    """
    for port in random.SystemRandom().sample(range(10_000, 32_768), 100):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise OSError("none of a hundred ports is free")


_POLL_S = 0.05


@dataclass(frozen=True)
class RunOutcome:
    """The end of a run: exit codes as a shell reports them, and the first rank that failed, if any did."""

    exit_codes: tuple[int, ...]
    failed_rank: int | None
    seconds_s: float

    @property
    def exit_code(self) -> int:
        """The failed rank's code, or 0."""
        return 0 if self.failed_rank is None else self.exit_codes[self.failed_rank]


def shell_code(returncode: int) -> int:
    """`subprocess` counts a death by signal n as -n, a shell as 128 + n."""
    return returncode if returncode >= 0 else 128 - returncode


def run_on_all(network: EmulatedNetwork, argv: Sequence[str], grace_s: float = 5.0) -> RunOutcome:
    """Start `argv` on every rank and wait; when a rank fails, the others are ended after `grace_s`.

    The grace is for them to notice the failure, and to say so themselves.
    """
    start_s = time.monotonic()
    ranks = [network.popen(rank, argv) for rank in range(network.workers)]
    failed = _wait(ranks, None)
    if failed is not None:
        _wait(ranks, time.monotonic() + grace_s)
        end_all(ranks)
    codes = tuple(shell_code(process.wait()) for process in ranks)
    return RunOutcome(codes, failed, time.monotonic() - start_s)


def _wait(ranks: "list[subprocess.Popen[Any]]", deadline_s: float | None) -> int | None:
    """The first failed rank: once all have ended, at `deadline_s`, or (without one) when one fails."""
    while True:
        codes = [process.poll() for process in ranks]
        failed = next((rank for rank, code in enumerate(codes) if code not in (None, 0)), None)
        if all(code is not None for code in codes) or (failed is not None and deadline_s is None):
            return failed
        if deadline_s is not None and time.monotonic() > deadline_s:
            return failed
        time.sleep(_POLL_S)
