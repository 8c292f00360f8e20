"""Hide `hook` from the tracing of a compiled model or optimizer: a graph has no place for bookkeeping.

This loads torch's compiler, as DDP's constructor does.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


def untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """`hook`, of which a compiled model or optimizer sees nothing: a graph has no place for bookkeeping.

    This loads torch's compiler, as DDP's constructor does.
    """
    hidden: Callable[..., None] = torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
    return hidden
