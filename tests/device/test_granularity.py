"""How finely work is cut follows from where codecs run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire._api.configuration import PlacementName
from gradwire.codec.blocks import blocks
from gradwire.comm import ThreadComm, run_ranks
from gradwire.exchange.base import run, steady_context
from gradwire.exchange.scatter_reduce import scatter_reduce
from gradwire.granularity import ON_DEVICE, ON_HOST, Granularity
from gradwire.measure.metered import MeteredComm
from gradwire.placement import Placement, Post, host, stream
from gradwire.sources.ddp.finer import caps_of
from gradwire.unit.context import ExchangeContext
from tests.device.scenes_placed import on
from tests.support.rig import ALONE, Rig, gradients
from tests.support.simulated import Near

LARGEST_UNIT = 25 << 18


@pytest.mark.parametrize(("cut", "segments"), [(ON_HOST, 7), (ON_DEVICE, 1)])
def test_a_unit_on_a_device_is_one_segment(cut: Granularity, segments: int) -> None:
    ctx = replace(steady_context(LARGEST_UNIT, 2, 0), granularity=cut)
    rounds = scatter_reduce(blocks("int8")).rounds(LARGEST_UNIT, torch.float32, ctx)
    assert [each.verb for each in rounds] == ["all_to_all"] * segments + ["all_gather"] * segments


def test_what_travels_is_what_was_announced_of_that_granularity() -> None:
    exchange, cut = scatter_reduce(blocks("int8")), replace(ON_HOST, segment=300)

    def rank(comm: ThreadComm) -> bool:
        ctx, metered = ExchangeContext(0, 0, comm.rank, comm.world, granularity=cut), MeteredComm(comm)
        run(exchange, torch.ones(1000), torch.empty(1000), metered, ctx)
        return tuple(metered.rounds) == exchange.rounds(1000, torch.float32, ctx) and len(metered.rounds) == 8

    assert all(run_ranks(2, rank))


def coded(comm: ThreadComm, *, streamed: bool) -> list[tuple[str, int]]:
    """The encoding and decoding of three units, by number, each of which is complete with another bucket."""

    def place(post: Post) -> Placement:
        return stream(comm, comm, Near()) if streamed else host(comm, post)

    rig = Rig(comm, "topk(ratio=0.1)", place=place, unit_elements=2500)
    units = {
        str(unit): unit.index for flat_buffer in rig.reducer.layout.flat_buffers for unit in flat_buffer.units
    }
    found = rig.step(gradients(comm.rank, 0), ALONE).step.trace.spans
    return [(each.what, units[each.unit]) for each in found if each.unit in units and each.what != "wire"]


def test_in_a_stream_a_unit_is_sent_before_the_one_ahead_of_it_is_decoded() -> None:
    (e0, d0), (e1, d1), (e2, d2) = [(("encode", n), ("decode", n)) for n in range(3)]
    assert run_ranks(2, lambda comm: coded(comm, streamed=True)) == 2 * [[e0, e1, d0, e2, d1, d2]]
    assert run_ranks(2, lambda comm: coded(comm, streamed=False)) == 2 * [[e0, d0, e1, d1, e2, d2]]


def test_a_step_has_as_many_segments_as_suit_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.granularity.ON_HOST", replace(ON_HOST, segment=100))

    def rank(comm: ThreadComm) -> list[int]:
        places = (lambda _post: stream(comm, comm, Near())), (lambda post: host(comm, post))
        rigs = [Rig(comm, "int8", place=place) for place in places]
        return [len(rig.step(gradients(comm.rank, 0)).step.trace.rounds) for rig in rigs]

    for on_device, on_host in run_ranks(2, rank):
        assert on_device < on_host


@pytest.mark.usefixtures("world_in_company")
@pytest.mark.parametrize(("placement", "buckets"), [("device", 2), ("host", 4)])
def test_gradients_come_in_as_many_buckets_as_suit_the_place(
    placement: PlacementName, buckets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gradwire.granularity.ON_DEVICE", replace(ON_DEVICE, buckets=2))
    monkeypatch.setattr("gradwire.granularity.ON_HOST", replace(ON_HOST, buckets=4))
    layers = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))  # 1 MiB each
    ddp = DistributedDataParallel(layers)
    with on(Near(), streams=placement == "device"):
        gradwire.attach(ddp, recipe="int8", placement=placement)
    assert caps_of(ddp).bytes_cap == (8 << 20) // buckets
    with on(Near(), streams=placement == "device"):
        plain = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
        gradwire.attach(plain, recipe="int8", placement=placement, replicas=dist.group.WORLD)
    plain(torch.ones(1, 512)).sum().backward()
    grads = [each.grad for each in plain.parameters() if each.grad is not None]
    assert len({each.untyped_storage().data_ptr() for each in grads}) == buckets
