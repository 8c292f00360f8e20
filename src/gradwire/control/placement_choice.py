"""Whether codecs run on the device or on the host, if both can: by the cost model, once facts are known.

On the device a codec takes less time, but it is launched by the host, kernel by kernel. On the host all
gradients have to be copied out, and all means back. Both use the same links. What differs is measured: copies
and launches by the device's own time, the codec on the host by the clock. It is measured when kernels are
compiled, before steps count, if it is known by then what may run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

import torch

from gradwire.control.controller import cost_of
from gradwire.granularity import ON_DEVICE, ON_HOST
from gradwire.measure.clock import EventStopwatch
from gradwire.measure.codec import codec_cost
from gradwire.measure.probe import slowest
from gradwire.placement import Device, HostDevice
from gradwire.planning.facts import Facts
from gradwire.recipes import Composition
from gradwire.recipes.parse import short
from gradwire.step.environment import EngineEnvironment
from gradwire.step.layout import Layout

_LOG = logging.getLogger("gradwire")
_BUDGET_S = 0.1
"""Seconds that a codec is timed for, on the device and on the host."""
_COPIED_BYTES = 1 << 24
_COPIES = 4


def choose_placement(
    composition: Composition,
    facts: Facts | None,
    layout_of: Callable[[Composition, torch.device], Layout],
    env: EngineEnvironment,
) -> Composition:
    """`composition`, said to run where its step is predicted to be shorter. A collective where that is open.

    That is with `placement="auto"`, a recipe that may stay on the device, and facts of dense steps. A recipe
    that has been placed by the same facts stays where it is.
    """
    if env.placement_choices is None or facts is None or composition.next is not None:
        return composition
    layout = layout_of(composition, torch.device("meta"))
    if not _is_open(layout, env):
        return composition
    key, choices = (composition.text, facts.backward_s, facts.allreduce_s), env.placement_choices.choices
    if key not in choices:
        choices[key] = _chosen(composition, facts, layout, env)
    by_host, why = choices[key]
    return replace(composition, by_host=by_host, placement_why=why)


def _is_open(layout: Layout, env: EngineEnvironment) -> bool:
    """Whether the codecs of `layout` may run on the device or on the host."""
    there_are_both = env.placement_choices is not None and env.alternative is not None
    return there_are_both and not layout.is_plain and layout.stays_on_device


def timed(composition: Composition, layout: Layout, env: EngineEnvironment) -> tuple[float, ...]:
    """Four numbers of the codec's cost on the device, four on the host, and the seconds of a byte's copy.

    This rank's own, measured once for each exchange; infinite where they cannot be. None, if there is nothing
    to choose for `layout`.
    """
    if env.placement_choices is None or not _is_open(layout, env):
        return ()
    for exchange, known in env.placement_choices.seconds:
        if exchange == composition.exchange:
            return known
    device, text = env.placement.device, short(composition.text)
    seconds = (
        *_measured(4, lambda: _codec_s(composition, device), f"the codec of {text} on the device"),
        *_measured(4, lambda: _codec_s(composition, HostDevice()), f"the codec of {text} on the host"),
        *_measured(1, lambda: (copied_s(device) / _COPIED_BYTES,), "a copy to the host"),
    )
    env.placement_choices.seconds.append((composition.exchange, seconds))
    return seconds


def _measured(numbers: int, measure: Callable[[], tuple[float, ...]], what: str) -> tuple[float, ...]:
    try:
        return measure()
    except Exception as error:
        # Not a warning, which a user may have made an error: this rank alone would stop, and peers wait.
        _LOG.warning("%s could not be timed: %r", what, error)
        return numbers * (math.inf,)


def _codec_s(composition: Composition, device: Device) -> tuple[float, ...]:
    cost = codec_cost(composition.exchange, composition.text, device, budget_s=_BUDGET_S)
    return cost.encode.base_s, cost.encode.slope_s, cost.decode.base_s, cost.decode.slope_s


def _chosen(
    composition: Composition, facts: Facts, layout: Layout, env: EngineEnvironment
) -> tuple[bool, str]:
    from gradwire.control.forecast import forecast_by  # loaded where there is something to choose

    numbers = slowest(env.control, timed(composition, layout, env))
    there, here, byte_s = cost_of(numbers[:4]), cost_of(numbers[4:8]), numbers[8]
    on_device = forecast_by(facts, layout, layout.specs, ON_DEVICE)
    on_host = forecast_by(facts, layout, layout.specs, ON_HOST)
    if on_device is None or on_host is None or there is None or here is None or byte_s == math.inf:
        return False, ""
    device_s = on_device.coded(there).step_s()
    host_s = on_host.coded(here).copied(byte_s * layout.specs[0].dtype.itemsize).step_s()
    words = f"{host_s * 1e3:.0f} ms with codecs on the host, {device_s * 1e3:.0f} ms on the device"
    return host_s < device_s, f"a step is predicted to take {words}"


def copied_s(device: Device) -> float:
    """Seconds of a copy of 16 MiB from the device to pinned memory, the shortest of some, by events."""
    there = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device.where)
    here, watch, took_s = device.pinned(there), EventStopwatch(device.new_event, device.current), []
    for _ in range(_COPIES):
        start = watch.mark()
        here.copy_(there, non_blocking=True)
        took_s.append(watch.seconds(start, watch.mark()))
    return min(took_s)
