"""What a step on a device costs the host, counted where there is none: calls of Python functions, launches,
operators and collectives.

A launch runs Triton's own code (`JITFunction.run`, the compiled kernel, `CudaLauncher`) down to the function
that hands it to the driver, and a collective runs torch's own functions down to a process group that does
nothing (`fake`). These two do no work, kernels are not compiled, and tensors say that they are on a GPU
(`tests/support/elsewhere.py`). So a step's numbers are not right, and it is counted all the same.

A call is one of a Python function of gradwire's, or of one that those call, in Triton and torch. Calls of
built-in functions are none; nor are those of what stands here for a device.

A process of its own: `python -m tests.device.host_calls RECIPE…` prints a line of JSON for each recipe, and
with `--by-function` what is called. `--captured` counts the calls of stretches, and of a unit, whose kernels
are launched one by one, then replayed. `--compared` compares launches. Without a recipe, it writes the table
anew, in both places.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler import CompiledKernel
from triton.runtime import driver

from gradwire.codec.sparse import Sparse
from gradwire.comm import Comm, Pending, ProcessGroupComm, Round
from gradwire.comm.base import DONE
from gradwire.exchange.captured import Captures
from gradwire.kernels import dispatch
from gradwire.kernels.device import launch
from gradwire.kernels.graphs import Graphs
from gradwire.kernels.uploads import holding
from gradwire.placement import Accelerator, stream
from gradwire.step import installed
from tests.support import elsewhere, rig
from tests.support.counted import FREE, SIDE, same_buckets
from tests.support.elsewhere import Elsewhere, There
from tests.support.twins import KERNELS, files

_CUDAGraph: Any = torch.cuda.CUDAGraph.__base__
"""What torch has in C++."""
GPU = torch.device("cuda", 0)
WORLD, STEPS, COUNTED = 2, 12, 8
"""In the last ones of these steps, which are counted, each rank has its turns to lead."""
_NEVER = 1 << 20
_STANDS_IN = (
    "/tests/support/",
    "/tests/device/host_calls.py",
    "/torch/_compile.py",  # these three call the mode that computes in the place of a device
    "/torch/_library/",
    "/torch/utils/",
    "/unittest/mock.py",
)


class Count(NamedTuple):
    """Of a unit, or of a step."""

    calls: int
    launches: int
    operators: int
    collectives: int


class Calls:
    """Counts calls of Python functions while `counting`, by function."""

    def __init__(self) -> None:
        self.by_function = Counter[str]()
        self.in_stretches = 0
        """Calls between collectives, or in the place of what was captured there."""
        self._stretch: FrameType | None = None
        self._inside = 0
        """Frames on the stack that count, from gradwire's outermost on."""
        self._aside: FrameType | None = None
        """The outermost frame of something that stands for a device."""
        self._kinds: dict[CodeType, str] = {}

    def _kind(self, code: CodeType) -> str:
        name = code.co_filename
        if name.endswith("/support/rig.py") and code.co_name == "memory":
            return "aside"  # a test looks at what is remembered
        if "/src/gradwire/" in name:
            return "ours"
        if name.endswith("/support/rig.py"):
            return "between"
        return "aside" if any(each in name for each in _STANDS_IN) else "theirs"

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        """As `sys.setprofile` calls it."""
        if event == "return":
            if frame is self._stretch:
                self._stretch = None
            if frame is self._aside:
                self._aside = None
            elif self._aside is None and self._is_counted(frame):
                self._inside -= 1
        elif event == "call" and self._aside is None:
            code = frame.f_code
            if self._kinds.setdefault(code, "") == "":
                self._kinds[code] = self._kind(code)
            if self._kinds[code] == "aside":
                self._aside = frame
            elif self._is_counted(frame):
                self._inside += 1
                if self._stretch is None and code in STRETCHES:
                    self._stretch = frame
                self.in_stretches += self._stretch is not None
                where = code.co_filename.rsplit("/src/", 1)[-1].rsplit("/site-packages/", 1)[-1]
                self.by_function[f"{where}:{code.co_qualname}"] += 1

    @property
    def is_within(self) -> bool:
        """Whether gradwire is asking, and not the test."""
        return self._inside > 0

    def _is_counted(self, frame: FrameType) -> bool:
        kind = self._kinds.get(frame.f_code, "")
        return kind == "ours" or (kind == "theirs" and self._inside > 0)


