"""By way of the host: copies out while the backward pass runs, and means back as soon as they are decoded."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes

import gradwire
from gradwire._api.configuration import PlacementName
from gradwire.comm import Comm, run_ranks
from gradwire.placement import CopyTransfer, TransferredBuffer, host
from gradwire.planning.boundaries import even_boundaries
from gradwire.recipes import recipe
from gradwire.step.on_device import DeviceBackward
from gradwire.step.worker import Worker
from tests.device.scenes_placed import on, watched
from tests.device.test_staging import Transport
from tests.support.looped import looped
from tests.support.models import batch, optimizer_of, perceptron
from tests.support.rig import gradients
from tests.support.simulated import Clock, Near, Simulated
from tests.unit.sources.test_backward import ByName, attached


class Late(TransferredBuffer):
    """One that is there after something else."""

    def __init__(self, there: TransferredBuffer, after: Callable[[], None]) -> None:
        super().__init__(there.buffer, lambda: (after(), there.ready())[1])
        self.copy_back_early, self.copy_back, self.poison = (
            there.copy_back_early,
            there.copy_back,
            there.poison,
        )  # type: ignore[method-assign]


class Computing(CopyTransfer):
    """The last gradient is computed until a mean of another is back on the device."""

    def __init__(self, device: Simulated, last: int) -> None:
        super().__init__(device)
        self._last, self._brought = last, dict[Hashable, tuple[Tensor, Tensor]]()

    def start(self, key: Hashable, source: Tensor) -> TransferredBuffer:
        """See `BufferTransfer`."""
        there = super().start(key, source)
        if key == self._last:
            return Late(there, self._computed)
        with _disable_current_modes():
            self._brought[key] = source, source.clone()
        return there

    def _computed(self) -> None:
        begun_s = time.monotonic()
        while all(torch.equal(source, gradient) for source, gradient in self._brought.values()):
            if time.monotonic() > begun_s + 60.0:
                raise TimeoutError("no mean has come back while this gradient was computed")
            time.sleep(0.001)


class Stepped(NamedTuple):
    """Means on the device after a step, what was committed, and the races."""

    means: dict[str, Tensor]
    committed: int
    races: list[str]


def stepped(comm: Comm, text: str, spoilt: str = "") -> Stepped:
    """A step of which something comes back before the last gradient is computed.

    The gradient that is `spoilt` by name is not finite on the last rank.
    """
    source, device, over = ByName(), Simulated(), Transport(comm)
    worker, held = Worker(crashed=lambda error: backward.reducer.crash(error)), ExitStack()
    transfer = Computing(device, len(source.specs) - 1)
    placement = replace(host(over, worker.post, device, post_after=worker.post_after), transfer=transfer)
    backward = attached(source, worker, placement, text, DeviceBackward)
    cut = replace(recipe(text).build(), cutter=partial(even_boundaries, unit_elements=2500))
    backward.call(lambda: backward.reducer.install(cut))
    grads = gradients(comm.rank, 0)
    if spoilt and comm.rank == comm.world - 1:
        grads[spoilt][0] = torch.nan
    worker.call(lambda: held.enter_context(device.watching("host")))
    try:
        with device.watching("device"):
            means = source.one_step(backward, grads, list(range(len(source.specs))))
        return Stepped(means, backward.reducer.step, device.races)
    finally:
        worker.call(held.close)
        worker.stop()


@looped("text", ["dense", "int8", "topk(ratio=0.1)"])
def test_a_mean_is_back_on_the_device_while_the_last_gradient_is_computed(text: str) -> None:
    first, *others = run_ranks(2, lambda comm: stepped(comm, text))
    assert first.committed == 1
    assert first.races == []
    for other in others:
        assert all(torch.equal(other.means[name], mean) for name, mean in first.means.items())


def test_after_a_bad_vote_nothing_is_left_of_what_has_come_back() -> None:
    last = ByName().specs[-1].name
    for found in run_ranks(2, lambda comm: stepped(comm, "int8", spoilt=last)):
        assert found.committed == 0
        assert found.races == []
        assert all(bool(mean.isnan().all()) for mean in found.means.values())


def test_a_copy_in_does_not_queue_up_after_copies_out() -> None:
    device = Simulated()
    copies = CopyTransfer(device)
    with device.watching():
        first, second = torch.ones(4), torch.ones(4)
        brought, _ = copies.start(0, first), copies.start(1, second)
        brought.ready()
        brought.copy_back_early(0, 4)
        copies.join()
        assert device.races == []
        second.add_(1)
    assert len(device.races) == 1, "what waits for the copy in has not waited for the other one out"


class Counted(Simulated):
    """Counts what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = Counter[str]()
        self._trains = threading.current_thread()

    def pinned(self, like: Tensor) -> Tensor:
        """See `Simulated`."""
        self.asked["pinned allocation"] += 1
        return super().pinned(like)

    def learn(self, call: str, actor: str, clock: Clock) -> None:
        """See `Simulated`."""
        if call == "synchronize":
            trains = threading.current_thread() is self._trains
            self.asked["wait of the thread that trains" if trains else "wait of another thread"] += 1
        super().learn(call, actor, clock)

    def operate(self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], waits: bool) -> None:
        """See `Simulated`."""
        if what == "aten::copy_" and self.entered:
            is_out = self._on_device.get(self._number(writes[0])) is False
            self.asked["copy out" if is_out else "copy in"] += 1
        super().operate(what, reads, writes, waits)


def asked(recipe: str, layers: int) -> Counter[str]:
    """What a step in the steady state asks of the device; each layer is a bucket of its own."""
    device = Counted()
    ddp = DistributedDataParallel(
        nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(layers))), bucket_cap_mb=0.01
    )
    with on(device):
        wire = gradwire.attach(ddp, recipe=recipe, placement="host")
    with watched(device, wire):
        for _step in range(4):
            device.asked.clear()
            ddp(torch.ones(2, 64)).sum().backward()
    return Counter(device.asked)


@pytest.mark.usefixtures("world_in_company")
@looped("recipe", ["dense", "fp16", "int8"])
def test_a_bucket_is_copied_out_and_in_once_and_only_another_thread_waits_for_it(recipe: str) -> None:
    fewer, more = asked(recipe, 3), asked(recipe, 4)
    each = {"copy out": 1, "copy in": 1, "wait of another thread": 1}
    assert {kind: more[kind] - fewer[kind] for kind in more.keys() | fewer.keys()} == each
    assert {kind: fewer[kind] - 3 * count for kind, count in each.items()} == dict.fromkeys(each, 0)


@pytest.mark.usefixtures("world_in_company")
@looped(("placement", "streams"), [("host", False), ("device", False), ("device", True)])
def test_a_thread_that_waits_for_the_device_sleeps(placement: PlacementName, streams: bool) -> None:
    device = Simulated() if placement == "host" else Near()
    ddp = DistributedDataParallel(perceptron())
    with on(device, streams=streams):
        wire = gradwire.attach(ddp, optimizer_of(ddp), "int8", placement=placement)
    with watched(device, wire):
        for step in range(3):
            inputs, targets = batch(step)
            nn.functional.mse_loss(ddp(inputs), targets).backward()
    assert device.spun == []
