"""Hugging Face Trainer: attaches when training begins, saves and resumes with the Trainer's checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gradwire._api.wire import Wire
from gradwire.integrations.optional import base
from gradwire.integrations.rank_files import load, save
from gradwire.integrations.training import attached
from gradwire.recipes import Composition, Recipe


class GradwireCallback(base("TrainerCallback", "transformers")):  # type: ignore[misc]  # not known here
    """Carries the gradients of a `transformers.Trainer`; `wire` is the handle once training has begun.

    `recipe` and `options` are those of `gradwire.attach`. Every rank writes its state into the folder
    `checkpoint-STEP`. A resumed run reads it from `TrainingArguments.resume_from_checkpoint` if that names a
    folder, else from the folder of that step in `output_dir`. On a single process it sends nothing.

    Whenever the Trainer logs the training loss, `wire.metrics()` is logged with it, by all that
    `TrainingArguments.report_to` names.

    Example::

        trainer = Trainer(model, args, train_dataset=dataset)
        trainer.add_callback(GradwireCallback(trainer, "int8"))
        trainer.train(resume_from_checkpoint=...)
    """

    def __init__(self, trainer: Any, recipe: str | Recipe | Composition = "auto", **options: Any) -> None:
        super().__init__()
        self.wire: Wire | None = None
        self._trainer, self._recipe, self._options = trainer, recipe, options

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Attach, because model and optimizer are in their final form now; resume."""
        model, optimizer = self._trainer.model_wrapped, self._trainer.optimizer
        self.wire = attached(self.wire, args.world_size, model, optimizer, self._recipe, **self._options)
        # Callbacks that report are asked in this order, and were there before: what is added must be first.
        order = self._trainer.callback_handler.callbacks
        order.remove(self)
        order.insert(0, self)
        if state.global_step > 0:
            given = args.resume_from_checkpoint
            load(self.wire, given if _is_folder(given) else _folder(args, state))

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        """Add the metrics to what is logged of a training step; not to an evaluation or a summary."""
        if self.wire is not None and logs is not None and "loss" in logs:
            logs.update(self.wire.metrics())

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save, after the Trainer has written the rest of the checkpoint."""
        if self.wire is not None and not args.save_only_model:
            save(self.wire, _folder(args, state))


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _is_folder(given: Any) -> bool:
    return isinstance(given, str) and os.path.isdir(given)
