"""Runs a script as `python script.py …` does, in this process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType


class Stopped(SystemExit):
    """Ends a script that has been watched for long enough; its `finally` clauses run."""


def run(script: Path, words: Sequence[str]) -> object:
    """Run `script` as `__main__`, with `sys.argv` and `sys.path[0]` of its own.

    Args:
        script: a Python file.
        words: its arguments.

    Returns:
        The code with which it ended: `None` or 0 if all is well, 1 after an error, whose traceback is printed
        as Python prints it.

    Raises:
        KeyboardInterrupt: it was interrupted.
    """
    sys.argv = [str(script), *words]
    sys.path[0] = str(script.resolve().parent)
    sys.excepthook = sys.__excepthook__  # the command line's own would print frames of ours
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        return ended.code
    except Exception as error:
        own = _own(error.__traceback__, script)
        sys.excepthook(type(error), error.with_traceback(own), own)  # the script's, if it has set one
        return 1
    return None


def _own(trace: TracebackType | None, script: Path) -> TracebackType | None:
    """The traceback from the script's first frame on; all of it where it has none, as for a syntax error."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename != str(script):
        inner = inner.tb_next
    return inner or trace
