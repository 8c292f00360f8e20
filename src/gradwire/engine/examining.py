"""Measures how much of this training's gradients some recipes keep, and what their codecs cost beside it.

Dense steps are recorded: some whole parameters, over `RECORDED` steps. Then all ranks hand each other what
they have recorded, once, and each examines its share of the recipes on a thread of its own, while dense steps
go on. Nothing of the run changes. The price is bounded: the bytes of `PRICE_STEPS` dense steps, and the
processor time that is left over in `STEPS` further ones, or in `WAIT_S` where these take less.

A rank's results so far travel in its row of the verdict, so all ranks know the same at the same step.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from gradwire.arena import ParameterSpec
from gradwire.comm import Comm
from gradwire.engine.agree import damage, require_undamaged
from gradwire.engine.arrival import Arrival
from gradwire.engine.fidelity import Interrupted, Recorded, fidelity
from gradwire.engine.layout import TINY_ELEMENTS
from gradwire.exchange.base import STEADY
from gradwire.measure.clock import now_s
from gradwire.measure.codec import measure_codec
from gradwire.placement import Device
from gradwire.planning.costs import CodecCost, Line
from gradwire.recipes import Composition

RECORDED = 16
"""Steps, the last ones of those that are measured: a memory has had time to deliver what it kept."""
PRICE_STEPS = 2.0
"""Dense steps whose bytes the recorded gradients may take."""
LARGEST = 1 << 18
"""Elements that are recorded at most. More would take longer, and tell nothing new."""
MOST_RANKS = 8
"""Ranks whose gradients stand for those of all."""
STEPS = 8
"""Dense steps beside which recipes are examined at most, unless they are short."""
WAIT_S = 5.0
"""Seconds that all recipes get, however short steps are; what is not known then stays unknown."""

_SIZES = (1 << 12, 1 << 16, 1 << 19)
"""Elements, of the line that a codec's cost is: few, because a training waits for the core."""
_NUMBERS = 5
"""Of each recipe in a row: fidelity, then both lines of its codec."""
_UNKNOWN = _NUMBERS * (-1.0,)

_LOG = logging.getLogger("gradwire")


def sample_of(specs: Sequence[ParameterSpec], world: int) -> tuple[ParameterSpec, ...]:
    """The parameters to record: whole matrices, because low rank is of those, the largest that fit.

    Where even the smallest is too large it is its leading rows. Empty where there is no matrix.

    >>> import torch
    >>> specs = [ParameterSpec(str(n), (n, 64), torch.float32, 64 * n) for n in (512, 100, 80)]
    >>> [spec.name for spec in sample_of(specs, world=2)], [spec.shape for spec in sample_of(specs, world=64)]
    (['80'], [(2, 64)])
    """
    matrices = [spec for spec in specs if len(spec.whole.shape) > 1 and spec.numel >= TINY_ELEMENTS]
    if not matrices:
        return ()
    dtype = max(matrices, key=lambda spec: spec.numel).dtype
    matrices = [spec for spec in matrices if spec.dtype == dtype]
    # An all-gather brings world − 1 recordings, where a ring sends twice the gradient.
    room = min(int(2 * PRICE_STEPS * sum(spec.numel for spec in specs) / (RECORDED * world)), LARGEST)
    found: list[ParameterSpec] = []
    for spec in sorted(matrices, key=lambda spec: -spec.numel):
        if spec.numel <= room:
            found.append(spec)
            room -= spec.numel
    if not found:
        smallest = min(matrices, key=lambda spec: spec.numel)
        columns = smallest.numel // smallest.shape[0]
        rows = max(room // columns, 1)
        shape = (rows, *smallest.shape[1:])
        found = [replace(smallest, shape=shape, numel=rows * columns, stride=None)]
    return tuple(found)


class Recording:
    """The gradients of some parameters over committed steps, on this rank."""

    def __init__(self, specs: Sequence[ParameterSpec], world: int) -> None:
        self.specs = sample_of(specs, world)
        self._sizes = {spec.name: spec.numel for spec in self.specs}
        self._now: dict[str, Tensor] = {}
        self._steps: list[Tensor] = []

    def take(self, arrival: Arrival, scale: float) -> None:
        """Copy what is wanted of a buffer, before it becomes a mean; `scale` is the loss scale."""
        for entry in arrival.entries:
            if (size := self._sizes.get(entry.name)) is not None:
                here = arrival.buffer[entry.offset : entry.offset + size]
                self._now[entry.name] = here.to(torch.float32, copy=True).mul_(1.0 / scale)

    def end(self, *, committed: bool) -> None:
        """A step has ended. One that does not count is forgotten."""
        if committed and len(self._now) == len(self.specs) > 0:
            self._steps.append(torch.cat([self._now[spec.name] for spec in self.specs]))
            del self._steps[:-RECORDED]
        self._now = {}

    def gathered(self, comm: Comm, control: Comm) -> Recorded:
        """By step and rank, of the first `MOST_RANKS`; empty where nothing was recorded. A collective.

        Raises on all ranks of `control` if the bytes came damaged on one of them.
        """
        if not self._steps:
            return ()
        mine = torch.stack(self._steps)
        everyones = torch.empty(comm.world, *mine.shape, dtype=mine.dtype, device=mine.device)
        found = damage(comm.all_gather(everyones.view(comm.world, -1), mine.view(-1)))
        require_undamaged([found], control)
        # Without a loss scale, gradients in float16 would be lost below its range.
        kept = everyones[:MOST_RANKS].to("cpu", torch.promote_types(torch.float32, self.specs[0].dtype))
        return [list(step) for step in kept.unbind(1)]


@dataclass(frozen=True)
class Found:
    """The result for one recipe: the share that it keeps, and its codec's cost beside the training."""

    fidelity: float
    codec: CodecCost

    @property
    def row(self) -> tuple[float, ...]:
        """In numbers."""
        encode, decode = self.codec.encode, self.codec.decode
        return self.fidelity, encode.base_s, encode.slope_s, decode.base_s, decode.slope_s

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[float]]) -> Found | None:
        """The results of all ranks together: the least kept share, and the slowest codec; `None` if none
        knows.

        >>> Found.of_rows([_UNKNOWN, (0.5, 1.0, 2.0, 3.0, 4.0), (0.75, 2.0, 1.0, 0.0, 0.0)]).row
        (0.5, 2.0, 2.0, 3.0, 4.0)
        >>> Found.of_rows([_UNKNOWN]) is None
        True
        """
        known = [row for row in rows if row[0] >= 0.0]
        if not known:
            return None
        kept, *costs = zip(*known, strict=True)
        base_s, slope_s, decode_base_s, decode_slope_s = map(max, costs)
        return cls(min(kept), CodecCost(Line(base_s, slope_s), Line(decode_base_s, decode_slope_s)))


