"""Ranks for scenes, as those of `tests/process`."""

from tests.process.conftest import three, two  # fixtures  # noqa: F401
