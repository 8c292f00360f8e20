"""Lightning's Trainer: attaches when training starts, saves and resumes with Lightning's checkpoints.

Fabric needs no callback: `gradwire.attach` takes what `fabric.setup` returns, and `Gathered` is for
`fabric.save` and `fabric.load`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from gradwire._api.wire import Wire
from gradwire.integrations.optional import base
from gradwire.integrations.training import attached
from gradwire.recipes import Composition, Recipe

_BASE: Any = base("Callback", "lightning.pytorch", "pytorch_lightning")


class Gathered:
    """The states of all ranks in one, for code that asks every rank for a state and saves rank 0's.

    Both methods are collectives. Saving sends every rank's state to rank 0; a state has the size of the
    gradient, or a multiple with momentum. If a checkpoint is a folder, `gradwire.integrations.rank_files`
    sends nothing.

    Example, with Lightning Fabric::

        state = {"model": model, "optimizer": optimizer, "wire": Gathered(wire)}
        fabric.save("checkpoint.ckpt", state)
        fabric.load("checkpoint.ckpt", state)
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks on rank 0, and an empty list on all others."""
        group = self._wire.attached.source.group
        mine = self._wire.state_dict()
        if group.size() == 1:
            return {"ranks": [mine]}
        states: list[Any] | None = [None] * group.size() if group.rank() == 0 else None
        dist.gather_object(mine, states, group=group, group_dst=0)
        return {"ranks": states or []}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load this rank's state, or on another number of ranks the mean, as `Wire.load_state_dict` does."""
        self._wire.load_state_dict(saved.get("ranks", saved))


class GradwireCallback(_BASE):  # type: ignore[misc]  # not known here
    """Carries the gradients of a `lightning.Trainer(strategy="ddp")`; `wire` is the handle during `fit`.

    `recipe` and `options` are those of `gradwire.attach`. The states of all ranks travel to rank 0 whenever a
    checkpoint is saved, because Lightning writes one file. On a single process it sends nothing.

    Every `Trainer(log_every_n_steps=…)` steps, `wire.metrics()` goes to the Trainer's loggers.

    Example::

        trainer = Trainer(strategy="ddp", devices=2, callbacks=[GradwireCallback("int8")])
        trainer.fit(module, loader, ckpt_path="last")
    """

    def __init__(self, recipe: str | Recipe | Composition = "auto", **options: Any) -> None:
        super().__init__()
        self.wire: Wire | None = None
        self._recipe, self._options = recipe, options
        self._saved: Mapping[str, Any] | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach, because model and optimizers are in their final form now; resume."""
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        options: dict[str, Any] = {"scaler": scaler, **self._options}
        model, world = trainer.strategy.model, trainer.world_size
        self.wire = attached(self.wire, world, model, trainer.optimizers, self._recipe, **options)
        saved, self._saved = self._saved, None
        if saved is not None:
            Gathered(self.wire).load_state_dict(saved)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Log the metrics in steps in which Lightning writes to its loggers."""
        every = trainer.log_every_n_steps
        if self.wire is not None and trainer.loggers and every and trainer.global_step % every == 0:
            pl_module.log_dict(self.wire.metrics(), on_step=True, on_epoch=False)

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint; a collective, as Lightning calls it on all ranks."""
        return {} if self.wire is None else Gathered(self.wire).state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Keep the state of a checkpoint until training starts, because the model is not wrapped yet."""
        self._saved = state_dict
