"""torch's own ways of synchronising gradients, set up as their documentation recommends.

No postponed annotations here: DDP inspects a hook's signature.
"""

import difflib
import inspect
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire_lab.bench.settings import BenchEntry

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]

# Dense steps before PowerSGD starts. Its warm start needs at least 2; one more lets DDP's
# rebuilt buckets settle, and all of them lie within the warm-up.
_POWER_SGD_START = 3


class HookClock:
    """Adds up the seconds spent inside a communication hook, until `collect` empties it."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def collect(self) -> float:
        """Seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def timed(self, hook: Hook) -> Hook:
        """Rename the hook so that DDP accepts it, and time its synchronous part.

        DDP refuses `bf16_compress_hook` on gloo by its *name*, although gloo carries bfloat16.
        """

        def timed_hook(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            start = time.perf_counter()
            future = hook(state, bucket)
            self._seconds += time.perf_counter() - start
            return future

        return timed_hook


def _ddp(ddp: DistributedDataParallel) -> None:
    """Plain DDP: the reducer's built-in all-reduce, no hook."""


def _fp16(ddp: DistributedDataParallel) -> HookClock:
    return _register(ddp, None, default_hooks.fp16_compress_hook)


def _bf16(ddp: DistributedDataParallel) -> HookClock:
    return _register(ddp, None, default_hooks.bf16_compress_hook)


def _power_sgd(
    ddp: DistributedDataParallel,
    *,
    rank: int = 1,
    start_iter: int = _POWER_SGD_START,
    batch_tensors: bool = False,
) -> HookClock:
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=start_iter,
        batch_tensors_with_same_shape=batch_tensors,
    )
    return _register(ddp, state, powerSGD_hook.powerSGD_hook)


def _register(ddp: DistributedDataParallel, state: Any, hook: Hook) -> HookClock:
    clock = HookClock()
    ddp.register_comm_hook(state, clock.timed(hook))
    return clock


PEERS: dict[str, Callable[..., HookClock | None]] = {
    "ddp": _ddp,
    "fp16_hook": _fp16,
    "bf16_hook": _bf16,
    "powersgd_hook": _power_sgd,
}

# DDP's own argument, accepted by every peer: torch's PowerSGD hook needs a single bucket on gloo.
BUCKET_OPTION = "bucket_cap_mb"


def check_peer(entry: BenchEntry) -> None:
    """Raise `ValueError` for an unknown peer, with the name of the nearest known one."""
    if entry.stem not in PEERS:
        near = difflib.get_close_matches(entry.stem, PEERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        hint = "; it goes with --sharded" if entry.stem == "fsdp2" else hint
        raise ValueError(f"peer {entry.stem!r} is not one of {', '.join(PEERS)}{hint}")
    try:
        inspect.signature(PEERS[entry.stem]).bind(None, **_options(entry))
    except TypeError as error:
        raise ValueError(f"peer {entry.name!r}: {error}") from None


def install(entry: BenchEntry, ddp: DistributedDataParallel) -> HookClock | None:
    """Register the peer's hook on `ddp`, with the options of `entry`. Returns the clock of the time spent in
    the hook, if the peer has one.
    """
    return PEERS[entry.stem](ddp, **_options(entry))


def _options(entry: BenchEntry) -> dict[str, Any]:
    return {key: value for key, value in entry.options.items() if key != BUCKET_OPTION}


def wire_bytes(entry: BenchEntry, numel: int, world: int) -> float | None:
    """Bytes that a rank sends per step in a ring all-reduce of `numel` gradient elements among `world` ranks,
    as the peer encodes them; `None` if that depends on shapes.
    """
    per_value = {"ddp": 4, "fp16_hook": 2, "bf16_hook": 2}.get(entry.stem)
    return None if per_value is None else 2 * (world - 1) / world * numel * per_value
