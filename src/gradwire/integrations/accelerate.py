"""Hugging Face Accelerate: gradwire's state in `save_state` and `load_state`.

Nothing else is needed: `gradwire.attach` takes the model and the optimizer that `prepare` returns, and
`wire.log_to(accelerator)` logs to the trackers.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from gradwire._api.wire import Wire
from gradwire.integrations.rank_files import NAME, load, save

_NAMES: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()


def register_for_checkpointing(accelerator: Any, wire: Wire, name: str = NAME) -> None:
    """Let `accelerator.save_state` write every rank's state of `wire`, and `load_state` load it.

    `Accelerator.register_for_checkpointing(wire)` would keep only rank 0's state. Here every rank writes its
    own file into the checkpoint's folder, so nothing is sent. With several wires, give each a `name`. Raises
    `ValueError` for a name that is given twice.

    Example::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        wire = gradwire.attach(model, optimizer)
        register_for_checkpointing(accelerator, wire)
    """
    names = _NAMES.setdefault(accelerator, set())
    if name in names:
        raise ValueError(
            f"this accelerator has a wire called {name!r} already, and would write both to the same files; "
            "give each a name: register_for_checkpointing(accelerator, wire, 'critic')"
        )
    names.add(name)
    accelerator.register_save_state_pre_hook(lambda _models, _weights, folder: save(wire, folder, name))
    accelerator.register_load_state_pre_hook(lambda _models, folder: load(wire, folder, name))
