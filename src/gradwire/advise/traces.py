"""Observes a run in traces of torch.profiler (Kineto): DDP or FSDP2, gloo or NCCL, of one or several ranks.

Only durations are compared between files, because clocks of ranks differ.

- A *step* lasts from the end of one optimizer step to that of the next. Where none was recorded, it is a
  `ProfilerStep#`, and where there is none either, it lasts from one forward pass of DDP to the next.
- *Exposed* on the CPU is the part of the collectives' union after the last `AccumulateGrad` of a backward
  pass. On a GPU, whose kernels run after the host has queued them, it is the part of that union in which no
  other kernel runs, as in HTA (facebookresearch/HolisticTraceAnalysis); copies are no kernels.
- *Input* is the time inside of a DataLoader's `__next__`. *Between* is all other time from the optimizer's
  step to DDP's next forward pass.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gradwire.advise.observed import Gathers, Observed, ObservedStep, RankSteps, ReadyOrder
from gradwire.advise.recorded import Recorded, Sum
from gradwire.advise.spans import ordered, outside, seconds, union, within
from gradwire.quantities import bytes_text, counted

GPU_BACKWARD = 2 / 3
"""The share of backward in a step's computing on a GPU, whose kernels no trace divides."""

ENOUGH = 2
"""Whole steps from which something is said."""

UNLIKE = 1.5
"""Times as many bytes as another that a rank of the same run may send in a step: an all-reduce of the user's
own may be in one rank's last step, and not in another's."""

SHARED = 0.25
"""The share of its time in which an all-reduce may share the link, and still tell what it takes alone."""

MOST_RANKS = 1 << 20
"""Bound of ranks, more than any run has: a larger number is damaged."""

Span = tuple[float, float]


class Pass(NamedTuple):
    """A forward and a backward pass: it lasts from `start_s` to `stop_s`. Autograd began with it at
    `first_s`, and had added the last gradient at `last_s`."""

    start_s: float
    first_s: float
    last_s: float
    stop_s: float


def read(paths: Sequence[Path]) -> Observed:
    """The run that one or several ranks have recorded.

    Args:
        paths: a file of each rank; not all ranks need have one.

    Returns:
        All that was found. `missing` says what was not recorded, and how to record it.

    Raises:
        ValueError: a file is empty, cut, damaged or no trace, holds no collective or fewer than two whole
            steps, or is of the same rank as another one, or of another run.
    """
    found = [Recorded(path) for path in paths]
    ranks = [_number(each.info.get("rank"), place) for place, each in enumerate(found)]
    worlds = {_number(each.info.get("world_size"), 0) for each in found} - {0}
    if len(set(ranks)) < len(ranks):
        raise ValueError("two of these traces are of the same rank: give one of each rank, of one run")
    if len(worlds) > 1:
        raise ValueError(f"these traces are of runs of {' and '.join(map(str, sorted(worlds)))} ranks")
    if len({each.on_gpu for each in found}) > 1:
        raise ValueError(
            "these traces are of different runs: collectives are gloo's in one, NCCL's in another"
        )
    passes = [_steps_in(each) for each in found]
    steps = [
        tuple(_step_of(each, own) for own in of_rank) for each, of_rank in zip(found, passes, strict=True)
    ]
    first, world = found[0], max(worlds, default=0)
    sent = [_sending(first, step) for step in passes[0]]
    sums = [
        [_sums(each, _sending(each, step)) for step in of_rank]
        for each, of_rank in zip(found, passes, strict=True)
    ]
    sizes = tuple(each.size_bytes for each in sums[0][-1])
    _check_alike([math.fsum(each.size_bytes for each in of_rank[-1]) for of_rank in sums])
    gradients = _gradients(first, sent, steps[0])
    return Observed(
        source=f"traces of {counted(len(found), 'rank')}" + (f" of {world}" if world else ""),
        wrapper="FSDP2" if first.is_sharded else "DDP",
        backend="nccl" if first.on_gpu else "gloo",
        world=world,
        ranks=tuple(sorted(map(RankSteps, ranks, steps), key=lambda each: each.rank)),
        gradients=gradients,
        gathers=_gathers(first, passes[0]) if first.is_sharded else None,
        buckets=() if any(map(math.isnan, sizes)) else sizes,
        calls=median(sum(_between(first.calls_s, *each) for each in step) for step in sent),
        passes=median(max(len(step), 1) for step in sent),
        timed=tuple(_timed(sums)),
        recording_s=_recording_s(first, passes[0], steps[0]),
        missing=(*_missing(first, len(found), world, gradients, sizes), *_left_out(found)),
    )


