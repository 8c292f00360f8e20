"""The worker processes of one setting: started together, told what to do together, ended alone."""

import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Protocol

from gradwire.bench.channel import REPLY_FD, Lines, Message, encode
from gradwire.bench.samples import StepSample

WORKER = (sys.executable, "-m", "gradwire.bench.worker")

# After one rank reports an error its peers usually follow at once: wait so long for their words too.
_GRACE_S = 1.0
_LOG_TAIL_BYTES = 4000

OnStep = Callable[[int, StepSample], None]


class Network(Protocol):
    """What the bench needs of an emulated network."""

    def popen(
        self,
        rank: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        master_port: int | None = None,
        **popen_kwargs: Any,
    ) -> "subprocess.Popen[bytes]": ...

    def counters(self) -> Any: ...


class SettingFailed(Exception):
    """A setting hung, died or raised; `detail` holds tracebacks and the last output of its ranks."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


@dataclass
class Rank:
    """One worker process, the pipe that it answers on, and the file that takes its output."""

    process: "subprocess.Popen[bytes]"
    answers: Lines
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

    def __init__(
        self, name: str, network: Network, workers: int, timeout_s: float, argv: Sequence[str] = WORKER
    ) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._ranks: list[Rank] = []
        port = free_port()
        try:
            for rank in range(workers):
                self._ranks.append(_start(network, rank, port, argv))
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
            if rank.process.stdin is not None and not rank.process.stdin.closed:
                _close_quietly(rank.process.stdin)
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


def free_port() -> int:
    """A port that nothing on this machine listens on right now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _start(network: Network, rank: int, port: int, argv: Sequence[str]) -> Rank:
    read_fd, write_fd = os.pipe()
    log = tempfile.TemporaryFile()  # noqa: SIM115  (lives as long as the rank)
    try:
        process = network.popen(
            rank,
            list(argv),
            env={**os.environ, REPLY_FD: str(write_fd)},
            master_port=port,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=(write_fd,),
        )
    except BaseException:
        os.close(read_fd)
        log.close()
        raise
    finally:
        os.close(write_fd)
    return Rank(process, Lines(read_fd), log)


def _tell(rank: Rank, command: Message) -> None:
    stream = rank.process.stdin
    assert stream is not None
    try:
        stream.write(encode(command))
        stream.flush()
    except BrokenPipeError as error:
        raise SettingFailed(f"a rank {_how_it_ended(rank.process)}", rank.tail()) from error


def _close_quietly(stream: IO[bytes]) -> None:
    """Closing flushes what the dead process never read."""
    try:
        stream.close()
    except BrokenPipeError:
        return


def _how_it_ended(process: "subprocess.Popen[bytes]") -> str:
    try:
        code = process.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        return "closed its pipe but runs on"
    return f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
