"""Near-linear data-parallel PyTorch training on networks that are too slow for it.

One line on top of `DistributedDataParallel`::

    wire = gradwire.attach(ddp, optimizer)
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gradwire.version import __version__

if TYPE_CHECKING:
    from gradwire import recipes
    from gradwire.advising import Plan, plan
    from gradwire.attaching import attach
    from gradwire.engine.layout import by_size
    from gradwire.errors import (
        GradwireError,
        GradwireWarning,
        PeerFailed,
        RanksDisagree,
        TransportError,
        WireError,
    )
    from gradwire.exploring import Trial, explore
    from gradwire.local_steps import OuterWire, outer
    from gradwire.recipes import Recipe, recipe
    from gradwire.report import Report
    from gradwire.scaling import Simulation, simulate
    from gradwire.wire import Wire
else:
    # On first use: torch takes seconds to load, and `gradwire net` needs nothing of it.
    _HOMES = {
        "gradwire.advising": ["Plan", "plan"],
        "gradwire.attaching": ["attach"],
        "gradwire.exploring": ["Trial", "explore"],
        "gradwire.engine.layout": ["by_size"],
        "gradwire.local_steps": ["OuterWire", "outer"],
        "gradwire.report": ["Report"],
        "gradwire.scaling": ["Simulation", "simulate"],
        "gradwire.wire": ["Wire"],
        "gradwire.errors": [
            "GradwireError",
            "GradwireWarning",
            "PeerFailed",
            "RanksDisagree",
            "TransportError",
            "WireError",
        ],
        "gradwire.recipes": ["Recipe", "recipe"],
    }

    def __getattr__(name: str) -> Any:
        for home, names in _HOMES.items():
            if name in names:
                try:
                    globals()[name] = found = getattr(import_module(home), name)
                except AttributeError as error:  # which would read as if there were no such name
                    raise ImportError(f"{home} cannot be loaded: {error}") from error
                return found
        if not name.startswith("_") and find_spec(f"gradwire.{name}") is not None:
            return import_module(f"gradwire.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "GradwireError",
    "GradwireWarning",
    "OuterWire",
    "PeerFailed",
    "Plan",
    "RanksDisagree",
    "Recipe",
    "Report",
    "Simulation",
    "TransportError",
    "Trial",
    "Wire",
    "WireError",
    "__version__",
    "attach",
    "by_size",
    "explore",
    "outer",
    "plan",
    "recipe",
    "recipes",
    "simulate",
]