def _check_alike(sent_bytes: Sequence[float]) -> None:
    """Raise `ValueError` unless all ranks sent about as much in a step, as far as that is known."""
    known = [each for each in sent_bytes if each > 0.0]
    if known and max(known) > UNLIKE * min(known):
        least, most = bytes_text(min(known)), bytes_text(max(known))
        raise ValueError(
            f"these traces are of different runs: a step sends {least} in one, {most} in another"
        )


def _steps_in(found: Recorded) -> list[list[Pass]]:
    """The passes of each whole step. Raises `ValueError` for a trace without collectives, or too short."""
    if len(found.optimizers):
        ends_s = found.optimizers[:, 1]
        # Of optimizers that step one after the other, the last one ends the step.
        followed = [_between(found.added_s, a, b) > 0 for a, b in pairwise(ends_s)]
        ends_s = ends_s[np.array([*followed, True])]
    elif len(found.profiled):
        ends_s = np.append(found.profiled[:, 0], found.profiled[-1, 1])
    else:
        ends_s = found.forwards[:, 0]
    steps = []
    for start_s, stop_s in pairwise(ends_s.tolist()):
        begun_s = found.forwards[:, 0]
        further_s = begun_s[(begun_s > start_s) & (begun_s < stop_s)].tolist()[1:]
        passes = [_pass(found, *span) for span in pairwise((start_s, *further_s, stop_s))]
        if any(each.first_s < stop_s for each in passes):
            steps.append(passes)
    if not len(found.collectives):
        raise ValueError(f"{found.path}: {NO_COLLECTIVE}")
    if len(steps) < ENOUGH:
        raise ValueError(f"{found.path}: it has {counted(len(steps), 'whole training step')}: {MORE_STEPS}")
    return steps


def _pass(found: Recorded, start_s: float, stop_s: float) -> Pass:
    """The backward pass from `start_s` to `stop_s`, in seconds of the trace; if autograd added up nothing in
    it, its work lasts until `stop_s`.
    """
    nodes_s = found.nodes_s[(found.nodes_s >= start_s) & (found.nodes_s < stop_s)]
    added_s = found.added_s[(found.added_s > start_s) & (found.added_s <= stop_s)]
    last_s = float(added_s.max()) if len(added_s) else stop_s
    return Pass(start_s, float(nodes_s[0]) if len(nodes_s) else last_s, last_s, stop_s)


def _step_of(found: Recorded, passes: Sequence[Pass]) -> ObservedStep:
    """A step with the parts of which it consists."""
    start_s, stop_s = passes[0].start_s, passes[-1].stop_s
    begun_s = found.forwards[:, 0]
    begun_s = begun_s[(begun_s >= start_s) & (begun_s < stop_s)]
    first_s = float(begun_s[0]) if len(begun_s) else start_s
    loaded = within(found.loaded, start_s, stop_s)
    before = np.array([[start_s, first_s]])
    if found.on_gpu:
        running, kernels = (within(each, start_s, stop_s) for each in (found.collectives, found.kernels))
        exposed_s = outside(running, kernels)
        # The host runs ahead: what it does while the GPU is busy is not waited for.
        busy = union(ordered(array("d", np.concatenate((running, kernels)).ravel())))
        input_s = outside(loaded, busy)
        between_s = outside(before, union(ordered(array("d", np.concatenate((loaded, busy)).ravel()))))
        backward_s = GPU_BACKWARD * max(stop_s - start_s - exposed_s - input_s - between_s, 0.0)
        return ObservedStep(
            stop_s - start_s, input_s, backward_s, seconds(running), exposed_s, between_s=between_s
        )
    communicating_s = exposed_s = 0.0
    for each in passes:
        communicating_s += seconds(within(found.collectives, each.first_s, each.stop_s))
        exposed_s += seconds(within(found.collectives, each.last_s, each.stop_s))
    backward_s = passes[-1].last_s - passes[-1].first_s
    return ObservedStep(
        stop_s - start_s,
        seconds(loaded),
        backward_s,
        communicating_s,
        exposed_s,
        optimizer_s=seconds(within(union(found.optimizers), start_s, stop_s)),
        between_s=outside(before, loaded),
    )


