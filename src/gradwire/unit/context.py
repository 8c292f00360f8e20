"""The context of an exchange: its unit, rank and step, its state, and its random numbers."""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Hashable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from gradwire.errors import WireError
from gradwire.granularity import ON_HOST, Granularity
from gradwire.kernels.dispatch import LOOKING, Kernels

T = TypeVar("T")
V = TypeVar("V")

_MOST_CONSTANTS = 64
"""Values that a unit keeps (`ExchangeContext.once`)."""


@dataclass(frozen=True)
class Part:
    """The part of a parameter in a unit: elements [start, stop) of `name`, which has this `shape`."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """True if this part is the whole parameter."""
        return self.numel == math.prod(self.shape)


@dataclass(frozen=True)
class Fates:
    """Fates of the gradients of the last exchanges, by parameter name.

    - `dropped`: they were cleared before an optimizer used them. The memory goes back to what it was.
    - `open`: they still stand, and no optimizer has used them yet.
    - All others are final: their optimizer has stepped.
    - `made`: whether an optimizer has stepped at all, so that the exchanges made a step.
    """

    dropped: frozenset[str] = frozenset()
    open: frozenset[str] = frozenset()
    made: bool = True


class WayBack(Generic[V]):
    """The values that open parameters had before their first exchange that is still open, by name and kind.

    >>> way_back = WayBack[int]()
    >>> way_back.roll_back("w", Fates(open=frozenset({"w"}), made=False), {"unsent": 1})
    {}
    >>> way_back.roll_back("w", Fates(dropped=frozenset({"w"}), made=False), {"unsent": 2})
    {'unsent': 1}
    """

    def __init__(self) -> None:
        self.held: dict[str, dict[str, V]] = {}

    def roll_back(
        self,
        name: str,
        fates: Fates,
        replaced: Mapping[str, V],
        keep: Callable[[V], V] = lambda value: value,
    ) -> Mapping[str, V]:
        """Values to restore for the parameter `name`: those before its dropped exchanges; none unless it was
        dropped.

        `replaced` are the values before the last exchange, by kind. `keep` copies a value that will be
        overwritten.
        """
        held = self.held.pop(name, {})
        if name in fates.open:
            self.held[name] = {kind: keep(old) for kind, old in replaced.items() if kind not in held} | held
        return {**replaced, **held} if name in fates.dropped else {}


class ExchangeState:
    """An exchange's own state by parameter, such as PowerSGD's factors; the same on all ranks.

    A tensor that a step puts here becomes visible when the step is committed.

    >>> import torch
    >>> kept = ExchangeState()
    >>> kept.put("Q", "weight", torch.ones(2))
    >>> kept.get("Q", "weight") is None
    True
    >>> kept.commit()
    >>> kept.get("Q", "weight")
    tensor([1., 1.])
    """

    def __init__(self) -> None:
        self.committed: dict[str, dict[str, Tensor]] = {}
        self._working: dict[str, dict[str, Tensor]] = {}
        self._replaced: dict[str, dict[str, Tensor | None]] = {}
        """Tensors that the last commit replaced, by parameter and kind; `None` for a kind that was new."""
        self._way_back = WayBack[Tensor | None]()

    def get(self, kind: str, name: str) -> Tensor | None:
        """The tensor of the last committed step, read only; `None` if there is none."""
        return self.committed.get(kind, {}).get(name)

    def put(self, kind: str, name: str, tensor: Tensor) -> None:
        """Store a tensor for the next step, under `kind` and the parameter's `name`; the caller must not
        change it any more.
        """
        self._working.setdefault(kind, {})[name] = tensor

    def commit(self) -> None:
        """Make visible the tensors that were put since the last commit."""
        self._replaced = {}
        for kind, tensors in self._working.items():
            known = self.committed.setdefault(kind, {})
            for name in tensors:
                self._replaced.setdefault(name, {})[kind] = known.get(name)
            known.update(tensors)
        self.discard()

    def begin(self) -> None:
        """Make the last commit final, except for open parameters."""
        self._replaced = {}

    def roll_back(self, fates: Fates) -> None:
        """Undo the last commit, and earlier open ones, for dropped parameters: see `FlatBuffer.roll_back`."""
        for name in self._replaced.keys() | self._way_back.held.keys():
            before = self._way_back.roll_back(name, fates, self._replaced.get(name, {}))
            for kind, old in before.items():
                self._put_back(kind, name, old)
        self._replaced = {}

    def _put_back(self, kind: str, name: str, old: Tensor | None) -> None:
        if old is not None:
            self.committed.setdefault(kind, {})[name] = old
        else:
            self.committed.get(kind, {}).pop(name, None)

    def final(self) -> dict[str, dict[str, Tensor]]:
        """The committed state by kind and parameter, without open exchanges."""
        found = ExchangeState()
        found.committed = {kind: dict(tensors) for kind, tensors in self.committed.items()}
        for name, before in self._way_back.held.items():
            for kind, old in before.items():
                found._put_back(kind, name, old)
        return {kind: tensors for kind, tensors in found.committed.items() if tensors}

    def adopt(self, name: str, other: ExchangeState, where: torch.device) -> None:
        """Take over the committed state of a parameter.

        Args:
            name: of the parameter.
            other: has the state.
            where: the device to which it is copied.
        """
        for kind, tensors in other.committed.items():
            if name in tensors:
                self.committed.setdefault(kind, {})[name] = tensors[name].to(where)
        held = other._way_back.held
        if name in held:
            self._way_back.held[name] = {
                kind: None if old is None else old.to(where) for kind, old in held[name].items()
            }

    def discard(self) -> None:
        """Forget the tensors that were put since the last commit."""
        self._working = {}


@dataclass(frozen=True)
class Replicated:
    """Values of one parameter that all replicas share, bit for bit; read only.

    - `parameter`: the model's parameter.
    - `group`: the optimizer's options for it.
    - `state`: the optimizer's state of it, empty before its first step.
    - `optimizer`: the optimizer's type.
    """

    parameter: Tensor
    group: Mapping[str, Any]
    state: Mapping[str, Any]
    optimizer: type


Replicas = Callable[[str], Replicated | None]
"""Function from a parameter's name to its `Replicated`; `None` if nothing is known, as without an
optimizer."""


def read_by(read: Callable[[Tensor], Tensor], replicas: Replicas) -> Replicas:
    """`replicas` with parameters and states copied by `read`."""

    def found(name: str) -> Replicated | None:
        known = replicas(name)
        if known is None:
            return None
        state = {
            key: read(value) if isinstance(value, Tensor) else value for key, value in known.state.items()
        }
        return replace(known, parameter=read(known.parameter), state=state)

    return found


def _unknown(_name: str) -> None:
    return None


@dataclass(frozen=True)
class Coded:
    """The codes of a unit that was encoded bucket by bucket (`gradwire.step.ahead`); x has the rest already.

    By segment (`gradwire.exchange.scatter_reduce`): `rows` are sent, and `land` decodes the means of all
    owners into the buckets.
    """

    rows: tuple[Tensor, ...]
    land: tuple[Callable[[Tensor], None], ...]


See = Callable[[Tensor, str], None]
"""Function that is told whether a payload is valid, as a bool (), with the complaint in case it is not."""


def refuse(sound: Tensor, complaint: str) -> None:
    """Raise `WireError` with the `complaint` unless `sound`, for which the host waits.

    >>> refuse(torch.tensor(True), "nothing")
    """
    if not bool(sound):
        raise WireError(complaint)


@dataclass(frozen=True)
class ExchangeContext:
    """Unit, rank and step of an exchange, and everything else that it may use beside its tensor.

    `step` counts committed steps, which are the optimizer's: several exchanges before one optimizer step have
    the same number. `flat_buffer` is the number of the unit's flat buffer, and `unit` its own number in that.
    An exchange that bypasses the flat buffers has the flat buffer -1, and its number among all such exchanges
    of the step as its unit. `parts` of parameters make up the unit, in order; none means one that has
    no name. `unsent` (numel,) is what the last committed step left of the unit on this rank, to be read only.
    `replicas` returns what all ranks hold alike of a parameter. Gradients arrive multiplied by `scale`. Where
    parameters have a shorter type than the one in which gradients are summed, it is `narrow`, and values
    travel in it unless an option asks for another type. `see` is told whether payloads of peers are valid: it
    raises at once or, where the host does not wait for the device, notes it for the status vote. Kernels that
    take `mark`, int32 (1,), set it to 1 instead; it is `None` where the host waits. `granularity` suits the
    device that the unit is on, or the CPU. `constants` belong to the unit, and outlive the step. `coded` says
    what the unit sends, and where its mean goes, if it was encoded as it came. `kernels` are for contiguous
    tensors of the unit's device and type; by default they look at each tensor.
    """

    step: int
    unit: int
    rank: int
    world: int
    seed: int = 0
    _: KW_ONLY
    flat_buffer: int = 0
    parts: tuple[Part, ...] = ()
    scale: float = 1.0
    narrow: torch.dtype | None = None
    unsent: Tensor | None = field(default=None, compare=False, repr=False)
    kept: ExchangeState = field(default_factory=ExchangeState, compare=False, repr=False)
    replicas: Replicas = field(default=_unknown, compare=False, repr=False)
    see: See = field(default=refuse, compare=False, repr=False)
    mark: Tensor | None = field(default=None, compare=False, repr=False)
    granularity: Granularity = field(default=ON_HOST, repr=False)
    coded: Coded | None = field(default=None, compare=False, repr=False)
    kernels: Kernels = field(default=LOOKING, compare=False, repr=False)
    constants: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @property
    def lane(self) -> int:
        """Former name of `flat_buffer`, deprecated."""
        warnings.warn("ExchangeContext.lane is now flat_buffer", DeprecationWarning, stacklevel=2)
        return self.flat_buffer

    def with_constants(self, constants: dict[Hashable, Any]) -> ExchangeContext:
        """Let `once` keep its values in `constants`, which belong to the unit. Changes the context in place.

        A context that is derived from it (`dataclasses.replace`) keeps its values by itself.
        """
        object.__setattr__(self, "constants", constants)
        return self

    def at(
        self,
        step: int,
        *,
        scale: float = 1.0,
        unsent: Tensor | None = None,
        see: See = refuse,
        mark: Tensor | None = None,
        coded: Coded | None = None,
    ) -> ExchangeContext:
        """Context of the same unit in a step. The arguments are all fields that differ from step to step,
        with their meaning.

        >>> there = ExchangeContext(step=0, unit=3, rank=0, world=2).at(7, scale=2.0)
        >>> there.step, there.unit, there.scale
        (7, 3, 2.0)
        """
        # `dataclasses.replace` sets each field anew, for every unit in every step.
        there = object.__new__(ExchangeContext)
        there.__dict__.update(
            self.__dict__, step=step, scale=scale, unsent=unsent, see=see, mark=mark, coded=coded
        )
        return there

    def within(
        self,
        unit: int,
        parts: tuple[Part, ...],
        constants: dict[Hashable, Any],
        unsent: Tensor | None = None,
    ) -> ExchangeContext:
        """Context of something within this unit in the same step, such as a shard, which a codec takes for a
        unit. The arguments are the fields that differ, with their meaning.

        >>> shard = ExchangeContext(step=7, unit=3, rank=0, world=2).within(6, (), {})
        >>> shard.step, shard.unit
        (7, 6)
        """
        there = object.__new__(type(self))
        there.__dict__.update(self.__dict__, unit=unit, parts=parts, constants=constants, unsent=unsent)
        return there

    def once(self, make: Callable[..., T], *of: Hashable) -> T:
        """Compute `make(self, *of)` once for this unit, and keep it while the recipe runs.

        It may depend on the unit's parts, the rank and the world, and on nothing that changes from step to
        step. An exchange without a flat buffer has another number as its unit where buckets come in
        another order.

        >>> ctx = ExchangeContext(step=0, unit=0, rank=0, world=4)
        >>> def share(ctx, numel):
        ...     print("computed")
        ...     return numel // ctx.world
        >>> ctx.once(share, 100), ctx.once(share, 100)
        computed
        (25, 25)
        """
        key = (make, *of)
        if key not in self.constants:
            if len(self.constants) >= _MOST_CONSTANTS:  # of codecs that are made anew in each step
                self.constants.clear()
            self.constants[key] = make(self, *of)
        found: T = self.constants[key]
        return found

    def sizes(self, numel: int) -> tuple[int, ...]:
        """Elements of the parts of a unit of `numel` elements."""
        sizes = tuple([part.numel for part in self.parts]) or (numel,)
        assert sum(sizes) == numel, f"parts of {sizes} do not make up {numel} elements"
        return sizes

    def shared(self) -> torch.Generator:
        """A CPU generator that is in the same state on all ranks, and never the global one."""
        return self._generator(-1)

    def private(self) -> torch.Generator:
        """A CPU generator of this rank alone."""
        return self._generator(self.rank)

    def _generator(self, who: int) -> torch.Generator:
        number = number_from(self.seed, self.step, self.flat_buffer, self.unit, who)
        return torch.Generator("cpu").manual_seed(number >> 1)


def number_from(*key: int | str) -> int:
    """A number of 64 bits that looks random and is the same on all ranks and machines.

    >>> number_from("phase", 0, 1) % 6
    4
    """
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def is_dense(tensor: Tensor) -> bool:
    """True if the elements of a tensor fill a piece of memory without gap or overlap, in any order.

    >>> is_dense(torch.zeros(4, 6).T), is_dense(torch.zeros(4, 6)[:, ::2])
    (True, False)
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
