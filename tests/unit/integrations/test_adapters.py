"""What adapters of frameworks do without the framework: say what is missing, and keep wires apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire.integrations.accelerate import register_for_checkpointing
from gradwire.integrations.lightning import Gathered
from gradwire.integrations.optional import base
from gradwire.integrations.training import attached


class Accelerator:
    """As Accelerate's, of which two methods are used."""

    def __init__(self) -> None:
        self.hooks: list[Callable[..., None]] = []

    def register_save_state_pre_hook(self, hook: Callable[..., None]) -> None:
        """Called by `save_state` with models, weights and the folder."""
        self.hooks.append(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., None]) -> None:
        """Called by `load_state` with models and the folder."""
        self.hooks.append(hook)


class Wire:
    """A handle that is only saved and loaded."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    def save(self, folder: Path) -> int:
        """Leave the folder, and nothing in it."""
        folder.mkdir()
        return 0

    def load(self, folder: Path) -> int:
        """Note its name."""
        self.loaded.append(folder.name)
        return 0


def test_two_wires_of_one_accelerator_need_a_name_each(tmp_path: Path) -> None:
    accelerator = Accelerator()
    wire: Any = Wire()
    register_for_checkpointing(accelerator, wire)
    with pytest.raises(ValueError, match="has a wire called 'gradwire' already"):
        register_for_checkpointing(accelerator, wire)
    register_for_checkpointing(accelerator, wire, "critic")
    register_for_checkpointing(Accelerator(), wire)
    for save in accelerator.hooks[::2]:
        save([], [], tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["critic", "gradwire"]
    for load in accelerator.hooks[1::2]:
        load([], tmp_path)
    assert wire.loaded == ["gradwire", "critic"]


def test_a_class_of_a_framework_that_is_there_is_that_class() -> None:
    assert base("Path", "no_such_framework", "pathlib") is Path


def test_a_class_of_a_framework_that_is_not_there_says_what_to_install() -> None:
    class Callback(base("Callback", "no_such_framework.callbacks")):  # type: ignore[misc]  # not known here
        """Made without its framework."""

    with pytest.raises(ImportError, match="this needs no_such_framework: pip install no_such_framework"):
        Callback(1, key=2)


def test_a_framework_that_is_broken_is_not_taken_for_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_framework.py").write_text("import no_such_module_of_its_own")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_of_its_own"):
        base("Callback", "broken_framework")


@pytest.mark.filterwarnings("ignore:momentum is no longer applied")  # dgc's, after the switch
@pytest.mark.parametrize("recipe", ["auto", "topk(0.05)", "dgc(0.1)"])
def test_one_process_needs_no_process_group_and_leaves_none(recipe: str, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wire = attached(None, 1, model, optimizer, recipe)
    assert not dist.is_initialized()
    assert attached(wire, 1, model, optimizer, recipe) is wire
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    wire.save(tmp_path)
    assert wire.load(tmp_path) == 3
    Gathered(wire).load_state_dict(Gathered(wire).state_dict())
    wire.switch("int8")
    wire.flush()
    assert wire.report().step == 3
    wire.detach()


def test_another_optimizer_of_the_same_model_is_heard_and_steps_are_counted_on() -> None:
    model, wire = torch.nn.Linear(8, 64), None
    for number in range(1, 3):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        wire = attached(wire, 1, model, optimizer, "dgc(0.1)")
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        assert wire.report().step == 2 * number
    doubled = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match="momentum"):
        attached(wire, 1, model, doubled, "dgc(0.1)")
    with pytest.raises(ValueError, match="optimizer"):
        attached(wire, 1, model, torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1), "dgc(0.1)")
    assert attached(wire, 1, model, optimizer, "dgc(0.1)") is wire


def test_several_processes_need_a_group_of_the_framework() -> None:
    with pytest.raises(ValueError, match="no process group"):
        attached(None, 2, torch.nn.Linear(2, 2), None, "dense")
