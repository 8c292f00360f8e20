"""The worker processes of one setting: started together, told what to do together, ended alone.

Launcher and worker exchange JSON lines: commands on one pipe, answers on another. Standard output stays free
for whatever a workload prints: it cannot corrupt an answer.
"""

import json
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import IO, Any, Protocol

from gradwire_lab.bench.statistics import StepSample
from gradwire_lab.emulate import free_port, prepare_ranks

Message = dict[str, Any]


def encode(message: Message) -> bytes:
    """One line of UTF-8; NaN and infinities become null, which JSON can carry."""
    return (json.dumps(_finite(message), separators=(",", ":")) + "\n").encode()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return (
            value if value - value == 0.0 else None
        )  # NaN and ±Inf are the floats that differ from themselves
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


class LineReader:
    """Reassembles lines from a non-blocking descriptor; owns the descriptor."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.closed = False
        self._rest = b""

    def read(self) -> list[Message]:
        """All complete messages available now; sets `closed` when the other side is gone."""
        try:
            chunk = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return []
        self.closed = not chunk
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.fd)


class WorkerEnd:
    """The worker's side: iterate over commands, `send` answers."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands = os.fdopen(commands, encoding="utf-8")
        self._answers = answers

    def __iter__(self) -> Iterator[Message]:
        """Commands until the launcher closes its side: a worker never outlives its launcher while idle."""
        for line in self._commands:
            yield json.loads(line)

    def send(self, message: Message) -> None:
        """Write one whole line (blocking)."""
        data = encode(message)
        while data:
            data = data[os.write(self._answers, data) :]


WORKER = "gradwire_lab.bench.worker"

# Wait for the reports of the peers: they usually follow at once when one rank reports an error.
_GRACE_S = 1.0
_LOG_TAIL_BYTES = 4000

OnStep = Callable[[int, StepSample], None]


class Process(Protocol):
    """A rank's process; see `subprocess.Popen`."""

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class BenchNetwork(Protocol):
    """The part of an emulated network that the bench uses."""

    def fork(
        self, rank: int, target: str, descriptors: Sequence[int], *, output: int, master_port: int
    ) -> Process: ...

    def counters(self) -> Any: ...


class SettingFailed(Exception):
    """A setting hung, died or raised; `detail` holds tracebacks and the last output of its ranks."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


@dataclass
class Rank:
    """A worker process, with pipes for commands and answers, and the file of its output."""

    process: Process
    commands: IO[bytes]
    answers: LineReader
    log: IO[bytes]

    def tail(self) -> str:
        """The end of what the process printed."""
        size = os.fstat(self.log.fileno()).st_size
        start = max(0, size - _LOG_TAIL_BYTES)
        return os.pread(self.log.fileno(), _LOG_TAIL_BYTES, start).decode(errors="replace").strip()


@dataclass
class Answers:
    """Closing messages by rank, and every rank's step samples."""

    closing: list[Message]
    steps: list[list[StepSample]] = field(default_factory=list)


