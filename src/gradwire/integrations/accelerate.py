"""Hugging Face Accelerate: gradwire's state in `save_state` and `load_state`.

Nothing else is needed: `gradwire.attach` takes the model and the optimizer that `prepare` returns.
"""

from __future__ import annotations

from typing import Any

from gradwire.integrations.rank_files import NAME, load, save
from gradwire.wire import Wire


def register_for_checkpointing(accelerator: Any, wire: Wire, name: str = NAME) -> None:
    """Let `accelerator.save_state` write every rank's state of `wire`, and `load_state` take it up.

    `Accelerator.register_for_checkpointing(wire)` would keep rank 0's alone. Every rank writes a file of its
    own into the checkpoint's folder, so nothing is sent. Several wires need a `name` each.

    Example::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        wire = gradwire.attach(model, optimizer)
        register_for_checkpointing(accelerator, wire)
    """
    accelerator.register_save_state_pre_hook(lambda _models, _weights, folder: save(wire, folder, name))
    accelerator.register_load_state_pre_hook(lambda _models, folder: load(wire, folder, name))
