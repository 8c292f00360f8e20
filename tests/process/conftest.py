"""Ranks for scenes. They are forked from a process that imports what they need while tests are collected."""

from multiprocessing import forkserver

import pytest

import tests.support.ranks  # says what to import  # noqa: F401
from tests.support.world import Ranks

forkserver.ensure_running()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Two ranks for the scenes of a file."""
    return Ranks(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Three of them: no power of two, so that 1/W is not exact."""
    return Ranks(3, tmp_path_factory.mktemp("three"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Four of them."""
    return Ranks(4, tmp_path_factory.mktemp("four"))
