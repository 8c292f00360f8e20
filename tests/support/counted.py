"""What a step asks of a device, counted: launches of kernels, operators of torch, copies, collectives, waits.

Tensors are elsewhere (`tests/support/elsewhere.py`), and kernels for devices take them there. Their launches
are counted and not run; the contracts compute the numbers, in plain torch. Triton has to be told to interpret
when it is imported, as `tests/device/conftest.py` does, or it would look for a device.

What a unit takes is the difference between two models, of which one has a unit more, in a bucket of its own.
What is left is what a step takes once, whatever it has to send.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map
from triton.runtime.interpreter import GridExecutor

from gradwire.comm import Comm, Pending, Round, ThreadComm, run_ranks
from gradwire.kernels import dispatch
from gradwire.kernels.compensation import Findings
from gradwire.placement import Placement, Post, stream
from gradwire.step.gradient_bucket import GradientBucket
from tests.support import rig
from tests.support.elsewhere import WHERE, Carrying, Elsewhere, Far, There, inside
from tests.support.simulated import Clock, Near
from tests.support.twins import CONTRACTS, KERNELS, files

SIDE = 64
"""Of the matrices: a unit is one of them, of two tiles."""
WORLD, STEPS = 2, 4
"""In the last two steps, which are counted, each rank has its turn to lead."""
FREE = ("_unsafe_view", "lift_fresh", "resolve_conj", "resolve_neg", "empty", "new_empty")
"""Beginnings of names of operators that are no views by their schema, and do nothing on a device either."""

Kind = Literal["launch", "operator", "copy", "collective", "wait"]
KINDS: tuple[Kind, ...] = ("launch", "operator", "copy", "collective", "wait")
_THIS_THREAD = threading.local()


class Asked(NamedTuple):
    """What is asked of a device, and on which line of gradwire."""

    kind: Kind
    what: str
    line: str


class Counting(Elsewhere):
    """Elsewhere, where kernels work; `asked` says how often what was asked of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Counter[Asked]()

    def __enter__(self) -> Counting:
        _THIS_THREAD.counting = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        del _THIS_THREAD.counting

    def count(self, kind: Kind, what: str) -> None:
        """One more, but not of what the tests ask for by themselves."""
        line = _asker()
        if line:
            self.asked[Asked(kind, what, line)] += 1

    def operated(self, func: Any, crosses: bool) -> None:
        """Views and allocations are free; a copy out or in is no operator on elements."""
        name = func.overloadpacket.__name__
        if crosses:
            self.count("copy", name)
        elif not func.is_view and not name.startswith(FREE):
            self.count("operator", name)

    def note(self, what: str) -> None:
        """The host waits."""
        self.count("wait", what)


def _asker() -> str:
    """The innermost line of gradwire's that is no part of how kernels are called; empty if tests ask."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.endswith("/support/rig.py"):
            return ""
        if "/src/gradwire/" in name and not name.endswith(("/dispatch.py", "/launch.py")):
            return f"{name.rsplit('/src/gradwire/', 1)[1]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


class Waiting(Far):
    """Counts the events for which the host waits."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self._counting = counting

    def learn(self, call: str, actor: str, clock: Clock) -> None:
        """As `Simulated.learn`."""
        if call == "synchronize":
            self._counting.count("wait", "an event")
        super().learn(call, actor, clock)


class Collecting(Carrying):
    """Counts collectives."""

    def __init__(self, comm: Comm, counting: Counting) -> None:
        super().__init__(comm)
        self._counting = counting

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """As `Comm.issue`."""
        self._counting.count("collective", round_.verb)
        return super().issue(round_, tensor, out)


