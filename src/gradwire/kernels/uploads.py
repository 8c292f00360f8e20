"""Uploads of small tensors to a device without making the host wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def sent_to(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy `numbers` to `device` without making the host wait; returns `numbers` itself if they are there.

    The copy goes through pinned memory: from other memory, it would wait for all work queued on the device.

    >>> sent_to(torch.tensor([1.0]), torch.device("cpu"))
    tensor([1.])
    """
    if device.type == "cuda" and numbers.device.type == "cpu":
        numbers = numbers.pin_memory()  # which torch keeps until it has been read
    return numbers.to(device, non_blocking=True)


def stream_of(device: torch.device) -> int:
    """Number of the current stream of `device`; 0 on the CPU. Uploads are ordered within a stream only."""
    # As Triton asks for it: a `torch.cuda.Stream` would cost as much as a launch.
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


class TooEarly(Exception):
    """A graph that is captured needs something that is not there yet. Were it made now, its kernels and
    copies would be recorded, and others would read it before a replay has run them.
    """


class _Holding(threading.local):
    """The results that this thread's calls of `kept_by_stream` have returned, while it is `holding` them."""

    results: list[Any] | None = None


HOLDING = _Holding()


@contextmanager
def holding() -> Iterator[list[Any]]:
    """Yield a list of the results that `kept_by_stream` returns within it on this thread.

    A graph reads them when it is replayed, and the caches may have dropped them by then. A call whose result
    is not kept yet raises `TooEarly`.
    """
    outside, HOLDING.results = HOLDING.results, []
    try:
        yield HOLDING.results
    finally:
        HOLDING.results = outside


def kept_by_stream(maxsize: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function that uploads to the device given as its last argument: `lru_cache`, one result per
    stream.

    Another stream's result may not have arrived on the device yet.
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        by_place: Callable[..., R] = function

        @lru_cache(maxsize)
        def kept(_stream: int, *arguments: Any) -> R:
            if HOLDING.results is not None:
                raise TooEarly
            return by_place(*arguments)

        @wraps(function)
        def call(*arguments: P.args, **named: P.kwargs) -> R:
            assert not named, "by place, so that a result has one key"
            device = arguments[-1]
            assert isinstance(device, torch.device), "the last one"
            result = kept(stream_of(device), *arguments)
            if HOLDING.results is not None:
                HOLDING.results.append(result)
            return result

        return call

    return decorated