STRETCHES = {each.__code__ for each in (Sparse.take, Sparse.average_decoded, torch.cuda.CUDAGraph.replay)}
"""What encodes and decodes a unit of `topk`, and what replays."""


class Tally(Elsewhere):
    """Counts operators and collectives; a launch tells of itself."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls
        self._modes = (_Operators(self),)  # one of functions would call more of torch's than a step does
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self.operators = self.collectives = self.launches = 0
        self.by_name = Counter[str]()
        self.handed: list[tuple[Any, ...]] = []
        """The arguments of each launch, with addresses for tensors."""
        self.hooks: tuple[Any, ...] = ()
        """What the driver calls before and after the last launch, if somebody traces."""

    def __enter__(self) -> Tally:
        _NOW.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _NOW.remove(self)

    def operated(self, func: Any, crosses: bool) -> None:
        """Views and allocations are free."""
        name = func.overloadpacket.__name__
        if not self._calls.is_within:
            return
        if func.namespace == "c10d":
            self.collectives += 1
        elif not crosses and not func.is_view and not name.startswith(FREE):
            self.operators += 1
            self.by_name[name] += 1


class _Operators(elsewhere._Operators):
    """New memory is zero, as no kernel writes to it: steps are finite, and so they count. It is what was let
    go of before, if there is some of that size, as with torch's allocator on a device.
    """

    def __init__(self, owner: Tally) -> None:
        super().__init__(owner)
        self._rooms = defaultdict[int, list[Tensor]](list)
        """All memory that was allocated, by size."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(result, There) and not func.is_view and not elsewhere._mutates(func):
            with _disable_current_modes():
                room = self._room(result.inner)
                is_empty = func.overloadpacket.__name__.startswith(("empty", "new_empty"))
                result.inner = room.zero_() if is_empty else room.copy_(result.inner)
        return result

    def _room(self, like: Tensor) -> Tensor:
        rooms = self._rooms[like.nbytes]
        free = next((each for each in rooms if _holders(each) == _ALONE), None)
        if free is None:
            free = torch.empty(like.nbytes, dtype=torch.uint8)
            rooms.append(free)
        return free.view(like.dtype).as_strided(like.shape, like.stride())


def _holders(room: Tensor) -> int:
    """How many hold a tensor's memory."""
    return torch._C._storage_Use_Count(room.untyped_storage()._cdata)


_ALONE = _holders(torch.empty(1, dtype=torch.uint8))


_NOW: list[Tally] = []
"""Who counts. Triton keeps what it has compiled, and with it what launches."""
_NUMBERS = count()
"""Of compiled kernels."""


def _launched(*arguments: Any) -> None:
    """What a launcher calls last: grid, stream, kernel, four options, metadata, three for hooks, and what the
    kernel takes.
    """
    _NOW[0].launches += 1
    taken = [each.data_ptr() if isinstance(each, Tensor) else each for each in arguments[13:]]
    _NOW[0].handed.append((*arguments[:10], *taken))
    _NOW[0].hooks = arguments[11:13]


def _replayed(_graph: Any) -> None:
    """What a graph calls last."""
    _NOW[0].launches += 1


class _Echo(Comm):
    """Everybody says what this rank says: all rows of a vote are this rank's."""

    def __init__(self) -> None:
        self.rank, self.world = 0, WORLD

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """See `Comm`."""
        rows = out.view(WORLD, -1)
        rows[1:] = rows[0]
        return DONE


class _Stream:
    """A stream and an event alike."""

    stream_id = device_index = device_type = 0

    def __getattr__(self, _name: str) -> Any:
        return lambda *_arguments: self


class Device(Accelerator):
    """The accelerator itself, but for what the driver makes."""

    def new_stream(self) -> Any:
        """See `Device`."""
        return _Stream()

    def new_event(self) -> Any:
        """See `Device`."""
        return _Stream()

    def awaited(self, stream: Any) -> Any:
        """See `Device`."""
        return stream

    def pinned(self, like: Tensor) -> Tensor:
        """See `Device`."""
        return torch.zeros(like.shape, dtype=like.dtype, device="cpu")


