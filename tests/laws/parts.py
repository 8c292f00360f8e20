"""Parts of parameters without names that matter."""

from __future__ import annotations

from gradwire.moment import Part


def parts_of(*sizes: int) -> tuple[Part, ...]:
    """Whole vectors of these sizes."""
    return tuple(Part(f"p{number}", (size,), 0, size) for number, size in enumerate(sizes))
