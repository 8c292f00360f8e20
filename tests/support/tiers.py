"""Tiers: `make test` runs a part of the tests, and `make test-all` the rest, marked `pytest.mark.rest`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rest(values: Iterable[Any], but: Collection[Any]) -> list[Any]:
    """Values of a parameter, of which `make test` runs only those in `but`."""
    every = list(values)
    unknown = [each for each in but if each not in every]
    assert not unknown, f"no such values: {unknown}"
    return [each if each in but else pytest.param(each, marks=pytest.mark.rest) for each in every]