@contextmanager
def kernels_elsewhere() -> Iterator[None]:
    """Kernels for devices take tensors that are elsewhere, on the threads that count."""
    run = GridExecutor.__call__

    def computed(launches: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            result = launches(*arguments, **named)
            if result is not NotImplemented:
                with _disable_current_modes():
                    _fill(result, plain(*tree_map(inside, arguments), **tree_map(inside, named)))
            return result

        return call

    def launched(self: GridExecutor, *arguments: Any, **named: Any) -> None:
        if any(isinstance(each, There) for each in (*arguments, *named.values())):
            _THIS_THREAD.counting.count("launch", self.fn.__name__)
        else:
            run(self, *arguments, **named)

    with ExitStack() as held:
        for module in files(f"{KERNELS}.device").values():
            for name in CONTRACTS.keys() & vars(module).keys():
                both = computed(getattr(module, name), CONTRACTS[name].plain)
                held.enter_context(patch.object(module, name, both))
        held.enter_context(patch.object(dispatch, "GPUS", (WHERE.type,)))
        held.enter_context(patch.object(There, "is_cuda", True))
        held.enter_context(patch.object(GridExecutor, "__call__", launched))
        dispatch.forget()  # what was chosen for such tensors before
        yield
    dispatch.forget()


def _fill(result: Any, found: Any) -> None:
    """Let what a twin has returned have the numbers that its contract has found."""
    if isinstance(result, There):
        result.inner.copy_(torch.as_tensor(found))
    elif isinstance(result, Findings):
        idle, finite = found.read()
        _fill(result.idle, torch.tensor([number in idle for number in range(result.idle.numel())]))
        _fill(result.finite, finite)
    elif isinstance(result, tuple):
        for one, other in zip(result, found, strict=True):
            _fill(one, other)


@contextmanager
def same_buckets() -> Iterator[None]:
    """Rigs bring gradients in the same memory in every step, as DDP does."""
    made, kept = rig._gradient_bucket, dict[tuple[int, int], Tensor]()

    def gradient_bucket(grads: Mapping[str, Tensor], names: Sequence[str], index: int) -> GradientBucket:
        new = made(grads, names, index)
        bucket = kept.setdefault((threading.get_ident(), index), new.buffer)
        return replace(new, buffer=bucket if bucket is new.buffer else bucket.copy_(new.buffer))

    with patch.object(rig, "_gradient_bucket", gradient_bucket):
        yield


def asked(recipe: str, matrices: int, dtype: torch.dtype, world: int = WORLD) -> list[Counter[Asked]]:
    """What rank 0 asks for in each step of a model of so many matrices, each a bucket and a unit."""
    units = [{f"{number}.weight": (SIDE, SIDE)} for number in range(matrices)]
    return asked_of(recipe, units, dtype, world)


def asked_of(
    recipe: str,
    units: Sequence[Mapping[str, tuple[int, ...]]],
    dtype: torch.dtype = torch.float32,
    world: int = WORLD,
) -> list[Counter[Asked]]:
    """What rank 0 asks for in each step of a model of units of one size, each a bucket of such parameters."""
    shapes = {name: shape for unit in units for name, shape in unit.items()} | {"bias": (3,)}
    numels = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    buckets = [("bias",), *(tuple(reversed(unit)) for unit in reversed(units))]
    (elements,) = {sum(numels[name] for name in unit) for unit in units}

    def gradients(rank: int, step: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(100 * step + rank)
        return {name: torch.randn(numel, generator=drawn).to(dtype) for name, numel in numels.items()}

    def rig_over(placed: Callable[[Post], Placement], comm: Comm) -> rig.Rig:
        options: dict[str, Any] = {"place": placed, "dtype": dtype, "shapes": shapes}
        return rig.Rig(comm, recipe, unit_elements=elements, **options)

    def on_the_cpu(comm: ThreadComm) -> list[Counter[Asked]]:
        reducer = rig_over(lambda _post: stream(comm, comm, Near()), comm)
        for step in range(STEPS):
            reducer.step(gradients(comm.rank, step), buckets)
        return []

    def counted(comm: ThreadComm) -> list[Counter[Asked]]:
        found = []
        with Counting() as counting:
            over, device = Collecting(comm, counting), Waiting(counting)
            reducer = rig_over(lambda _post: stream(over, comm, device), comm)
            for step in range(STEPS):
                counting.asked.clear()
                reducer.step(
                    {name: There(each) for name, each in gradients(comm.rank, step).items()}, buckets
                )
                found.append(Counter(counting.asked))
        return found

    with kernels_elsewhere(), same_buckets():
        return run_ranks(world, lambda comm: counted(comm) if comm.rank == 0 else on_the_cpu(comm))[0]


class Count(NamedTuple):
    """Of one recipe: by kind, for each unit and, beside that, for each step."""

    unit: dict[Kind, int]
    step: dict[Kind, int]


def count(recipe: str, dtype: torch.dtype = torch.float32, world: int = WORLD) -> Count:
    """The most of the steps that are counted."""
    fewer, more = (
        {
            kind: max(_total(each, kind) for each in asked(recipe, matrices, dtype, world)[-2:])
            for kind in KINDS
        }
        for matrices in (2, 3)
    )
    unit = {kind: more[kind] - fewer[kind] for kind in KINDS}
    return Count(unit, {kind: fewer[kind] - 2 * unit[kind] for kind in KINDS})


def count_unit(recipe: str, shapes: Sequence[tuple[int, ...]]) -> dict[Kind, int]:
    """By kind, what a step takes in which parameters of these shapes are one unit, in one bucket."""
    unit = {f"{number}.weight": shape for number, shape in enumerate(shapes)}
    steps = asked_of(recipe, [unit])[-2:]
    return {kind: max(_total(each, kind) for each in steps) for kind in KINDS}


def _total(counted: Counter[Asked], kind: Kind) -> int:
    return sum(number for each, number in counted.items() if each.kind == kind)
