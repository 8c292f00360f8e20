"""What a wire remembers, without the key that names its rank."""

from __future__ import annotations

from typing import Any

import gradwire


def own_state(wire: gradwire.Wire) -> dict[str, Any]:
    """This rank's state, which may be loaded as it is, too."""
    (state,) = wire.state_dict().values()
    found: dict[str, Any] = state
    return found
