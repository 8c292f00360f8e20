"""Near-linear data-parallel PyTorch training on networks that are too slow for it.

One line on top of `DistributedDataParallel`::

    wire = gradwire.attach(ddp, optimizer)
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gradwire.environment import require_torch
from gradwire.version import __version__

if TYPE_CHECKING:
    from gradwire import recipes
    from gradwire._api.attach import attach
    from gradwire._api.outer import outer
    from gradwire._api.plan import Plan, plan
    from gradwire._api.plan_store import plan_store
    from gradwire._api.report import Report
    from gradwire._api.rounds import OuterWire
    from gradwire._api.simulate import Simulation, simulate
    from gradwire._api.wire import Wire
    from gradwire.errors import (
        GradwireError,
        GradwireWarning,
        PeerFailed,
        RanksDisagree,
        TransportError,
        WireError,
    )
    from gradwire.recipes import Recipe, recipe
    from gradwire.step.layout import by_size
    from gradwire.unit.parameters import ParameterSpec
else:
    # On first use: torch takes seconds to load, and `gradwire net` needs nothing of it.
    _HOMES = {
        "gradwire._api.plan": ["Plan", "plan"],
        "gradwire._api.plan_store": ["plan_store"],
        "gradwire._api.attach": ["attach"],
        "gradwire.unit.parameters": ["ParameterSpec"],
        "gradwire.step.layout": ["by_size"],
        "gradwire._api.outer": ["outer"],
        "gradwire._api.report": ["Report"],
        "gradwire._api.rounds": ["OuterWire"],
        "gradwire._api.simulate": ["Simulation", "simulate"],
        "gradwire._api.wire": ["Wire"],
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
                require_torch()
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
    "ParameterSpec",
    "PeerFailed",
    "Plan",
    "RanksDisagree",
    "Recipe",
    "Report",
    "Simulation",
    "TransportError",
    "Wire",
    "WireError",
    "__version__",
    "attach",
    "by_size",
    "outer",
    "plan",
    "plan_store",
    "recipe",
    "recipes",
    "simulate",
]