class ProcessSet:
    """All ranks of one setting. Use as a context manager, or `end()` it."""

    def __init__(self, name: str, network: BenchNetwork, workers: int, timeout_s: float) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._ranks: list[Rank] = []
        port = free_port()
        try:
            for rank in range(workers):
                self._ranks.append(_start(network, rank, port))
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> "ProcessSet":
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def ask(
        self,
        command: Message,
        *,
        on_step: OnStep | None = None,
        timeout_s: float | None = None,
        only: int | None = None,
    ) -> Answers:
        """Send `command` to every rank (or `only` one) and wait for all of them.

        Raises `SettingFailed` when a rank reports an error or ends, or when none says anything for
        `timeout_s` seconds; the set is killed first, so nothing of it goes on using the machine.
        """
        ranks = self._ranks if only is None else [self._ranks[only]]
        patience_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            for rank in ranks:
                _tell(rank, command)
            return _Conversation(ranks, patience_s, on_step).run()
        except SettingFailed:
            self.end()
            raise

    def end(self) -> None:
        """Kill every process, by its own id, and close the pipes. Safe to call twice."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            _close_quietly(rank.commands)
            rank.answers.close()
            rank.log.close()
        self._ranks = []


class _Conversation:
    """Collects the answers to one command."""

    def __init__(self, ranks: Sequence[Rank], patience_s: float, on_step: OnStep | None) -> None:
        self._ranks = ranks
        self._patience_s = patience_s
        self._on_step = on_step
        self._closing: dict[int, Message] = {}
        self._steps: list[list[StepSample]] = [[] for _ in ranks]

    def run(self) -> Answers:
        with selectors.DefaultSelector() as selector:
            for index, rank in enumerate(self._ranks):
                selector.register(rank.answers.fd, selectors.EVENT_READ, index)
            heard_s = time.monotonic()
            while len(self._closing) < len(self._ranks):
                left_s = heard_s + self._patience_s - time.monotonic()
                events = selector.select(max(left_s, 0.0))
                if not events:
                    self._fail(f"no sign of life for {self._patience_s:g} s: taken to hang, killed")
                heard_s = time.monotonic()
                for key, _ in events:
                    self._hear(key.data)
        return Answers([self._closing[index] for index in range(len(self._ranks))], self._steps)

    def _hear(self, index: int) -> None:
        rank = self._ranks[index]
        for message in rank.answers.read():
            if "step" in message:
                sample = StepSample.from_dict(message["step"])
                self._steps[index].append(sample)
                if self._on_step is not None:
                    self._on_step(index, sample)
            elif "error" in message:
                self._fail(f"rank {index}: {message['error']}", message.get("traceback", ""))
            else:
                self._closing[index] = message
        if rank.answers.closed:
            self._fail(f"rank {index} {_how_it_ended(rank.process)}")

    def _fail(self, reason: str, detail: str = "") -> None:
        time.sleep(_GRACE_S)
        parts = [detail.strip()]
        for index, rank in enumerate(self._ranks):
            words = [message["traceback"] for message in rank.answers.read() if "traceback" in message]
            parts += [f"rank {index}:\n{text.strip()}" for text in (*words, rank.tail()) if text.strip()]
        raise SettingFailed(reason, "\n".join(part for part in parts if part))


def prepare_workers() -> None:
    """Begin to import what workers need, once for all of them; does not wait for it."""
    # Libraries read it when they are loaded, before a worker has an environment of its own.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    prepare_ranks("gradwire_lab.bench.preload")
    # The launcher is about to import torch, which imports numpy from C++ and takes Ctrl-C for its absence.
    import_module("numpy")


def _start(network: BenchNetwork, rank: int, port: int) -> Rank:
    log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the rank)
    commands, tell = os.pipe()
    hear, answers = os.pipe()
    try:
        process = network.fork(
            rank, f"{WORKER}:serve", (commands, answers), output=log.fileno(), master_port=port
        )
    except BaseException as error:
        os.close(tell)
        os.close(hear)
        log.close()
        if isinstance(error, EOFError | OSError):
            reason = "could not be forked: the process that has imported everything has ended"
            raise SettingFailed(f"rank {rank} {reason}", repr(error)) from error
        raise
    finally:
        os.close(commands)
        os.close(answers)
    return Rank(process, os.fdopen(tell, "wb"), LineReader(hear), log)


def _tell(rank: Rank, command: Message) -> None:
    try:
        rank.commands.write(encode(command))
        rank.commands.flush()
    except BrokenPipeError as error:
        raise SettingFailed(f"a rank {_how_it_ended(rank.process)}", rank.tail()) from error


def _close_quietly(stream: IO[bytes]) -> None:
    """Closing flushes what the dead process never read."""
    try:
        stream.close()
    except BrokenPipeError:
        return


def _how_it_ended(process: Process) -> str:
    try:
        code = process.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        return "closed its pipe but runs on"
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
