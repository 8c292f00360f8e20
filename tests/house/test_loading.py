"""What an import loads, and that names mean the same whatever has been imported before."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

from gradwire import recipes
from gradwire.recipes.catalogue import MODULES as HOMES
from tests.support.source import MODULES

EVERY_NAME = """
import json, sys
from importlib import import_module
from types import ModuleType

packages = [module for module in map(import_module, sys.argv[1:]) if hasattr(module, "__all__")]
named = {f"{each.__name__}.{name}": getattr(each, name) for each in packages for name in each.__all__}
modules = [name for name, value in named.items() if isinstance(value, ModuleType)]
json.dump({"modules": modules, "recipe": str(sys.modules["gradwire"].recipe("dense"))}, sys.stdout)
"""

DENSE = """
import json, sys
import gradwire._api.attach
gradwire.recipe("dense").build()
json.dump(sorted(sys.modules), sys.stdout)
"""


def found_by(program: str, *arguments: str) -> object:
    """What a fresh process prints."""
    command = [sys.executable, "-c", program, *arguments]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def test_no_public_name_is_shadowed_by_a_module() -> None:
    # The kernels' packages export modules on purpose.
    importable = [module.name for module in MODULES if not module.name.endswith("__main__")]
    importable = [name for name in importable if not name.startswith("gradwire.kernels")]
    found = found_by(EVERY_NAME, *importable)
    assert found == {"modules": ["gradwire.recipes"], "recipe": "dense"}


def test_dense_loads_no_other_recipe() -> None:
    loaded = found_by(DENSE)
    assert isinstance(loaded, list)
    assert {home for home in HOMES.values() if home in loaded} == {"gradwire.recipes.dense"}


def test_dense_loads_no_other_exchange() -> None:
    loaded = found_by(DENSE)
    assert isinstance(loaded, list)
    exchanges = {name for name in loaded if name.startswith("gradwire.exchange.")}
    assert exchanges == {
        f"gradwire.exchange.{name}" for name in ("base", "compose", "dense", "state", "turns")
    }
    assert not {"gradwire.codec.gcomp", "gradwire.metric"} & set(loaded)


def test_every_recipe_is_where_the_catalogue_says() -> None:
    for module in MODULES:
        if module.name.startswith(("gradwire.recipes.", "gradwire.contrib.")):
            import_module(module.name)
    assert {entry.name: entry.build.__module__ for entry in recipes.entries()} == HOMES
