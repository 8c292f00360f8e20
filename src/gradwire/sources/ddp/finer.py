"""Smaller DDP buckets, so that gradients reach the flat buffers while the backward pass still runs.

DDP hands over whole buckets. At its default of 25 MB most of a model arrives only when the backward pass
ends, so communication cannot overlap with it. gradwire cuts units independently of buckets, so the buckets
only have to be small. DDP can rebuild its reducer (it does so when it is unpickled), but has no public call
for it. This is the one file that uses private names; without them the buckets stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.sources.buckets import SMALLEST_BYTES
from gradwire.sources.ddp.buffers import joins
from gradwire.step.installed import InstalledRecipe

_NEEDED = ("_ddp_init_helper", "_build_params_for_reducer", "_build_debug_param_to_name_mapping")


@dataclass(frozen=True)
class Caps:
    """The largest sizes of a module's buckets, in DDP's own terms."""

    bytes_cap: int
    is_default: bool
    config: Any


def caps_of(ddp: DistributedDataParallel) -> Caps:
    """Present limits of DDP's buckets, for `restore_buckets`."""
    private: Any = ddp
    config = getattr(private, "_bucket_config", None)
    return Caps(private.bucket_bytes_cap, getattr(private, "bucket_bytes_cap_default", False), config)


def refine_buckets(ddp: DistributedDataParallel, total_bytes: int, buckets: int) -> bool:
    """Lower the bucket cap of `ddp` to `total_bytes` / `buckets`; never raises it.

    Returns True if the cap is low enough now. It is at least 1 MiB, because each bucket costs a call. Called
    on all ranks, between steps; a registered hook is kept. Buckets of a static graph and caps given one by
    one (`bucket_cap_mb_list`) stay.
    """
    cap, now = max(total_bytes // buckets, SMALLEST_BYTES), caps_of(ddp)
    if now.bytes_cap <= cap:
        return True
    listed = now.config is not None and now.config.per_bucket_bytes_caps
    if ddp.static_graph or listed or not all(hasattr(ddp, name) for name in _NEEDED):
        return False
    config = now.config
    if config is not None:
        first = min(cap, config.first_bucket_bytes_cap)
        config = replace(config, bucket_bytes_cap=cap, first_bucket_bytes_cap=first)
    _rebuild(ddp, Caps(cap, False, config))
    return True


def restore_buckets(ddp: DistributedDataParallel, caps: Caps) -> None:
    """Undo `refine_buckets`, if it changed the `caps` from before. On all ranks, between steps."""
    if caps_of(ddp) != caps:
        _rebuild(ddp, caps)


def fit_buckets(reducer: InstalledRecipe, total_bytes: int) -> Callable[..., None]:
    """A hook before the forward pass: finer buckets while there is something to hide, as recipes come and go.

    All ranks do the same, for parameters of `total_bytes`. Under a dense recipe DDP has its own buckets.
    Under `join()` nothing changes: a finished rank runs no forward pass, and its buckets would differ from
    its peers'.
    """
    own: Caps | None = None

    def hook(ddp: DistributedDataParallel, _inputs: Any) -> None:
        nonlocal own
        fine = not (reducer.measuring or reducer.layout.is_plain)
        if fine == (own is not None) or joins(ddp):
            return
        if own is None:
            own = caps_of(ddp)
            refine_buckets(ddp, total_bytes, reducer.placement.granularity.buckets)
        else:
            restore_buckets(ddp, own)
            own = None

    return hook


def _rebuild(ddp: DistributedDataParallel, caps: Caps) -> None:
    private: Any = ddp
    if caps.config is not None:
        private._bucket_config = caps.config
    private.bucket_bytes_cap = caps.bytes_cap
    private.bucket_bytes_cap_default = caps.is_default
    parameters, sparse = private._build_params_for_reducer()
    names = private._build_debug_param_to_name_mapping(parameters)
    private._ddp_init_helper(parameters, sparse, names, private.static_graph)
    private._has_rebuilt_buckets = False
    for hook, state in getattr(private, "_comm_hooks", ()):
        dist._register_comm_hook(private.reducer, state, hook)  # type: ignore[attr-defined]
