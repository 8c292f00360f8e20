"""The work of a collective that is Python code: who waits for it, in Python or in C++, sees how it ended."""

from __future__ import annotations

import threading
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future

from gradwire.errors import TransportError
from gradwire_lab.emulate.python_work import Carried

TELLS_ERRORS = pytest.mark.skipif(
    torch.__version__.startswith("2.11."),
    reason="torch 2.11 cannot give the error of a work in C++ to Python",
)


def carried_elsewhere(work: Carried) -> Carried:
    threading.Thread(target=work.carry).start()
    return work


def error_in_cpp(work: Carried) -> str | None:
    """Of the future, as C++ sees it: what torch stores for Python's `wait` alone is a value there."""
    native: Any = _create_work_from_future(work.get_future())
    error = native.exception()
    assert native.is_success() == (error is None)
    return None if error is None else str(error)


@TELLS_ERRORS
def test_it_ends_with_the_tensors() -> None:
    tensors = [torch.ones(2)]
    work = Carried(lambda: tensors)
    assert not work.is_completed()
    carried_elsewhere(work)
    assert work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert work.result() == work.get_future().wait() == tensors
    assert work.exception() is error_in_cpp(work) is None


@TELLS_ERRORS
@pytest.mark.parametrize("error", [TransportError("the peer is gone"), SystemExit("of a user's codec")])
def test_an_error_is_raised_by_wait_and_is_one_in_cpp(error: BaseException) -> None:
    def fail() -> list[Tensor]:
        raise error

    work = carried_elsewhere(Carried(fail))
    for _twice in range(2):
        with pytest.raises(type(error), match=str(error)) as caught:
            work.wait()
        assert caught.value is error
    assert f"{type(error).__name__}: {error}" in (error_in_cpp(work) or "")
    assert work.exception() is error
    assert work.is_completed()
    assert not work.is_success()


def test_waiting_ends_after_the_time_that_was_given() -> None:
    with pytest.raises(RuntimeError, match=r"not ended after 0\.001 s"):
        Carried(list).wait(timedelta(milliseconds=1))


def test_what_was_needed_for_it_is_freed_when_it_has_ended() -> None:
    class Needed:
        pass

    needed = Needed()
    gone = weakref.ref(needed)
    work = Carried(lambda needed=needed: [])  # type: ignore[misc]
    del needed
    assert gone() is not None
    work.carry()
    assert gone() is None