def _sending(found: Recorded, passes: Sequence[Pass]) -> list[Span]:
    """Span of each backward pass in which collectives began, from its start to its end."""
    spans = [(each.first_s, each.stop_s) for each in passes]
    return [span for span in spans if _between(found.calls_s, *span)]


def _sums(found: Recorded, spans: Sequence[Span]) -> list[Sum]:
    """The all-reduces of the last pass that sent, in the group that sent most."""
    start_s, stop_s = spans[-1] if spans else (0.0, 0.0)
    groups: dict[str, list[Sum]] = {}
    for each in found.sums:
        if start_s <= each.at_s < stop_s:
            groups.setdefault(each.group, []).append(each)
    return max(groups.values(), key=lambda sums: math.fsum(each.size_bytes for each in sums), default=[])


def _gathers(found: Recorded, passes: Sequence[Sequence[Pass]]) -> Gathers | None:
    """The all-gathers between the ends of two steps' backward passes, in the median over steps; `None` if
    there are none. `passes` are those of each step.
    """
    ends_s = [step[-1].stop_s for step in passes if step]
    steps = [[each for each in found.gathers if a <= each.at_s < b] for a, b in pairwise(ends_s)]
    if not any(steps):
        return None
    by_width: dict[int, float] = {}
    for each in steps[-1]:
        by_width[each.element_bytes] = by_width.get(each.element_bytes, 0.0) + each.size_bytes
    spans = [
        np.array([(each.at_s, each.at_s + each.took_s) for each in step]).reshape(-1, 2) for step in steps
    ]
    return Gathers(
        median(len(step) for step in steps),
        median(math.fsum(each.size_bytes for each in step) for step in steps),
        math.nan if found.on_gpu else median(seconds(union(each)) for each in spans),
        max(by_width, key=lambda width: by_width[width], default=4),
    )


def _timed(ranks: Sequence[Sequence[Sequence[Sum]]]) -> Iterator[tuple[float, float]]:
    """Bytes and seconds of the all-reduces of a step: the median over steps, the least over ranks.

    Those that share the link with others for much of their time are left out: gloo runs two at once.
    """
    usual = ranks[0][-1]
    sizes = [each.size_bytes for each in usual]
    alike = [
        [step for step in steps if [each.size_bytes for each in step] == sizes and step] for steps in ranks
    ]
    if math.isnan(math.fsum(each.size_bytes + each.took_s for each in usual)):
        return
    for place, size_bytes in enumerate(sizes):
        took_s = min(median(step[place].took_s for step in steps) for steps in alike if steps)
        if took_s > 0.0 and _shared_s(usual, place) <= SHARED * usual[place].took_s:
            yield size_bytes, took_s


def _shared_s(sums: Sequence[Sum], place: int) -> float:
    """Seconds of all-reduce number `place` during which at least one other was running."""
    spans = np.array([(each.at_s, each.at_s + each.took_s) for each in sums])
    own, others = spans[place], np.delete(spans, place, axis=0)
    return seconds(within(union(others), own[0], own[1]))


