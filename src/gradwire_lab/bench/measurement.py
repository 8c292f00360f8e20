"""Measurement of one setting of a bench run, from start to last figure; a failure ends this setting alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from gradwire_lab.bench.process_set import Answers, BenchNetwork, Message, OnStep, ProcessSet, SettingFailed
from gradwire_lab.bench.settings import BenchEntry, TrainingTask
from gradwire_lab.bench.statistics import StepSample

# Joining the group and the first broadcast over a slow link take a while; so do imports without a fork.
_SETUP_TIMEOUT_S = 180.0
# One answer, after all of a test set.
_EVALUATE_TIMEOUT_S = 900.0


@dataclass
class Measured:
    """All that was learnt about one setting; the lists by rank hold counted steps only."""

    entry: BenchEntry
    rounds: list[list[list[StepSample]]] = field(default_factory=list)  # round, rank, step
    # Per round, at the interface: per step, mean over ranks.
    sent_bytes: list[float] = field(default_factory=list)
    sent_packets: list[float] = field(default_factory=list)
    # Per round, as its recipes announced: per step and rank. Empty where no recipe runs.
    announced_bytes: list[float] = field(default_factory=list)
    setup: Message = field(default_factory=dict)
    # Seconds that the slowest rank compiled kernels in the last setup.
    compile_s: float = 0.0
    report: Message | None = None
    fingerprints: list[str] = field(default_factory=list)
    evaluation: dict[str, float] = field(default_factory=dict)
    peak_bytes: int | None = None
    failure: SettingFailed | None = None

    def steps(self) -> list[list[StepSample]]:
        """Samples by rank, rounds joined."""
        if not self.rounds:
            return []
        return [[step for part in self.rounds for step in part[rank]] for rank in range(len(self.rounds[0]))]


class Setting:
    """The process set of an entry and what was measured with it.

    After a failure every method does nothing: the other settings of the run go on.
    """

    def __init__(
        self,
        entry: BenchEntry,
        task: TrainingTask,
        network: BenchNetwork,
        workers: int,
        timeout_s: float,
        start: Callable[..., ProcessSet] = ProcessSet,
    ) -> None:
        self.measured = Measured(entry)
        self._task = task
        self._network = network
        self._timeout_s = timeout_s
        self._announced_bytes = 0.0  # of all steps since the last setup
        self._set: ProcessSet | None = None
        with self._contained():
            self._set = start(entry.name, network, workers, timeout_s)

    @property
    def alive(self) -> bool:
        """False from the first failure on, and after `end`."""
        return self._set is not None and self.measured.failure is None

    @property
    def settled(self) -> bool:
        """True if its recipe will not change any more: `auto` neither measures nor tries anything."""
        return not self.alive or (self.measured.report or {}).get("settled", True)

    def greet(self) -> None:
        """Wait until all ranks have started."""
        self._ask({"op": "hello"}, timeout_s=_SETUP_TIMEOUT_S)

    def setup(self, seed: int, entry: BenchEntry | None = None) -> None:
        """Build (or rebuild) everything from `seed`, by default for the setting's own entry."""
        entry = entry or self.measured.entry
        # Both belong to what was built before: a setting that fails from here on must not show them.
        self.measured.fingerprints, self.measured.evaluation = [], {}
        self._announced_bytes = 0.0
        command = {
            "op": "setup",
            "entry": entry.name if entry.kind != "bound" else entry.stem,
            "kind": entry.kind,
            "task": asdict(self._task),
            "seed": seed,
        }
        answers = self._ask(command, timeout_s=max(_SETUP_TIMEOUT_S, self._timeout_s))
        if answers is not None:
            self.measured.setup = answers.closing[0]
            self.measured.compile_s = max(each.get("compile_s", 0.0) for each in answers.closing)

    def train(
        self, count: int, *, counted: bool = True, on_step: OnStep | None = None
    ) -> list[list[StepSample]]:
        """`count` steps on every rank; samples by rank (none after a failure). Only counted ones are kept."""
        before = self._network.counters()
        answers = self._ask({"op": "steps", "count": count}, on_step=on_step)
        if answers is None:
            return []
        self.measured.report = report = answers.closing[0].get("report")
        self.measured.peak_bytes = max(closing["peak_bytes"] for closing in answers.closing)
        last = self._announced_bytes
        if report is not None:
            self._announced_bytes = report["wire_bytes"]
        if counted:
            if report is not None:
                self.measured.announced_bytes.append((self._announced_bytes - last) / count)
            self.measured.rounds.append(answers.steps)
            after = self._network.counters()
            self.measured.sent_bytes += _per_step(before, after, count, "tx_bytes")
            self.measured.sent_packets += _per_step(before, after, count, "tx_packets")
        return answers.steps

    def check(self) -> None:
        """Compare the replicas."""
        answers = self._ask({"op": "check"})
        if answers is not None:
            self.measured.fingerprints = [closing["fingerprint"] for closing in answers.closing]

    def evaluate(self) -> dict[str, float]:
        """Figures of merit of rank 0's model (DDP broadcasts its BatchNorm statistics to all ranks).

        Under FSDP2 all ranks evaluate, because each holds a shard.
        """
        only = None if self._task.sharded else 0
        answers = self._ask(
            {"op": "evaluate"}, only=only, timeout_s=max(_EVALUATE_TIMEOUT_S, self._timeout_s)
        )
        if answers is not None:
            self.measured.evaluation = answers.closing[0]["evaluation"]
        return self.measured.evaluation

    def trace(self, steps: int = 10) -> list[dict[str, Any]]:
        """Rank 0's spans of the step of median length among `steps` more; do it last."""
        answers = self._ask({"op": "trace", "steps": steps})
        return [] if answers is None else list(answers.closing[0]["spans"])

    def end(self) -> None:
        """End the processes."""
        if self._set is not None:
            self._set.end()
            self._set = None

    def _ask(self, command: Message, **options: Any) -> Answers | None:
        """The answers, or None when the setting has failed (now or before)."""
        answers = None
        if self._set is not None:
            with self._contained():
                answers = self._set.ask(command, **options)
        return answers

    @contextmanager
    def _contained(self) -> Iterator[None]:
        try:
            yield
        except SettingFailed as failure:
            self.measured.failure = failure
            self._set = None


def _per_step(before: Any, after: Any, count: int, field: str) -> list[float]:
    """Bytes or packets that a rank sent per step, as a mean over ranks; empty if the network cannot count.

    `before` and `after` are the ranks' counters around `count` steps, and `field` is the counter that is
    read.
    """
    if before is None or after is None:
        return []
    sent = [getattr(late - early, field) for early, late in zip(before, after, strict=True)]
    return [sum(sent) / len(sent) / count]
