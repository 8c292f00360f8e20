"""Sizes and counts that were measured once and are no option of users. All ranks have the same."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """Limits of the reducer, passed in its `ReducerEnvironment`, so that tests can pass others."""

    small_bytes: int = 64 * 1024
    """Size below which a run of dense gradients joins other small ones instead of using its own collective.
    """
    early_bytes: int = 4 * 1024
    """Size from which small gradients that are ready before the last unit leave early. (At 13 Mbit/s, 7 kB at
    the end would add 5 ms, with no computation to overlap; one more all-reduce costs up to 1 ms of CPU
    time.)"""
    riding_bytes: int = 1000
    """Largest size of remaining small gradients that share the status vote's all-reduce, if that goes direct
    or by a tree. With the table of a few ranks, this is one packet per message. More bytes leave at the end
    of the backward pass, in an all-reduce of their own."""
    kept_steps: int = 1000
    """Steps that a recipe which `auto` has chosen stays at least. To decide anew takes some 30 dense steps,
    each a few times as long where the network binds: below a tenth of the time, even if nothing changes."""
    kept_dense_steps: int = 300
    """Steps that dense stays. To decide anew costs less there: most of the steps that measure are dense."""

    on_device: bool = False
    """Whether exchanges that read nothing on the host run on a device, in larger units (`largest_unit`)."""
    unit_elements: int | None = None
    """Elements of a unit at most, where all gradients come together and no unit hides another; else as the
    recipe boundaries."""
    latency: float = 1.0
    """Latency of the link, as a multiple of the time in which `MESSAGE_BYTES` (`comm.base`) pass."""


USUAL = Tuning()
ROUNDS = Tuning(unit_elements=1 << 26, latency=30.0)
"""Tuning for rounds of local steps. Encoding a unit takes some latencies between sites, and the link does not
idle until all of a larger model is encoded. These are 10 ms or more."""
