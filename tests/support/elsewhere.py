"""Tensors that are not on the host: whatever reads one of them there, or makes the host wait, is noted.

Such a tensor says that it is on another device ("meta", which every build of torch has, and no kernel of ours
takes), and keeps its numbers in a tensor of the CPU. All operators come to `Elsewhere`, which computes them
there. So the values are real, no fast kernel is chosen, and nothing that the host reads can be missed,
whether Python or torch asks for it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map

from gradwire.comm import Comm, Pending, Round
from tests.support.simulated import Near

WHERE = torch.device("meta")

READS = {
    "_local_scalar_dense": "a number",
    "equal": "equal",
    "is_nonzero": "a condition",
    "nonzero": "nonzero, whose size is a number of the device's",
    "masked_select": "a mask as an index",
    "_unique2": "unique",
    "unique_consecutive": "unique",
    "unique_dim": "unique",
    "bincount": "bincount",
    "repeat_interleave": "repeat_interleave",
    "_assert_async": "an assertion",
}
"""Operators for whose result, or its size, the host waits."""
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
COPIES = {"_to_copy", "copy_"}


class MixedError(RuntimeError):
    """An operator has a tensor of the host beside one from elsewhere."""


class There(Tensor):
    """A tensor elsewhere; `inner` has its numbers."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> There:
        """Shape, strides and type as `inner` has them."""
        return Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=WHERE,
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def data_ptr(self) -> int:
        """Where its numbers are: equal for two views of one place."""
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Outside of `Elsewhere` nothing may touch one."""
        raise AssertionError(f"{func} of a tensor elsewhere, outside of the mode")


def _wrapped(value: Any) -> Any:
    return There(value) if isinstance(value, Tensor) else value


def inside(value: Any) -> Any:
    """The numbers of a tensor; anything else as it is."""
    return value.inner if isinstance(value, There) else value


class Elsewhere:
    """Within it this thread's tensors may be elsewhere; `reads` are the lines that made the host wait.

    - A number, a condition, `tolist`, `numpy`, `equal`; results whose size the device would have to tell:
      `nonzero`, `unique`, masks as indices.
    - Numbers that are copied there or back, unless by a copy for which the host does not wait.
    - A tensor of the host in an operator with one from elsewhere is an error, as on a real device.
    """

    def __init__(self) -> None:
        self.reads: list[str] = []
        self._modes = _Functions(self), _Operators(self)

    def __enter__(self) -> Elsewhere:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def operated(self, func: Any, crosses: bool) -> None:
        """An operator is about to touch tensors elsewhere, or to make some; a copy may cross the border."""

    def note(self, what: str) -> None:
        """The innermost line of gradwire's is to blame."""
        frames = [frame for frame in traceback.extract_stack() if "/src/gradwire/" in frame.filename]
        blamed = f"{frames[-1].filename.rsplit('/src/', 1)[1]}:{frames[-1].lineno}" if frames else "a caller"
        self.reads.append(f"{blamed}: {what}")


class _Functions(TorchFunctionMode):
    """What torch does without an operator: making tensors from numbers, and `numpy`."""

    def __init__(self, owner: Elsewhere) -> None:
        super().__init__()
        self._owner = owner

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and _is_there(kwargs.get("device")):
            self._owner.note("numbers of the host are copied there")
            del kwargs["device"]
            return There(func(*args, **kwargs))
        if func is Tensor.new_tensor and isinstance(args[0], There):
            self._owner.note("numbers of the host are copied there")
            return There(torch.tensor(args[1], dtype=args[0].dtype))
        if func is Tensor.__setitem__ and not isinstance(args[2], Tensor) and tree_any(_is_place, args[1]):
            self._owner.note("a number of the host is copied there")
        if func is Tensor.pin_memory and isinstance(args[0], There):
            raise MixedError("only memory of the host can be pinned")
        if func in (Tensor.numpy, Tensor.tolist) and isinstance(args[0], There):
            self._owner.note(func.__name__)
            return func(args[0].inner)
        return func(*args, **kwargs)


class _Operators(TorchDispatchMode):
    def __init__(self, owner: Elsewhere) -> None:
        super().__init__()
        self._owner = owner

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        wanted = kwargs.get("device")
        touches = tree_any(lambda each: isinstance(each, There), (args, kwargs))
        if not touches and not _is_there(wanted):
            return func(*args, **kwargs)
        result_there = True
        crosses = False
        if name in READS and touches:
            self._owner.note(READS[name])
        if name in INDEXED and tree_any(_is_mask, args[1]):
            self._owner.note("a mask as an index")
        if name in COPIES:
            result_there = self._copied(name, args, kwargs)
            crosses = result_there != isinstance(args[1 if name == "copy_" else 0], There)
        elif touches:
            self._check_together(func, args, kwargs)
        if wanted is not None:
            result_there = _is_there(wanted)
            kwargs["device"] = torch.device("cpu")
        self._owner.operated(func, crosses)
        inner = func(*tree_map(inside, args), **tree_map(inside, kwargs))
        if _mutates(func):
            return _given_back(func, args, kwargs, inner)
        return tree_map(_wrapped, inner) if result_there else inner

    def _copied(self, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
        """Note a copy between here and there; whether its result is there."""
        if name == "copy_":
            to, source = isinstance(args[0], There), isinstance(args[1], There)
            waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            source, wanted = isinstance(args[0], There), kwargs.get("device")
            to = source if wanted is None else _is_there(wanted)
            waits = not kwargs.get("non_blocking", False)
        if source and not to and waits:
            self._owner.note("a copy to the host")
        if to and not source and waits:
            self._owner.note("numbers of the host are copied there")
        return to

    def _check_together(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """A tensor of the host may come along only as a number."""

        def is_host(each: Any) -> bool:
            return isinstance(each, Tensor) and not isinstance(each, There) and each.dim() > 0

        if tree_any(is_host, (args, kwargs)):
            raise MixedError(f"{func}: some tensors are on the host, others are not")


def _is_there(device: Any) -> bool:
    return device is not None and torch.device(device) == WHERE


def _is_place(each: Any) -> bool:
    return isinstance(each, There)


def _is_mask(each: Any) -> bool:
    return isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8)


def _mutates(func: Any) -> bool:
    return any(each.alias_info is not None and each.alias_info.is_write for each in func._schema.arguments)


def _given_back(func: Any, args: Any, kwargs: dict[str, Any], inner: Any) -> Any:
    """What an operator in place returns: the tensor that it wrote."""
    named = {each.name: each for each in func._schema.arguments}
    written = [
        kwargs.get(name, args[place] if place < len(args) else None)
        for place, name in enumerate(named)
        if (alias := named[name].alias_info) is not None and alias.is_write
    ]
    if not func._schema.returns:
        return None
    return written[0] if len(written) == 1 else tuple(written)


class Carrying(Comm):
    """`Comm` for tensors elsewhere over one for tensors of the host."""

    def __init__(self, comm: Comm) -> None:
        self.rank, self.world, self._comm = comm.rank, comm.world, comm

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """The same round of the numbers inside; what a transport does is its own affair."""
        with torch.utils._python_dispatch._disable_current_modes():
            return self._comm.issue(round_, inside(tensor), inside(out))


class Far(Near):
    """A simulated device whose tensors are elsewhere."""

    where = WHERE

    def pinned(self, like: Tensor) -> Tensor:
        """See `Device.pinned`."""
        return torch.empty(like.shape, dtype=like.dtype, device="cpu")