class Examination:
    """Examines `compositions` on recorded gradients: this rank every `world`-th of them, in their order.

    `steps` have passed so far. It ends when all is found, when nothing refers to it any more, or when the
    interpreter is about to end. Codecs run on the `device` if they stay there. The thread holds what is
    passed here, so nothing of that may refer to the model: it would live until all is found.
    """

    def __init__(
        self,
        compositions: Sequence[Composition],
        recording: Recording,
        recorded: Recorded,
        comm: Comm,
        device: Device,
    ) -> None:
        self._found: list[Found | None] = [None] * len(compositions)
        self._over = threading.Event()
        self._started_s, self.steps = now_s(), 0
        mine = range(comm.rank, len(compositions), comm.world)
        over, found = self._over, self._found
        weakref.finalize(self, over.set)

        def is_over() -> bool:
            return over.is_set() or not threading.main_thread().is_alive()

        def examine() -> None:
            for number in mine:
                composition = compositions[number]
                try:
                    found[number] = _examined(composition, recording.specs, recorded, is_over, device)
                except Interrupted:
                    return
                except Exception as error:
                    # It is left out. Not a warning, which a user may have made an error.
                    _LOG.warning("%s could not be examined: %r", composition.text, error)
            self_done.set()

        self._done = self_done = threading.Event()
        in_background(partial(_on, device, examine))

    @property
    def row(self) -> tuple[float, ...]:
        """This rank's results so far: whether it waits for no more, then `_NUMBERS` for each recipe."""
        is_over = self.steps + 1 >= STEPS and now_s() - self._started_s >= WAIT_S
        is_done = self._done.is_set()  # before it looks at what there is
        numbers = [_UNKNOWN if each is None else each.row for each in self._found]
        return (float(is_done or is_over), *chain.from_iterable(numbers))

    def observe(self, rows: Sequence[Sequence[float]]) -> tuple[Found | None, ...] | None:
        """Take all ranks' rows of a step; what was found of each recipe, once nothing more is waited for."""
        self.steps += 1
        if not all(row[0] for row in rows):
            return None
        self._over.set()
        starts = range(1, 1 + _NUMBERS * len(self._found), _NUMBERS)
        return tuple(Found.of_rows([row[start : start + _NUMBERS] for row in rows]) for start in starts)


def _examined(
    composition: Composition,
    specs: Sequence[ParameterSpec],
    recorded: Recorded,
    is_over: Callable[[], bool],
    device: Device,
) -> Found:
    codec = measure_codec(composition.exchange, _SIZES, budget_s=0.0, device=device).cost
    # What asks the optimizer what may be lost loses nothing that a parameter would notice.
    if composition.exchange.laws.asks_optimizer:
        return Found(1.0, codec)
    return Found(fidelity(composition, specs, recorded, first_step=STEADY, is_over=is_over), codec)


def _on(device: Device, job: Callable[[], None]) -> None:
    """Run `job` in a stream of its own, which makes `device` this thread's."""
    with device.using(device.new_stream()):
        job()


def in_background(job: Callable[[], None]) -> None:
    """Run `job` on a thread. Not a daemon: one in native code when the interpreter ends would abort that."""
    threading.Thread(target=job, name="gradwire examines").start()
