"""Runs in which a rank lacks kernels for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch.distributed as dist

from gradwire._api import prepare

NEVER = 10**6


class Compiling:
    """Ends after so many questions."""

    def __init__(self, questions: int) -> None:
        self._lacking, self.questions = questions, 0

    def has_ended(self) -> bool:
        self.questions += 1
        return self.questions > self._lacking


@contextmanager
def lacks_kernels(on_rank: int, steps: int) -> Iterator[Compiling]:
    """Meanwhile models are attached as if a rank needed so many steps to compile. Others have all kernels."""
    compiling = Compiling(steps)
    lacked = compiling if dist.get_rank() == on_rank else None
    with mock.patch.object(prepare, "compilation_for", return_value=lacked):
        yield compiling
