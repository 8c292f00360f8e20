"""The Python blocks of the documents and docstrings run, to the letter, on two ranks."""

from __future__ import annotations

import pytest

from tests.process.scenes_pages import SCENES
from tests.support.tiers import rest
from tests.support.world import Scenes, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All blocks, on two ranks."""
    return Scenes("tests.process.scenes_pages", 2, tmp_path_factory.mktemp("pages"))


FIRST = [each for each in SCENES if each.startswith("docs/quickstart.md")]


@pytest.mark.parametrize("block", rest(SCENES, but=FIRST))
def test_a_block_of_the_documents_runs(world: Scenes, block: str) -> None:
    assert value(world, block) == [None, None]
