"""What an import loads."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module

import pytest

from gradwire import recipes
from gradwire.recipes.catalogue import MODULES as HOMES
from tests.support.source import MODULES

DENSE = """
import json, sys
import gradwire._api.attach
gradwire.recipe("dense").build()
json.dump(sorted(sys.modules), sys.stdout)
"""


@pytest.mark.rest
def test_dense_loads_no_other_recipe() -> None:
    done = subprocess.run([sys.executable, "-c", DENSE], capture_output=True, check=True, text=True)
    loaded = json.loads(done.stdout)
    assert {home for home in HOMES.values() if home in loaded} == {"gradwire.recipes.dense"}
    assert not {"gradwire.codec.gcomp", "gradwire.metric"} & set(loaded)


def test_every_recipe_is_where_the_catalogue_says() -> None:
    for module in MODULES:
        if module.name.startswith(("gradwire.recipes.", "gradwire.contrib.")):
            import_module(module.name)
    assert {entry.name: entry.build.__module__ for entry in recipes.entries()} == HOMES
