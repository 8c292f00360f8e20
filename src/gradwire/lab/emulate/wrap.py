"""Rewriting `python [options] train.py …` so that the delaying backend is in place before the script runs."""

import re
import sys
from collections.abc import Sequence
from pathlib import PurePath

SHIM = "gradwire.lab.emulate.shim"
_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_TAKES_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})


def through_shim(argv: Sequence[str]) -> list[str]:
    """The same command with the shim in front of the script, module or code that it names.

    >>> through_shim(["python", "-u", "train.py", "--lr", "0.1"])
    ['python', '-u', '-m', 'gradwire.lab.emulate.shim', 'train.py', '--lr', '0.1']
    """
    words = list(argv)
    if not words:
        raise ValueError("the command is empty")
    if words[0] != sys.executable and not _PYTHON.fullmatch(PurePath(words[0]).name):
        raise ValueError(
            f"command={words[0]!r}: without network namespaces only Python programs can be slowed down; "
            "write it as: python script.py … or python -m module …"
        )
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] not in ("-m", "-c"):
        at += 2 if words[at] in _TAKES_VALUE else 1
    if at == len(words):
        raise ValueError("the command names no script: write it as: python script.py … or python -m module …")
    if SHIM in words[at : at + 2]:
        return words
    return [*words[:at], "-m", SHIM, *words[at:]]
