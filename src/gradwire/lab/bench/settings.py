"""What a bench run was asked to do: one frozen value that the JSON repeats in full."""

from dataclasses import asdict, dataclass
from typing import Any

from gradwire.lab.bench.entries import Entry

BOUND = Entry("bound", "bound", "bound")
BOUND_AGAIN = Entry("bound again", "bound", "bound")


@dataclass(frozen=True)
class Task:
    """What every setting trains, identical for all of them.

    `bucket_cap_mb` goes to `DistributedDataParallel` for everybody. With `decay_steps` the learning rate
    falls linearly to zero over the last four fifths of so many steps. `policy` is that of all recipes, as
    `policy_of` reads it; without one it is the workload's.
    """

    workload: str
    data: str | None = None
    shards: str = "iid"
    batch_size: int | None = None
    seed: int = 0
    overlap: bool = True
    bucket_cap_mb: float | None = None
    decay_steps: int | None = None
    policy: str | None = None

    def __post_init__(self) -> None:
        if self.shards not in ("iid", "skewed"):
            raise ValueError(f"shards is {self.shards!r}: expected 'iid' or 'skewed'")
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch size is {self.batch_size}: expected at least 1")


@dataclass(frozen=True)
class Schedule:
    """How much is measured: `warmup` uncounted steps, then `rounds` rounds of `steps` steps per setting.

    `timeout_s` is the time without any finished step after which a setting is taken to hang.
    """

    steps: int = 10
    rounds: int = 7
    warmup: int = 25
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("rounds", 1), ("warmup", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}: expected at least {least}")
        if self.timeout_s <= 0:
            raise ValueError(f"timeout is {self.timeout_s} s: expected more than 0")


@dataclass(frozen=True)
class Network:
    """The link as typed, and how it is emulated (`root`, `user` or `backend`)."""

    workers: int
    rate: str
    delay: str
    mode: str

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ValueError(f"workers is {self.workers}: a comparison needs at least 2")


@dataclass(frozen=True)
class Settings:
    """Everything that decides the result of a bench run."""

    task: Task
    schedule: Schedule
    network: Network
    entries: tuple[Entry, ...]

    @property
    def every_entry(self) -> tuple[Entry, ...]:
        """The entries between the two identical bound rows that show the A/A spread."""
        return (BOUND, *self.entries, BOUND_AGAIN)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, flat."""
        return {
            **asdict(self.task),
            **asdict(self.schedule),
            **asdict(self.network),
            "recipes": [entry.name for entry in self.entries if entry.kind == "recipe"],
            "peers": [entry.name for entry in self.entries if entry.kind == "peer"],
        }
