"""The Python blocks of the documents and docstrings run, to the letter, on two ranks."""

from __future__ import annotations

import pytest

from tests.process.scenes_pages import BLOCKS, run
from tests.support.pages import Block
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process


FIRST = [each for each in BLOCKS if str(each).startswith("docs/quickstart.md")]


@pytest.mark.parametrize("block", rest(BLOCKS, but=FIRST), ids=str)
def test_a_block_of_the_documents_runs(two: Ranks, block: Block) -> None:
    two(run, block)
