"""From measurements to rows: pure arithmetic, one row per setting."""

import operator
from dataclasses import asdict
from statistics import fmean, median
from typing import Any

from gradwire_lab.bench import peers
from gradwire_lab.bench.measurement import Measured
from gradwire_lab.bench.settings import BOUND, BOUND_AGAIN
from gradwire_lab.bench.statistics import mean_over_ranks, median_over_steps, paired, slowest, spread

# The loss is the mean over ranks of the last counted steps, this many: single batches jump.
LOSS_WINDOW = 10

_TIMES = ("data_s", "forward_s", "backward_s", "exposed_comm_s", "optimizer_s", "cpu_s")


def rows(measured: list[Measured], workers: int, stock: str = "ddp") -> dict[str, Any]:
    """{"rows": […], "spread": A/A comparison of the two bounds or None}.

    `measured` has the settings, on `workers` ranks. `stock` is the peer with which all are compared: without
    options, or with buckets of another size.
    """
    by_name = {item.entry.name: item for item in measured}
    bound, again = by_name.get(BOUND.name), by_name.get(BOUND_AGAIN.name)
    plain = [
        item
        for item in measured
        if item.entry.stem == stock and item.entry.options.keys() <= {peers.BUCKET_OPTION}
    ]
    beside = by_name.get(stock) or (plain[0] if len(plain) == 1 else None)
    return {
        "rows": [
            {**row(item, bound, workers), f"speedup_over_{stock}": compare(beside, item)} for item in measured
        ],
        "spread": compare(again, bound),
    }


def row(item: Measured, bound: Measured | None, workers: int) -> dict[str, Any]:
    """Figures of one setting, on `workers` ranks and against `bound`, the speed without communication. A
    failed one has its error, and the figures measured before it.
    """
    steps = item.steps()
    times = slowest(steps)
    return {
        "name": item.entry.name,
        "kind": item.entry.kind,
        "failed": None if item.failure is None else item.failure.reason,
        "failure_detail": None if item.failure is None else item.failure.detail,
        "step_s": median(times) if times else None,
        "step_s_all": times,
        "step_spread": spread(times),
        "scaling": _scaling(bound, item),
        **{name: median_over_steps(steps, operator.attrgetter(name)) for name in _TIMES},
        "cpu_s_all": mean_over_ranks(steps, operator.attrgetter("cpu_s")),
        "compress_s": _compress_s(item),
        "peak_bytes": item.peak_bytes,
        "interface_bytes_per_step": fmean(item.sent_bytes) if item.sent_bytes else None,
        "interface_packets_per_step": fmean(item.sent_packets) if item.sent_packets else None,
        "wire_bytes_per_step": _wire_bytes(item, workers),
        "announced_bytes_per_step": fmean(item.announced_bytes) if item.announced_bytes else None,
        "buffer_bytes_per_step": _buffer_bytes(item, workers),
        "loss": _loss(item),
        "replicas_identical": len(set(item.fingerprints)) == 1 if item.fingerprints else None,
        "fingerprint": item.fingerprints[0] if len(set(item.fingerprints)) == 1 else None,
        "evaluation": item.evaluation,
        "report": item.report,
    }


def compare(slow: Measured | None, fast: Measured | None) -> dict[str, float] | None:
    """The speed of `fast` over that of `slow`: paired by round, with a 95 % interval. `None` if they are the
    same setting, or one has no rounds.
    """
    if slow is None or fast is None or slow is fast:
        return None
    pairs = [(_round_s(a), _round_s(b)) for a, b in zip(slow.rounds, fast.rounds, strict=False)]
    if not pairs:
        return None
    return asdict(paired([a for a, _ in pairs], [b for _, b in pairs]))


def _round_s(per_rank: Any) -> float:
    return median(slowest(per_rank))


def _scaling(bound: Measured | None, item: Measured) -> float | None:
    """Share of the speed without communication (1.0 is linear), paired by round like every comparison."""
    if item is bound:
        return 1.0 if item.rounds else None
    ratio = compare(bound, item)
    return None if ratio is None else ratio["ratio"]


def _compress_s(item: Measured) -> float | None:
    """Seconds per step for encoding and decoding: as a recipe reports, or the time inside a peer's hook."""
    if item.entry.kind == "recipe":
        return (item.report or {}).get("compress_s")
    return median_over_steps(item.steps(), operator.attrgetter("hook_s"))


def _wire_bytes(item: Measured, workers: int) -> float | None:
    """Bytes that the cost model expects a rank to send per step."""
    if item.entry.kind == "bound":
        return 0.0
    if item.entry.kind == "peer":
        if "sent_bytes" in item.setup:
            return float(item.setup["sent_bytes"])
        return peers.wire_bytes(item.entry, item.setup.get("parameters") or 0, workers)
    return (item.report or {}).get("wire_bytes_per_step")


def _buffer_bytes(item: Measured, workers: int) -> float:
    """Bytes per step of BatchNorm's statistics, which DDP or gradwire broadcasts; mean over ranks."""
    if item.entry.kind == "bound":
        return 0.0
    return float(item.setup.get("buffer_bytes") or 0) * (workers - 1) / workers


def _loss(item: Measured) -> float | None:
    """Mean loss of the last `LOSS_WINDOW` steps, over all ranks and samples.

    `None` if no loss was recorded, and for a bound: its replicas drift apart, so its loss means nothing.
    """
    if item.entry.kind == "bound":
        return None
    values = [
        step.loss for samples in item.steps() for step in samples[-LOSS_WINDOW:] if step.loss is not None
    ]
    return fmean(values) if values else None