def _compiled(source: Any, target: Any = None, options: Any = None, **_more: Any) -> CompiledKernel:
    """A kernel that is not compiled; what launches it is Triton's."""
    found = object.__new__(CompiledKernel)
    about = dict.fromkeys(
        ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"), 0
    )
    about |= {"global_scratch_align": 1, "profile_scratch_align": 1, "num_ctas": 1, "shared": 0}
    about |= {"name": source.fn.__name__, "num_warps": options["num_warps"], "tensordesc_meta": None}
    found.metadata, found.src, found.name = SimpleNamespace(**about), source, source.fn.__name__
    found.packed_metadata, found.module, found.function = (options["num_warps"], 1, 0), 1, next(_NUMBERS)
    found._run = nvidia.CudaLauncher(source, found.metadata)
    return found


@contextmanager
def a_device() -> Iterator[None]:
    """Within it a GPU seems to be there; its driver counts launches and does nothing."""
    absent = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=torch.cuda.current_device,
        get_current_stream=lambda _device: 0,
        launcher_cls=nvidia.CudaLauncher,
    )
    here = _Stream()
    asked = {
        "_cuda_getDevice": lambda: 0,
        "_cuda_getCurrentRawStream": lambda _index: 0,
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_accelerator_getStream": lambda _index: here,
        "_accelerator_setStream": lambda _stream: None,
        "_accelerator_exchangeDevice": lambda index: index,
        "_accelerator_maybeExchangeDevice": lambda index: index,
    }
    before = driver._active if hasattr(driver, "_active") else None
    driver.set_active(absent)
    with ExitStack() as held:
        for name, value in asked.items():
            held.enter_context(patch.object(torch._C, name, value, create=True))
        module = SimpleNamespace(launch=_launched)
        for where, name, value in (
            (nvidia, "compile_module_from_src", lambda **_named: module),
            (nvidia, "library_dirs", list),
            (triton.compiler, "compile", _compiled),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "is_current_stream_capturing", lambda: False),
            (
                elsewhere,
                "_is_there",
                lambda device: device is not None and torch.device(device).type in ("cuda", "meta"),
            ),
            (There, "device", property(lambda _self: GPU)),
            (There, "is_cuda", True),
            (Tensor, "pin_memory", lambda tensor: tensor),
            (torch.cuda, "graph_pool_handle", lambda: (0, 1)),
            (_CUDAGraph, "__new__", lambda cls, *_keep: object.__new__(cls)),
            (_CUDAGraph, "__init__", lambda _graph, *_keep: None),
            (_CUDAGraph, "capture_begin", lambda _graph, **_how: None),
            (_CUDAGraph, "capture_end", lambda _graph: None),
            (_CUDAGraph, "replay", _replayed),
            (installed, "_FIRST", 0),
            (dispatch, "_launches", lambda _where: True),
        ):
            held.enter_context(patch.object(where, name, value, create=True))
        held.callback(dispatch._device_twin.cache_clear)
        held.callback(dispatch.kernels_for.cache_clear)
        dispatch._device_twin.cache_clear()
        dispatch.kernels_for.cache_clear()
        yield
    driver._active = before


def steps(
    recipe: str,
    buckets: Sequence[Mapping[str, tuple[int, ...]]],
    elements: int,
    captures_for: Callable[[Graphs], Captures] | None = None,
) -> tuple[list[Count], Calls, Tally]:
    """Counts of each step of rank 0 of two; each bucket has parameters of these shapes.

    Args:
        recipe: runs, in units of so many `elements`.
        buckets: in the order in which they come.
        elements: of a unit.
        captures_for: as in `ReducerEnvironment`.

    Also returns the calls and operators of the last step, by name.
    """
    shapes = {name: shape for bucket in reversed(buckets) for name, shape in reversed(bucket.items())}
    grads = {name: torch.ones(torch.Size(shape).numel()) for name, shape in shapes.items()}
    found, calls = list[Count](), Calls()
    tally = Tally(calls)
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    with a_device(), same_buckets(), tally:
        over = ProcessGroupComm(dist.group.WORLD)
        placed = stream(over, _Echo(), Device(GPU))
        rigged = rig.Rig(
            _Echo(),
            recipe,
            unit_elements=elements,
            shapes=shapes,
            place=lambda _post: placed,
            timed_every=_NEVER,
            captures_for=captures_for,
        )
        for _step in range(STEPS):
            there = {name: There(each) for name, each in grads.items()}
            calls.by_function.clear()
            calls.in_stretches = 0
            tally.clear()
            sys.setprofile(calls)
            try:
                outcome = rigged.step(there, [tuple(bucket) for bucket in buckets])
            finally:
                sys.setprofile(None)
            if outcome.error is not None:
                raise outcome.error
            found.append(Count(calls.by_function.total(), tally.launches, tally.operators, tally.collectives))
    return found, calls, tally


