"""What the callbacks of Trainer and Lightning do, by fakes of what a callback sees of these frameworks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

MODEL_ARGS = SimpleNamespace(world_size=1, resume_from_checkpoint=None, output_dir="", save_only_model=False)


@pytest.fixture
def callback_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The class `GradwireCallback` of an integration, as it is where the framework's base class exists."""

    def found(integration: str, framework: str, base: str) -> Any:
        for name in (framework.partition(".")[0], framework):
            fake: Any = ModuleType(name)
            monkeypatch.setitem(sys.modules, name, fake)
        setattr(fake, base, object)
        spec = find_spec(f"gradwire.integrations.{integration}")
        assert spec is not None
        assert spec.loader is not None
        module = module_from_spec(spec)  # of its own: others go on without the framework
        spec.loader.exec_module(module)
        return module.GradwireCallback

    return found


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]:
    model = torch.nn.Linear(8, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()

    return model, optimizer, step


class Reporter:
    """A callback that was there before, such as the one for W&B: it keeps what it is shown."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Nothing to do."""

    def on_log(self, _args: Any, _state: Any, _control: Any, logs: dict[str, float]) -> None:
        self.seen.append(dict(logs))


class Trainer:
    """As Hugging Face's: it hands the same dictionary to all callbacks, in their order."""

    def __init__(self, *callbacks: Any) -> None:
        self.model_wrapped, self.optimizer, self.step = trained()
        self.callback_handler = SimpleNamespace(callbacks=list(callbacks))
        self.state = SimpleNamespace(global_step=0)

    def begin(self) -> None:
        for each in self.callback_handler.callbacks:
            each.on_train_begin(MODEL_ARGS, self.state, None)

    def log(self, logs: dict[str, float]) -> None:
        for each in self.callback_handler.callbacks:
            each.on_log(MODEL_ARGS, self.state, None, logs=logs)


def test_the_trainer_s_reporters_get_the_metrics_with_the_loss(callback_of: Callable[..., Any]) -> None:
    before, after = Reporter(), Reporter()
    trainer = Trainer(before)
    callback = callback_of("transformers", "transformers", "TrainerCallback")(trainer, "topk(0.05)")
    trainer.callback_handler.callbacks += [callback, after]
    trainer.begin()
    trainer.begin()  # a second training
    assert trainer.callback_handler.callbacks == [callback, before, after]
    trainer.step()
    trainer.log({"loss": 1.0})
    trainer.log({"eval_loss": 2.0})
    for each in (before, after):
        logged, evaluated = each.seen
        assert (logged["loss"], logged["gradwire/step"]) == (1.0, 1.0)
        assert evaluated == {"eval_loss": 2.0}
    callback.wire.detach()


def test_the_trainer_s_callback_saves_and_resumes(callback_of: Callable[..., Any], tmp_path: Path) -> None:
    made = callback_of("transformers", "transformers", "TrainerCallback")
    args = SimpleNamespace(**{**vars(MODEL_ARGS), "output_dir": str(tmp_path)})
    steps = []
    for begins in (0, 3):
        trainer = Trainer()
        callback = made(trainer, "topk(0.05)")
        trainer.callback_handler.callbacks.append(callback)
        trainer.state.global_step = begins
        callback.on_train_begin(args, trainer.state, None)
        steps.append(callback.wire.report().step)
        for _ in range(3):
            trainer.step()
        trainer.state.global_step += 3
        (tmp_path / f"checkpoint-{trainer.state.global_step}").mkdir()
        callback.on_save(args, trainer.state, None)
        steps.append(callback.wire.report().step)
        callback.wire.detach()
    assert steps == [0, 3, 3, 6]


class Module:
    """As Lightning's, of which one method is called."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def log_dict(self, metrics: dict[str, float], *, on_step: bool, on_epoch: bool) -> None:
        assert (on_step, on_epoch) == (True, False)
        self.logged.append(metrics)


def fitting(model: torch.nn.Module, optimizer: Any, every: int = 0, loggers: int = 0) -> Any:
    """As Lightning's Trainer in `fit`."""
    return SimpleNamespace(
        precision_plugin=None,
        strategy=SimpleNamespace(model=model),
        world_size=1,
        optimizers=[optimizer],
        log_every_n_steps=every,
        loggers=[object()] * loggers,
        global_step=0,
    )


@pytest.mark.parametrize(
    ("every", "loggers", "steps"), [(3, 1, [3.0, 6.0]), (0, 1, []), (1, 0, [])], ids=["third", "off", "none"]
)
def test_lightning_s_loggers_get_the_metrics_when_it_logs(
    callback_of: Callable[..., Any], every: int, loggers: int, steps: list[float]
) -> None:
    callback = callback_of("lightning", "lightning.pytorch", "Callback")("topk(0.05)")
    model, optimizer, step = trained()
    trainer = fitting(model, optimizer, every, loggers)
    module = Module()
    callback.on_train_start(trainer, module)
    for batch in range(7):
        step()
        trainer.global_step += 1
        callback.on_train_batch_end(trainer, module, None, None, batch)
    assert [each["gradwire/step"] for each in module.logged] == steps
    callback.wire.detach()


def test_lightning_s_callback_saves_and_resumes(callback_of: Callable[..., Any]) -> None:
    made = callback_of("lightning", "lightning.pytorch", "Callback")
    saved, steps = None, []
    for _ in range(2):
        model, optimizer, step = trained()
        callback = made("topk(0.05)")
        if saved is not None:
            callback.load_state_dict(saved)
        callback.on_train_start(fitting(model, optimizer), Module())
        steps.append(callback.wire.report().step)
        for _ in range(3):
            step()
        saved = callback.state_dict()
        callback.wire.detach()
    assert steps == [0, 3]


def test_lightning_s_callback_resumes_once_though_training_starts_again(
    callback_of: Callable[..., Any],
) -> None:
    """A second `fit` goes on where the first one has ended."""
    callback = callback_of("lightning", "lightning.pytorch", "Callback")("topk(0.05)")
    model, optimizer, step = trained()
    trainer, steps = fitting(model, optimizer), []
    callback.on_train_start(trainer, Module())
    for _ in range(3):
        step()
    callback.load_state_dict(callback.state_dict())
    for _ in range(2):
        callback.on_train_start(trainer, Module())
        steps.append(callback.wire.report().step)
        step()
    assert steps == [3, 4]
    callback.wire.detach()
