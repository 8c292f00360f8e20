"""Numbers by glob patterns over parameter names, so that a recipe's text stays short."""

from __future__ import annotations

from collections.abc import Mapping


def patterns_of(rates: Mapping[str, int | None]) -> dict[str, int]:
    """The same rates by glob patterns over parameter names, the first match counting, as few as possible.

    A module whose parameters all have one rate becomes a single pattern. `None` is what none may match.

    >>> patterns_of({"a.0.weight": 25, "a.1.weight": 25, "b.weight": 50, "b.bias": 400, "c": 400})
    {'a.*': 25, 'b.weight': 50, 'b.bias': 400, 'c': 400}
    """
    inside: dict[str, dict[str, int | None]] = {}
    for name, rate in rates.items():
        head, _, rest = name.partition(".")
        inside.setdefault(head, {})[rest] = rate
    found: dict[str, int] = {}
    for head, named in inside.items():
        values = set(named.values())
        if len(values) == 1:
            [value] = values
            if value is not None:
                found[head if set(named) == {""} else f"{head}.*"] = value
        else:
            found |= {f"{head}.{pattern}": rate for pattern, rate in patterns_of(named).items()}
    return found
