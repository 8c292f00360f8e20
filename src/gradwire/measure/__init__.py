"""Measurements: times (the only code that reads a clock), and how often weights are used.

Import from the files, as `from gradwire.measure.probe import probe`: a run loads only those that it needs.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradwire.measure.uses import layer_rates, multiply_adds
else:

    def __getattr__(name: str) -> Any:
        """Load on first use what users call before training."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from gradwire.measure import uses

        return getattr(uses, name)


__all__ = ["layer_rates", "multiply_adds"]
