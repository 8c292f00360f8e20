"""Values that reach parameters otherwise than by an optimizer: loaded, or written in place."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradwire.agreement.agree import checksum
from gradwire.errors import GradwireWarning
from gradwire.sources.observe import leave_out_of_copies
from gradwire.step.optimizers import local

_EDITED = (
    "parameters of this model were written between an optimizer's step and the next forward pass. If their "
    "values are back as they were, as after an evaluation with averaged weights, nothing is wrong. If not, a "
    "round takes the change for something learned, and the outer optimizer goes on in its direction: bring "
    "new values in by load_state_dict, on all ranks. If another optimizer has stepped, call "
    "wire.switch_optimizer(optimizer)"
)
_ASSIGNED = (
    "load_state_dict(assign=True) puts other parameters in the place of those that rounds and the optimizer "
    "are about: load without assign=True, or load before gradwire.outer"
)


class _Mark(NamedTuple):
    """A tensor before a load."""

    state: tuple[int, int, int]
    """Identity, memory and version of the tensor: a load changes it, whatever the values."""
    checksum: int | None
    """`None` if something may have been written into it before the load."""


class Loads:
    """Watcher for loads into a module: `load_state_dict` of it, its wrappers and its parts, and version
    counters.

    A load counts once training goes on, or a call reads the parameters. Several loads in a row count as one.
    If all values are as they were before the first, none counts.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], allowed: Callable[[], None]) -> None:
        """Watch the trained `parameters`, by name. `allowed` raises if nothing may be loaded now."""
        self._parameters, self._allowed = parameters, allowed
        self._noted: dict[int, int] = {}
        """Version counters of parameters when an optimizer had stepped, or this replica had landed."""
        self._marks: dict[str, _Mark] = {}
        """Tensors that may have been loaded, with their states before."""
        self._known: Mapping[str, int] = {}
        """Checksums that tensors had when a checkpoint was taken up, until an optimizer steps."""
        self._has_warned = False
        self._handles: list[RemovableHandle] = []

    def watch(self, module: nn.Module, buffers: Iterable[str]) -> None:
        """Register hooks on `module` and on all modules inside that hold parameters or some of `buffers`.

        `load_state_dict` of a part calls the hooks of that part alone.
        """
        first: dict[int, str] = {}
        held: defaultdict[str, dict[str, str]] = defaultdict(dict)
        every = [
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ]
        ours = {*self._parameters, *buffers}
        for path, tensor in every:
            owner, _, leaf = path.rpartition(".")
            if (name := first.setdefault(id(tensor), path)) in ours:
                held[owner][leaf] = name
        for owner, names in held.items():
            part = module.get_submodule(owner)
            register: Callable[[Any], RemovableHandle] = part.register_load_state_dict_pre_hook
            hook = register(partial(self._before, names))
            leave_out_of_copies(part, [hook])
            self._handles.append(hook)
        self.note(self._parameters.values())

    def retire(self) -> None:
        """Stop watching, and remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def _before(
        self, names: Mapping[str, str], part: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any
    ) -> None:
        """Pre-hook of `load_state_dict`: note that the module `part` is about to be loaded, whose tensors
        have `names`. Raises if nothing may be loaded now, and `ValueError` with `assign=True`.
        """
        self._allowed()
        if metadata.get("assign_to_params_buffers", False):
            raise ValueError(_ASSIGNED)
        # Counters say nothing any more once the first load has moved them.
        is_known = bool(self._marks) or not self._has_moved()
        for leaf, name in names.items():
            tensor: Tensor | None = (part._parameters | part._buffers).get(leaf)
            if tensor is None or name in self._marks:
                continue
            here = local(tensor)
            # Of a tensor that is loaded into itself, values have been written before, as DCP does.
            loaded = state.get(prefix + leaf)
            is_itself = isinstance(loaded, Tensor) and local(loaded).data_ptr() == here.data_ptr()
            before = self._known.get(name)
            if before is None and is_known and not is_itself:
                before = checksum(here)
            self._marks[name] = _Mark(_state(tensor), before)

    @property
    def is_pending(self) -> bool:
        """True if something may have been loaded since `taken` was last called."""
        return bool(self._marks)

    def taken(self, buffers: Mapping[str, Tensor]) -> dict[str, int]:
        """Names of tensors loaded since the last call, with checksums of their values.

        Empty if all values are as they were. `buffers` are the present ones.
        """
        marks, self._marks = self._marks, {}
        if not marks:
            return {}
        here: Mapping[str, Tensor] = {**buffers, **self._parameters}
        loaded = {
            name: checksum(local(here[name]))
            for name, mark in marks.items()
            if name in here and mark.state != _state(here[name])
        }
        self.note(self._parameters.values())
        return loaded if any(marks[name].checksum != now for name, now in loaded.items()) else {}

    def taken_up(self, buffers: Mapping[str, Tensor]) -> None:
        """Note that a checkpoint was taken up: loading the same values beside it counts as no load."""
        here: Mapping[str, Tensor] = {**buffers, **self._parameters}
        self._marks, self._known = {}, {name: checksum(local(each)) for name, each in here.items()}
        self.note(self._parameters.values())

    # -- written in place

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Take the present `parameters` as expected: gradwire itself has written them."""
        each = list(parameters)
        self._noted.update(zip(map(id, each), [one._version for one in each], strict=True))

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that `optimizer` has stepped: its parameters have changed, and not by a load."""
        self._known = {}
        self.note([each for group in optimizer.param_groups for each in group["params"]])

    def look(self) -> None:
        """A forward pass begins, the first one since a step: warn once if parameters were written since.

        Writes through `.data` and by fused optimizers move no version counter.
        """
        if not (self._has_warned or self._marks) and self._has_moved():
            self._has_warned = True
            warnings.warn(_EDITED, GradwireWarning, stacklevel=2)

    def _has_moved(self) -> bool:
        noted = self._noted
        return any(each._version != noted[id(each)] for each in self._parameters.values())


def _state(tensor: Tensor) -> tuple[int, int, int]:
    version = 0 if tensor.is_inference() else tensor._version
    return id(tensor), version, local(tensor).data_ptr()
