"""What one contestant did with one seed: its losses and step times in order."""

from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from gradwire.lab.bench.samples import StepSample
from gradwire.lab.bench.statistics import slowest


@dataclass
class Course:
    """Step by step; `shaped` of the first steps ran on the slow link, the rest on an unshaped one."""

    name: str
    seed: int
    losses: list[float | None] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    shaped: int = 0
    evaluation: dict[str, float] = field(default_factory=dict)
    replicas_identical: bool | None = None

    def add(self, per_rank: list[list[StepSample]], *, shaped: bool) -> None:
        """Append the steps of one slice; the loss is the mean over ranks."""
        if not per_rank:
            return
        self.step_s += slowest(per_rank)
        for samples in zip(*per_rank, strict=True):
            values = [sample.loss for sample in samples if sample.loss is not None]
            self.losses.append(fmean(values) if values else None)
        if shaped:
            self.shaped = len(self.step_s)

    def __len__(self) -> int:
        return len(self.step_s)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)