def _gradients(
    found: Recorded, sent: Sequence[Sequence[Span]], steps: Sequence[ObservedStep]
) -> ReadyOrder | None:
    """Gradients with shapes and ready times, in seconds as medians over steps; `None` if shapes were not
    recorded. `sent` has the spans of each step's passes that send.
    """
    spans = [step[-1] for step in sent if step]
    orders = [[each for each in found.gradients if a <= each.stop_s < b] for a, b in spans]
    if not orders or not orders[-1] or any(each.shape is None for each in orders[-1]):
        return None
    shapes = tuple(each.shape for each in orders[-1] if each.shape is not None)
    alike = [
        [each.stop_s - span[0] for each in order]
        for order, span in zip(orders, spans, strict=True)
        if tuple(each.shape for each in order) == shapes
    ]
    ready_s = np.median(np.array(alike), axis=0)
    # The host runs ahead of a GPU: there its times say the order, and shares of the backward pass.
    backward_s = median(each.backward_s for each in steps)
    if found.on_gpu:
        ready_s = ready_s / max(float(ready_s[-1]), 1e-9) * backward_s
    sizes = {each.element_bytes for each in orders[-1]}
    return ReadyOrder(shapes, tuple(np.maximum.accumulate(ready_s).tolist()), max(sizes), found.on_gpu)


def _recording_s(found: Recorded, passes: Sequence[Sequence[Pass]], steps: Sequence[ObservedStep]) -> float:
    """Seconds by which the profiler lengthened a step on the CPU, in the median over `steps`; 0 on a GPU.
    `passes` are the backward passes of each step.

    The result is at most half of the time in which the step computes. On a GPU only the host records, and it
    runs ahead of the device.
    """
    if found.on_gpu:
        return 0.0
    nodes = median(_between(found.nodes_s, step[0].start_s, step[-1].stop_s) for step in passes)
    computing_s = median(each.ready_s - each.input_s - each.between_s for each in steps)
    return min(found.recording_s * nodes / max(len(found.nodes_s), 1), 0.5 * computing_s)


def _missing(
    found: Recorded, files: int, world: int, gradients: ReadyOrder | None, sizes: Sequence[float]
) -> Iterator[str]:
    """Yield sentences about what a trace does not tell.

    Args:
        found: the trace.
        files: number of ranks that were recorded, of `world`; 0 if that is unknown.
        gradients: shapes and ready times, or `None`.
        sizes: bytes of each collective.
    """
    if not world:
        yield (
            "the trace does not say how many ranks there were: record it after init_process_group, "
            "in torch 2.1 or later"
        )
    elif files < world:
        yield (
            f"{counted(files, 'rank')} of {world} recorded: the traces of all ranks tell a slow network from "
            "a late rank"
        )
    if found.on_gpu and not len(found.calls_s):
        yield (
            "which collectives ran, and how much they sent, was not recorded: newer versions of torch write "
            "that into traces"
        )
    if gradients is None or any(map(math.isnan, sizes)):
        yield "sizes of gradients were not recorded: torch.profiler.profile(record_shapes=True) records them"
    groups = found.info.get("pg_config")
    if not found.on_gpu and isinstance(groups, list) and len(groups) > 1:
        yield (
            f"there are {len(groups)} process groups, and gloo's events do not name theirs: all of them count"
        )
    if not len(found.optimizers) and not len(found.profiled):
        yield "no optimizer step was recorded: steps are counted from one forward pass to the next"


def _left_out(found: Sequence[Recorded]) -> Iterator[str]:
    """Yield a sentence if events were left out."""
    if number := sum(each.invalid for each in found):
        yield (
            f"{counted(number, 'event')} left out that torch.profiler wrote as no JSON, as it does "
            "with_stack=True where the name of a file has quotes"
        )


NO_COLLECTIVE = (
    "no collective was recorded: give torch.profiler.profile activities=[ProfilerActivity.CPU] for gloo, "
    "with ProfilerActivity.CUDA for NCCL, on a run of several ranks"
)
MORE_STEPS = "record at least three, from one optimizer.step() to the next"


def _between(times_s: npt.NDArray[np.float64], start_s: float, stop_s: float) -> int:
    """Number of sorted times between `start_s` and `stop_s`."""
    first, last = np.searchsorted(times_s, (start_s, stop_s))
    return int(last - first)


def _number(stated: object, otherwise: int) -> int:
    return stated if isinstance(stated, int) and 0 <= stated <= MOST_RANKS else otherwise
