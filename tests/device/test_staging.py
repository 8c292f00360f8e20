"""Payloads of a device go by way of the host, in order, and leave the bits that they leave there."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from gradwire.comm import Comm, Pending, Round, ThreadComm, run_ranks
from gradwire.comm.checksums import CheckedComm
from gradwire.errors import PeerFailed, WireError
from gradwire.placement import Placement, Post, StreamTransfer, by_the_host, host, staged
from tests.support.damage import Damage, DamagingComm
from tests.support.looped import looped
from tests.support.rig import ONE_BUCKET, Rig, flat, gradients
from tests.support.simulated import Near, Simulated
from tests.support.verbs import CALLS, Call

WORLD, STEPS = 2, 3


class Transport(Comm):
    """Reads what is handed in and writes what comes, as the host; how is its own affair, as with gloo."""

    def __init__(self, comm: Comm) -> None:
        self.rank, self.world, self._comm = comm.rank, comm.world, comm

    def issue(self, round_: Round, tensor: Tensor, out: Tensor) -> Pending:
        """As `Comm.issue`."""
        tensor.mul_(1)
        with _disable_current_modes():
            pending = self._comm.issue(round_, tensor, out)
        out.mul_(1)
        return pending


@looped("call", CALLS)
def test_every_verb_brings_what_it_brings_on_the_host(call: Call) -> None:
    devices = [Near() for _rank in range(3)]

    def body(comm: ThreadComm) -> Tensor:
        device = devices[comm.rank]
        with device.watching(), device.using(device.new_stream()):
            return call.issue(by_the_host(Transport(comm), device))

    for rank, found in enumerate(run_ranks(3, body)):
        assert torch.equal(found, call.expected(rank, 3))
        assert devices[rank].races == []
        assert devices[rank].operators > 0


def test_a_payload_that_is_not_waited_for_is_a_race() -> None:
    devices = [Near("synchronize") for _rank in range(WORLD)]

    def body(comm: ThreadComm) -> None:
        device = devices[comm.rank]
        with device.watching(), device.using(device.new_stream()):
            by_the_host(Transport(comm), device).all_reduce(torch.ones(4)).wait()

    run_ranks(WORLD, body)
    assert all("on the host against aten::copy_" in device.races[0] for device in devices)


def trained(
    recipe: str, comm: ThreadComm, device: Simulated, placed: str
) -> tuple[Tensor, Tensor, list[str]]:
    """Means and memory after some steps, and the races that were found."""
    over = Transport(comm)

    def place(post: Post) -> Placement:
        return staged(over, post, device) if placed == "staged" else host(over, post)

    with device.watching(), device.using(device.new_stream()):
        rig = Rig(comm, recipe, place=place)
        means = [rig.step(gradients(comm.rank, step)).flat() for step in range(STEPS)]
        memory = flat(rig.memory) if rig.memory else torch.empty(0)
        return torch.stack(means), memory, device.races


@looped("recipe", ["dense", "topk(ratio=0.1)", "int8", "powersgd", "leader_topk", "covap(interval=2)"], few=1)
def test_a_reducer_that_is_staged_leaves_the_same_bits(recipe: str) -> None:
    there = run_ranks(WORLD, lambda comm: trained(recipe, comm, Near(), "staged"))
    here = run_ranks(WORLD, lambda comm: trained(recipe, comm, Near(), "host"))
    for (means, memory, races), (other_means, other_memory, _races) in zip(there, here, strict=True):
        assert torch.equal(means, other_means)
        assert torch.equal(memory, other_memory)
        assert races == []


def test_what_comes_damaged_by_way_of_the_host_fails_the_step_on_all_ranks() -> None:
    """Its decoder takes any bytes, so nothing but a checksum refuses them: the status vote waits for that."""

    def rank(comm: ThreadComm) -> tuple[BaseException | None, bool]:
        is_struck = comm.rank == 1
        damage = Damage(0 if is_struck else -1, (0,), lasting=is_struck)
        checked = CheckedComm(DamagingComm(comm, damage))
        rig = Rig(comm, "int8(collective='all_gather')", place=lambda post: staged(checked, post, Near()))
        outcome = rig.step(gradients(comm.rank, 0), ONE_BUCKET)
        return outcome.error, outcome.step.committed

    (other, other_counts), (own, own_counts) = run_ranks(WORLD, rank)
    assert isinstance(own, WireError)
    assert isinstance(other, PeerFailed)
    assert not other_counts
    assert not own_counts


def test_checksums_are_counted_once_whatever_a_message_goes_through() -> None:
    """Where ranks hold shards, gradients travel over another comm than status votes."""

    def rank(comm: ThreadComm) -> list[tuple[float, float]]:
        device, counted = Near(), []
        for control, inside in ((None, None), (CheckedComm(comm), CheckedComm(comm))):
            between = CheckedComm(comm)
            placement = staged(between, print, device, control, inside)
            comms = [placement.comm, placement.control, *([] if inside is None else [placement.inside])]
            with device.watching(), device.using(device.new_stream()):
                for each in comms:
                    assert each is not None
                    each.all_gather(torch.empty(WORLD, 100), torch.ones(100)).wait()
            sent = {id(each): each for each in (between, control, inside) if each is not None}
            counted.append((placement.checksum_bytes, sum(each.overhead_bytes for each in sent.values())))
        return counted

    for (alone, once), (sharded, thrice) in run_ranks(WORLD, rank):
        assert alone == once > 0
        assert sharded == thrice == 1.5 * once


def brought(device: Simulated, *, follows: bool = True) -> list[str]:
    """One gradient of the default stream is brought, reduced in the reducer's, and read in the default
    one."""
    transfer = StreamTransfer(device, follows=follows)
    with device.watching():
        gradient = torch.ones(4)
        there = transfer.start(0, gradient)
        there.ready()
        with transfer.landing():
            there.buffer.mul_(2)
        there.copy_back()
        transfer.join()
        gradient + 1
    return device.races


def test_the_reducers_stream_comes_after_the_gradient_and_before_its_reader() -> None:
    assert brought(Near()) == []
    assert "mul_ on the stream 1 against aten::ones" in brought(Near("wait_event"))[0]
    assert brought(Near(), follows=False) == []
    assert "mul_ on the stream 1 against aten::ones" in brought(Near("synchronize"), follows=False)[0]
    assert "add on the default stream against aten::mul_" in brought(Near("join"))[0]
