"""The user's own code, which the command line gets as `package.module:function`."""

import sys
from importlib import import_module
from typing import Any


def made(name: str) -> Any:
    """The result of the function `name`, which is looked for in the current folder first.

    Raises `ValueError` where there is no such function, or it cannot be called without arguments.

    >>> made("collections:OrderedDict")
    OrderedDict()
    """
    home, _, function = name.partition(":")
    sys.path.insert(0, "")  # as `python -m` does
    try:
        return getattr(import_module(home), function)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from error
    finally:
        sys.path.remove("")
