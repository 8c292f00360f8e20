"""Whether codecs run on the device or on the host, if both can: by the cost model, once facts are known.

On the device a codec takes less time, but it is launched by the host, kernel by kernel. On the host all
gradients have to be copied out, and all means back. Both use the same links. What differs is measured when a
composition is about to run: copies and launches by the device's own time, the codec on the host by the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from gradwire.control.controller import agreed_cost
from gradwire.measure.clock import EventStopwatch
from gradwire.measure.probe import slowest
from gradwire.placement import Device, HostDevice
from gradwire.planning.facts import Facts
from gradwire.recipes import Composition
from gradwire.step.environment import EngineEnvironment
from gradwire.step.layout import Layout

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
    if (
        env.placement_choices is None
        or env.alternative is None
        or facts is None
        or composition.next is not None
    ):
        return composition
    layout = layout_of(composition, torch.device("meta"))
    if layout.is_plain or not layout.stays_on_device:
        return composition
    key = composition.text, facts.backward_s, facts.allreduce_s
    if key not in env.placement_choices:
        env.placement_choices[key] = _chosen(composition, facts, layout, env)
    by_host, why = env.placement_choices[key]
    return replace(composition, by_host=by_host, placement_why=why)


def _chosen(
    composition: Composition, facts: Facts, layout: Layout, env: EngineEnvironment
) -> tuple[bool, str]:
    from gradwire.control.forecast import forecast_by  # loaded where there is something to choose

    device = env.placement.device
    there = agreed_cost(composition, env.control, device)
    here = agreed_cost(composition, env.control, HostDevice())
    try:
        mine_s = copied_s(device) / _COPIED_BYTES
    except (RuntimeError, MemoryError):  # memory is short: peers wait for this rank's number all the same
        mine_s = math.inf
    [byte_s] = slowest(env.control, [mine_s])
    forecast = forecast_by(facts, layout, layout.specs)
    if forecast is None or there is None or here is None or byte_s == math.inf:
        return False, ""
    device_s = forecast.coded(there).step_s()
    host_s = forecast.coded(here).copied(byte_s * layout.specs[0].dtype.itemsize).step_s()
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