def matrices(number: int) -> list[dict[str, tuple[int, ...]]]:
    """Buckets of one matrix each, which is a unit; the first has a bias."""
    return [{"bias": (3,)}, *({f"{each}.weight": (SIDE, SIDE)} for each in reversed(range(number)))]


class Taken(NamedTuple):
    """By a unit, and beside its units by a step."""

    unit: Count
    step: Count


def _most(recipe: str, number: int) -> Count:
    """Of the steps with most launches the one with fewest calls: some look at what was measured, too."""
    last = steps(recipe, matrices(number), SIDE * SIDE)[0][-COUNTED:]
    return min(last, key=lambda each: (-each.launches, each.calls))


def taken(recipe: str) -> Taken:
    """By a unit, and beside its units by a step."""
    fewer, more = (_most(recipe, number) for number in (2, 3))
    unit = Count(*(many - few for many, few in zip(more, fewer, strict=True)))
    return Taken(unit, Count(*(few - 2 * one for few, one in zip(fewer, unit, strict=True))))


class Stretches(NamedTuple):
    """Calls for what lies between the collectives of a unit, and for all of the unit."""

    stretches: int
    unit: int
    launches: int


def stretches(recipe: str, captures_for: Callable[[Graphs], Captures] | None = None) -> Stretches:
    """Of a unit, in the last step."""
    found = []
    for number in (2, 3):
        counts, calls, _tally = steps(recipe, matrices(number), SIDE * SIDE, captures_for)
        found.append(Stretches(calls.in_stretches, counts[-1].calls, counts[-1].launches))
    few, many = found
    return Stretches(*(more - less for more, less in zip(many, few, strict=True)))


TABLE = Path(__file__).with_name("host_calls.md")
PAGE = Path(__file__).parents[2] / "docs" / "engineering" / "devices.md"
HEAD = (
    "| recipe | calls | launches | operators | collectives "
    "| calls, once | launches, once | operators, once | collectives, once |",
    "|---|---|---|---|---|---|---|---|---|",
)
RECIPES = (
    "dense",
    "bf16",
    "int8",
    "int4",
    "topk(ratio=0.01)",
    "leader_topk(ratio=0.01)",
    "powersgd(warmup_steps=0)",
)


def line(recipe: str, found: Taken) -> str:
    """A line of the table: what each unit takes, then what a step takes once."""
    return f"| `{recipe}` | {' | '.join(map(str, (*found.unit, *found.step)))} |"


def write() -> None:
    """Write the table anew."""
    before = TABLE.read_text(encoding="utf-8")
    lines = (*HEAD, *(line(recipe, taken(recipe)) for recipe in RECIPES))
    TABLE.write_text("\n".join(lines) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.replace(before, TABLE.read_text(encoding="utf-8")), encoding="utf-8")


def print_by_function(recipe: str) -> None:
    """What a unit calls, then what a step calls once, most often called first."""
    few, many = (steps(recipe, matrices(number), SIDE * SIDE)[1].by_function for number in (2, 3))
    unit = Counter({each: many[each] - few[each] for each in many})
    once = Counter({each: few[each] - 2 * unit[each] for each in few})
    for title, found in (("unit", unit), ("once", once)):
        print(f"{recipe}, {title}:")
        for each, number in found.most_common():
            if number:
                print(f"{number:6d} {each}")


@contextmanager
def traced() -> Iterator[Any]:
    """Within it somebody traces launches by the hook that this yields."""
    hook = triton.knobs.runtime.launch_enter_hook
    hook.add(print)
    yield hook
    hook.remove(print)


