"""What the reference says of one gradient, as `fold` says it of its pieces."""

from __future__ import annotations

from gradwire.kernels import Folded


def folded(any_gradient: bool, finite: bool) -> Folded:
    """For a single piece."""
    return Folded(() if any_gradient else (0,), finite)
