"""A parameter that varies in a loop inside one test.

Where a test takes a millisecond, pytest spends several on collecting, distributing and reporting it, and that
thousands of times.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

Test = Callable[..., None]


def looped(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Like `pytest.mark.parametrize`; a failure says with which value, and ends the loop."""
    single = isinstance(names, str)
    every = [{names: value} if single else dict(zip(names, value, strict=True)) for value in values]
    assert every, f"no {names} to try"

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def loop(**others: Any) -> None:
            for chosen in every:
                try:
                    test(**chosen, **others)
                except Exception as error:
                    error.add_note(f"with {chosen}")
                    raise

        left = inspect.signature(test)
        others = [parameter for parameter in left.parameters.values() if parameter.name not in every[0]]
        loop.__signature__ = left.replace(parameters=others)  # type: ignore[attr-defined]
        return loop

    return decorate
