"""Try recipes on real steps and put everything back (Tyagi and Swany 2023, section 3-E).

Differences from the paper: the checkpoint stays in memory and covers generators, gradients and scaler, too.
So a run that explored is the same, bit for bit, as one that did not. A hook cannot rewind a user's loop, so
the user passes a function that makes one step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire._api.wire import Attached, Wire
from gradwire.agreement.agree import require_agreement
from gradwire.measure.clock import now_s
from gradwire.measure.probe import table_of
from gradwire.memory import UNSENT
from gradwire.planning.facts import StepObservation
from gradwire.recipes import Composition
from gradwire.recipes.base import Watch
from gradwire.recipes.parse import steady
from gradwire.step.arena import Lane
from gradwire.step.engine import Engine
from gradwire.step.layout import Layout
from gradwire.telemetry.history import History
from gradwire.tools.rewind import Stateful, rewound

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Trial:
    """The result of one candidate over the batches; the same numbers on every rank.

    `step_s`, `compress_s` and `exposed_comm_s` are medians in seconds on the slowest rank: of a whole step,
    of its encoding and decoding, and of the communication that backward did not hide. Measuring the gain
    takes extra passes. One over memory plus gradient counts in the first two, and three over the memory in
    the first. `wire_bytes` are sent per rank and step. `gain` is the mean of 1 − ‖unsent‖²/‖x‖², or 1 without
    a memory. For chosen elements that is ‖sent‖²/‖x‖².
    """

    recipe: str
    step_s: float
    compress_s: float
    exposed_comm_s: float
    wire_bytes: float
    gain: float


def explore(
    wire: Wire,
    step: Callable[[Batch], Any],
    batches: Iterable[Batch],
    candidates: Sequence[str],
    *,
    also: Sequence[Stateful] = (),
) -> list[Trial]:
    """Run every candidate over the same batches, and restore everything after each. A collective.

    `step(batch)` is one whole training step: zero_grad, forward, backward, optimizer. If it changes anything
    else than model, optimizer, scaler and global generators, such as a scheduler or a counter, pass that in
    `also`. The paper takes ten batches. Unsent gradient takes part in every candidate's steps and is put
    back, too.

    Raises `ValueError` for a wire without its optimizer, before the second step, and while a recipe still
    measures. Also raises it for a candidate that measures or that has no memory for the unsent gradient.
    Raises `RanksDisagree` if ranks have different candidates.

    Difference from the paper: the user passes the `wire`. The paper's exploration is part of its training
    loop and tries its own compressor. Here several models may be attached, and recipes, memories and the
    worker belong to one of them.

    Example::

        trials = gradwire.explore(wire, train_step, batches[:10], ["topk(ratio=0.1)", "topk(ratio=0.01)"])
        best = min(trials, key=lambda trial: trial.step_s / trial.gain)
    """
    attached, rows = wire.attached, list(batches)
    engine = attached.backward.engine
    said = {"candidates": str(list(candidates)), "batches": str(len(rows))}
    said["optimizer"] = "attached" if attached.optimizers else "none"
    attached.backward.rest()
    attached.backward.calls.begin("explore()", engine.step)
    attached.backward.call(lambda: require_agreement(said, engine.env.control))
    if not rows or not candidates:
        raise ValueError(f"{len(candidates)} candidates on {len(rows)} batches: explore needs one of each")
    if not attached.optimizers:
        raise ValueError("explore must restore the optimizer's state: pass the optimizer to attach")
    if engine.measuring or engine.step < 2:
        # DDP rebuilds its buckets in its second step, which changes the order of sums in later ones.
        raise ValueError("call explore later, after the recipe is decided and two steps are made")
    compositions = [_fit(engine, text) for text in candidates]
    trials = []
    scaler = [] if attached.scaler is None else [attached.scaler]
    with rewound(attached.source.module, attached.optimizers, [*scaler, *also]) as restore:
        for text, composition in zip(candidates, compositions, strict=True):
            with _as_it_was(attached):
                trials.append(_try(attached, text, composition, step, rows))
            restore()
    return trials


def _fit(engine: Engine, text: str) -> Composition:
    composition = steady(text, "candidate")
    layout = engine.layout_of(composition, torch.device("meta"))
    engine.env.check(layout)
    for name in engine.layout.homeless_in(layout):
        raise ValueError(f"candidate {text!r} has no memory for the unsent gradient of {name!r}")
    return composition


@contextmanager
def _as_it_was(attached: Attached) -> Iterator[None]:
    """Put the engine back at the end. A layout that is put aside keeps its planes as they are."""
    backward, call = attached.backward, attached.backward.call
    saved = call(backward.engine.snapshot)
    history = backward.history
    backward.history = History()
    try:
        yield
    finally:
        backward.rest()
        call(lambda: backward.engine.restore(saved))
        backward.history = history
        attached.source.may_differ()  # buffers that are restored


def _try(
    attached: Attached,
    text: str,
    composition: Composition,
    step: Callable[[Batch], Any],
    batches: Sequence[Batch],
) -> Trial:
    engine, call = attached.backward.engine, attached.backward.call
    energies: list[tuple[float, float]] = []
    took_s: list[float] = []
    unsent = _Unsent()

    def judge(shown: StepObservation) -> None:
        assert shown.looked is not None
        energies.append((unsent.energy(engine.layout), sum(shown.looked)))

    def begin() -> None:
        watch = Watch(lambda _watched: judge, every=1, look=_energy, looks=1)
        engine.install(replace(composition, watch=watch))
        unsent.note(engine.layout)

    call(begin)
    for batch in batches:
        start_s = now_s()
        step(batch)
        took_s.append(now_s() - start_s)
    history = attached.backward.history
    fields = ("compress_s", "exposed_comm_s", "predicted_bytes")
    mine = [median(took_s), *(history.mean(field) for field in fields), *(left for left, _ in energies)]
    table = call(lambda: _gathered(engine, mine))
    step_s, compress_s, exposed_s, wire_bytes = table[:, : 1 + len(fields)].amax(0).tolist()
    left = table[:, 1 + len(fields) :].sum(0).tolist()
    gains = [1 - unsent / all_ for unsent, (_, all_) in zip(left, energies, strict=True) if all_ > 0]
    return Trial(text, step_s, compress_s, exposed_s, wire_bytes, fmean(gains) if gains else 1.0)


def _energy(x: Tensor) -> tuple[float]:
    return (float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2,)


class _Unsent:
    """The part of memory plus gradient that a step leaves unsent, found from the memories before and after.

    A memory of weight w has moved by 1/w of the way from what it was to what the step left, all of the way if
    w is 1.
    """

    def note(self, layout: Layout) -> None:
        """A step begins."""
        self._before = [lane.committed[UNSENT].clone() for lane in self._remembering(layout)]

    def energy(self, layout: Layout) -> float:
        """Its squared norm, of the step that has ended; the next one begins."""
        lanes = zip(self._remembering(layout), self._before, strict=True)
        left = [torch.lerp(before, lane.committed[UNSENT], lane.memory.weight) for lane, before in lanes]
        self.note(layout)
        return sum(_energy(each)[0] for each in left)

    @staticmethod
    def _remembering(layout: Layout) -> list[Lane]:
        return [lane for lane in layout.lanes if UNSENT in lane.committed]


def _gathered(engine: Engine, row: Sequence[float]) -> Tensor:
    return torch.tensor(table_of(engine.env.control, row), dtype=torch.float64, device="cpu")
