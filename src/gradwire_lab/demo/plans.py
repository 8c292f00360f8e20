"""Sizes and time budget of the demonstration."""

from dataclasses import dataclass, replace

from gradwire_lab.bench.settings import BenchEntry, TrainingTask, parse_entry

AUTO_RATE = "auto"

# How many times longer the link needs for all gradients than the backward pass takes to compute them.
TARGET_CCR = 4.25


@dataclass(frozen=True)
class DemoPlan:
    """Sizes of the demonstration.

    `rate` is a text such as `200mbit`, or `auto`: as slow as makes communication take `TARGET_CCR` times the
    backward pass on this machine. `budget_s` begins when workers have started and kernels are compiled; what
    does not fit after the race on the slow link is shortened, and said.
    """

    workload: str = "resnet_demo"
    workers: int = 2
    steps: int = 240
    seeds: int = 3
    rate: str = AUTO_RATE
    delay: str = "0"
    recipe: str = "auto"
    data: str | None = None
    batch_size: int | None = None
    # DDP's default of 25 MB would put a model of this size into two buckets, the large one closed only when
    # backward ends: nothing could overlap, neither for DDP nor for gradwire.
    bucket_cap_mb: float = 0.1
    warmup: int = 10
    chunk: int = 20
    calibration: int = 20
    budget_s: float = 220.0
    timeout_s: float = 180.0

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ValueError(f"workers is {self.workers}: a demonstration of communication needs at least 2")
        if self.steps <= self.warmup:
            raise ValueError(f"steps is {self.steps}: must exceed the {self.warmup} steps of warm-up")
        if self.seeds < 1:
            raise ValueError(f"seeds is {self.seeds}: expected at least 1")

    @property
    def task(self) -> TrainingTask:
        """The training that all contestants share."""
        return TrainingTask(
            self.workload,
            self.data,
            batch_size=self.batch_size,
            bucket_cap_mb=self.bucket_cap_mb,
            decay_steps=self.steps,
        )

    @property
    def ddp(self) -> BenchEntry:
        return parse_entry("ddp", "peer")

    @property
    def gradwire(self) -> BenchEntry:
        """The recipe under demonstration."""
        return parse_entry(self.recipe, "recipe")

    def quick(self) -> "DemoPlan":
        """A minute for the impatient, and for tests: no spread over seeds, nothing to conclude from."""
        return replace(self, steps=60, seeds=1, chunk=10, budget_s=60.0)


def text_plan(plan: DemoPlan) -> DemoPlan:
    """`plan` with the small transformer on Shakespeare instead of images."""
    return replace(plan, workload="chargpt")


def rate_for_ccr(gradient_bytes: float, workers: int, backward_s: float, ccr: float = TARGET_CCR) -> float:
    """Link rate (bit/s, two significant digits) at which a ring all-reduce of `gradient_bytes` among
    `workers` ranks takes as long as `ccr` backward passes of `backward_s` seconds.

    >>> rate_for_ccr(10e6, 2, 0.05, 4.0)
    400000000.0
    """
    exact = 2 * (workers - 1) / workers * gradient_bytes * 8 / (ccr * backward_s)
    return float(f"{exact:.1e}")
