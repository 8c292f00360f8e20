"""The race finder finds what it is for, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.placement import CopyTransfer, Device
from tests.support.looped import looped
from tests.support.simulated import Simulated


def as_device(simulated: Simulated) -> Device:
    """What it stands for; mypy compares the methods here."""
    return simulated


def test_a_stream_that_reads_without_an_event_races() -> None:
    device = Simulated()
    stream = device.new_stream()
    with device.watching():
        x = torch.ones(4)
        with stream:
            x + 1
    assert len(device.races) == 1
    assert "storage" in device.races[0]


def test_an_event_puts_it_in_order() -> None:
    device = Simulated()
    stream = device.new_stream()
    with device.watching():
        x = torch.ones(4)
        stream.wait_event(device.current().record_event())
        with stream:
            x += 1
        device.current().wait_event(stream.record_event())
        x += 1
    assert device.races == []
    assert device.operators == 3


def test_an_event_orders_only_what_was_enqueued_before_it() -> None:
    device = Simulated()
    stream = device.new_stream()
    with device.watching():
        x = torch.ones(4)
        stream.wait_event(device.current().record_event())
        x += 1
        with stream:
            x + 1
    assert len(device.races) == 1


@looped(("other", "races"), [(slice(4, 8), 0), (slice(3, 8), 1), (slice(0, 1), 1)])
def test_bytes_count_and_not_where_a_tensor_begins(other: slice, races: int) -> None:
    device = Simulated()
    stream = device.new_stream()
    with device.watching():
        x = torch.ones(8)
        stream.wait_event(device.current().record_event())
        with stream:
            x[:4].add_(1)
        x[other].add_(1)
    assert len(device.races) == races


def test_two_readers_do_not_race() -> None:
    device = Simulated()
    stream = device.new_stream()
    with device.watching():
        x = torch.ones(4)
        stream.wait_event(device.current().record_event())
        with stream:
            x + 1
        x + 2
        assert device.races == []
        x.add_(1)  # while the stream may still read
    assert len(device.races) == 1


def test_the_host_has_to_wait() -> None:
    for waits in (True, False):
        device = Simulated()
        stream = device.new_stream()
        memory = device.pinned(torch.empty(4))
        with device.watching():
            x = torch.ones(4)
            event = device.current().record_event()
            stream.wait_event(event)
            with stream:
                memory.copy_(x, non_blocking=True)
            done = stream.record_event()
            if waits:
                done.synchronize()
            memory.numpy()
        assert len(device.races) == (0 if waits else 2), "it may read and write"


def test_what_the_host_did_before_is_known_to_a_stream() -> None:
    device = Simulated()
    stream = device.new_stream()
    memory = device.pinned(torch.empty(4))
    with device.watching("host"):
        memory.fill_(1.0)
        with stream:
            torch.empty(4).copy_(memory)
    assert device.races == []


def test_a_synchronising_operator_is_a_wait() -> None:
    device = Simulated()
    memory = device.pinned(torch.empty(4))
    with device.watching():
        x = torch.ones(4)
        with device.current():
            memory.copy_(x)
        float(x.sum())
        memory.add_(1)
    assert device.races == []


def test_memory_of_both_sides_does_not_mix() -> None:
    device = Simulated()
    memory = device.pinned(torch.zeros(4))
    with device.watching():
        memory + torch.ones(4)
    assert device.races == ["aten::add mixes memory of the host with the device's"]


def round_trip(device: Simulated, step: Tensor) -> None:
    """Two steps of one bucket: computed, brought, changed on the host, landed, waited for, computed anew."""
    copies = CopyTransfer(as_device(device))
    bucket = torch.zeros(4)
    for number in range(2):
        with device.watching("device"):
            bucket.copy_(step)
            brought = copies.start(0, bucket)
        with device.watching("host"):
            brought.ready()
            brought.buffer.mul_(2 + number)
            brought.copy_back()
            future = device.new_future()
            with copies.landing():
                future.set_result(bucket)
        with device.watching("device"):
            assert torch.equal(future.wait(), step * (2 + number))


def test_copies_are_in_order() -> None:
    device = Simulated()
    round_trip(device, torch.arange(4.0))
    assert device.races == []


@looped("call", ["wait_event", "synchronize", "set_result"])
def test_each_order_that_copies_rely_on_is_missed(call: str) -> None:
    device = Simulated(call)
    round_trip(device, torch.arange(4.0))
    assert device.races


def test_a_stream_that_joins_sees_what_has_landed() -> None:
    for deaf in ((), ("join",)):
        device = Simulated(*deaf)
        copies = CopyTransfer(as_device(device))
        with device.watching():
            x = torch.ones(4)
            brought = copies.start("buffers", x)
            brought.ready()
            brought.buffer.fill_(3.0)
            brought.copy_back()
            copies.join()
            assert torch.equal(x, torch.full((4,), 3.0))
        assert bool(device.races) == bool(deaf)
