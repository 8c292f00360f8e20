"""Smaller DDP buckets, so that gradients reach the arena while backward still runs.

DDP hands over whole buckets. At its default of 25 MB most of a model arrives only when backward ends,
and whatever was to be hidden behind backward shows. Where units are cut is gradwire's business, so the
buckets only have to be fine. DDP can rebuild its reducer (it does when it is unpickled), but has no public
call for it: this is the one place that uses private names, and without them the buckets stay as they are.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BUCKETS = 32
SMALLEST_BYTES = 1 << 20
"""torch's compiler refuses caps below its own first bucket."""

_NEEDED = ("_ddp_init_helper", "_build_params_for_reducer", "_build_debug_param_to_name_mapping")


def cap_for(total_bytes: int) -> int:
    """Bytes per bucket: about 32 buckets, none below 1 MiB, because each costs a call.

    >>> cap_for(44_700_000)
    1396875
    """
    return max(total_bytes // BUCKETS, SMALLEST_BYTES)


def refine_buckets(ddp: DistributedDataParallel, total_bytes: int) -> bool:
    """Shrink the bucket cap of `ddp`; never enlarges it. Returns whether the cap is fine enough now.

    To be called on all ranks, between steps; a hook that is registered moves along. Buckets of a static
    graph and caps given one by one (`bucket_cap_mb_list`) are left alone.
    """
    cap = cap_for(total_bytes)
    private: Any = ddp
    if private.bucket_bytes_cap <= cap:
        return True
    config = getattr(private, "_bucket_config", None)
    listed = config is not None and config.per_bucket_bytes_caps
    if private.static_graph or listed or not all(hasattr(ddp, name) for name in _NEEDED):
        return False
    if config is not None:
        first = min(cap, config.first_bucket_bytes_cap)
        private._bucket_config = replace(config, bucket_bytes_cap=cap, first_bucket_bytes_cap=first)
    private.bucket_bytes_cap = cap
    private.bucket_bytes_cap_default = False
    parameters, sparse = private._build_params_for_reducer()
    names = private._build_debug_param_to_name_mapping(parameters)
    private._ddp_init_helper(parameters, sparse, names, private.static_graph)
    private._has_rebuilt_buckets = False
    for hook, state in getattr(private, "_comm_hooks", ()):
        dist._register_comm_hook(private.reducer, state, hook)  # type: ignore[attr-defined]
    return True