def compared(recipe: str) -> int:
    """Launch all that a recipe launches as Triton does it, too, and compare what the driver gets; then look
    if somebody who traces hears of it. Then do the same with functions that repeat their launches. Returns
    how often that held. The first launch of a kind is Triton's.
    """
    told = Counter[bool]()

    def both(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
        for number in (None, 1, 16, 17, 1 << 33):  # Triton compiles for whole numbers of a kind, too
            other = tuple(number if number and type(each) is int else each for each in arguments)
            for _again in range(2):
                launch.launch(kernel, programs, *other, **constants)
            bound = _NOW[0].handed[-1]
            launch._through_triton(kernel, programs, other, constants)
            told[bound == _NOW[0].handed[-1]] += 1
        with traced() as hook:
            launch.launch(kernel, programs, *arguments, **constants)
        told[_NOW[0].hooks[0] is hook] += 1

    def repeating(function: Any) -> Any:
        inner, once = function.unless_declined, function.__wrapped__

        def unless_declined(plain: Any, *arguments: Any, **named: Any) -> Any:
            given = (*arguments, *named.values())
            for other in (given, _moved(given), _doubled(given)):
                call = other[: len(arguments)], dict(zip(named, other[len(arguments) :], strict=True))
                handed = _handed(once, other, call)
                for _again in range(3):
                    told[_handed(partial(inner, plain), other, call) == handed] += 1
            with holding() as first:
                once(*arguments, **named)
            with holding() as again:  # who captures hears of the tables of a call that was there before
                inner(plain, *arguments, **named)
            told[list(map(id, first)) == list(map(id, again))] += 1
            with traced() as hook:
                result = inner(plain, *arguments, **named)
            told[_NOW[0].hooks[0] is hook] += 1
            return result

        def twin(*arguments: Any, **named: Any) -> Any:
            return unless_declined(launch._decline, *arguments, **named)

        twin.unless_declined = unless_declined  # type: ignore[attr-defined]
        return twin

    modules = [each for each in files(f"{KERNELS}.device").values() if hasattr(each, "launch")]
    modules.remove(launch)
    bound = [
        (module, name, each)
        for module in modules
        for name, each in vars(module).items()
        if hasattr(each, "unless_declined")
    ]
    shapes = [{"a": (SIDE, SIDE)}, {"b": (37, 61), "c": (3,), "d": (41, 43)}]
    with ExitStack() as held:
        for module in modules:
            held.enter_context(patch.object(module, "launch", both))
        for module, name, each in bound:
            held.enter_context(patch.object(module, name, each.__wrapped__))
        steps(recipe, shapes, SIDE * SIDE)
    with ExitStack() as held:
        for module, name, each in bound:
            held.enter_context(patch.object(module, name, repeating(each)))
        steps(recipe, shapes, SIDE * SIDE)
    assert told[False] == 0, f"{told[False]} launches of {recipe} differ from Triton's"
    return told[True]


def _handed(function: Any, given: Any, call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
    """What a call hands to the driver. Tables may lie elsewhere each time: what is no number, and no place in
    the tensors that are `given`, stands for one of them.
    """
    before = len(_NOW[0].handed)
    function(*call[0], **call[1])
    spans = [(each.data_ptr(), each.nbytes) for each in _flat(given) if isinstance(each, There)]

    def shown(each: Any) -> Any:
        is_number = type(each) is not int or each < _LEAST_ADDRESS
        return each if is_number or any(0 <= each - at < size for at, size in spans) else "a table"

    return [tuple(map(shown, each)) for each in _NOW[0].handed[before:]]


_LEAST_ADDRESS = 1 << 32


def _flat(given: Any) -> list[Any]:
    return [inner for each in given for inner in _flat(each)] if type(given) in (tuple, list) else [given]


def _moved(given: Any) -> Any:
    """The same with tensors that lie elsewhere."""
    if isinstance(given, There):
        with _disable_current_modes():
            return There(given.inner.clone())
    return type(given)(map(_moved, given)) if type(given) in (tuple, list) else given


def _doubled(given: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with other numbers that are no whole ones."""
    return tuple(2.0 * each if type(each) is float else each for each in given)


def main(*arguments: str) -> None:
    """See the docstring of the file."""
    recipes = [each for each in arguments if not each.startswith("--")]
    for recipe in recipes:
        if "--by-function" in arguments:
            print_by_function(recipe)
        elif "--captured" in arguments:
            print(json.dumps((stretches(recipe), stretches(recipe, Captures))))
        elif "--compared" in arguments:
            print(compared(recipe))
        else:
            print(json.dumps(taken(recipe)))
    if not arguments:
        write()


if __name__ == "__main__":
    main(*sys.argv[1:])
