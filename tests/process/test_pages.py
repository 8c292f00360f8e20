"""The Python blocks of the documents and docstrings run, to the letter, on two ranks."""

from __future__ import annotations

import pytest

from tests.process.scenes_pages import SCENES
from tests.support.ranks import Results, perform, value

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All blocks, on two ranks."""
    return perform("tests.process.scenes_pages", 2, tmp_path_factory.mktemp("pages"))


@pytest.mark.parametrize("block", SCENES)
def test_a_block_of_the_documents_runs(world: Results, block: str) -> None:
    assert value(world, block) == [None, None]
