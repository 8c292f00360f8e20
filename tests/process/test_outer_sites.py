"""Real gloo ranks: local steps between machines of two ranks each, DDP or FSDP2 inside."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.support.bits import Checksums, checksums
from tests.support.local_steps import (
    EVERY,
    OwnDiLoCo,
    Way,
    apart,
    common_folder,
    copied,
    distance,
    load_all,
    load_by_dcp,
    load_by_setting,
    outer,
    plain_sgd,
    rested,
    steps,
    values,
)
from tests.support.raised import raised
from tests.support.tiers import cases, rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process

ROUNDINGS = 2e-6
"""Of float32, over some twenty steps of AdamW, beside the way that parameters have gone."""


class Ranked(nn.Module):
    """Two layers, of which FSDP cuts rows unevenly."""

    def __init__(self, seed: int = 20) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.register_buffer("gain", torch.ones(()))
        self.first, self.norm, self.last = nn.Linear(32, 131), nn.LayerNorm(131), nn.Linear(131, 8)

    def forward(self, inputs: Tensor) -> Tensor:
        out = self.gain * self.last(torch.tanh(self.norm(self.first(inputs))))
        assert isinstance(out, Tensor)
        return out


def inside(kind: str, module: nn.Module, sites: DeviceMesh) -> nn.Module:
    """The module over the ranks of a site."""
    if kind == "ddp":
        return DistributedDataParallel(module, process_group=sites.get_group("ranks"))
    fully_shard(module, mesh=sites["ranks"])
    return module


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "ranks"))


def whole(model: nn.Module) -> list[Tensor]:
    """The parameters, gathered where they are sharded."""
    return [each.full_tensor() if isinstance(each, DTensor) else each for each in values(model)]


@dataclass(frozen=True)
class Sites:
    """Parameters at the end, and how far they are from DiLoCo's, relative to how far these have gone."""

    own: Checksums
    relative: float
    rounds: int
    bytes_per_round: float
    elements: int


def on_two_sites(kind: str, recipe: str, delay: int = 0) -> Sites:
    """Beside DiLoCo of our own between two replicas by DDP."""
    sites = mesh()
    plain, module = Ranked(), Ranked()
    begin = values(plain)
    model, theirs = inside(kind, module, sites), inside("ddp", plain, sites)
    optimizer, other = (torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, theirs))
    wire = outer(model, optimizer, recipe, replicas=sites["sites"], delay=delay)
    own = OwnDiLoCo(plain, delay, sites.get_group("sites"))
    for step in range(3 * EVERY + delay):
        steps(model, optimizer, [step])
        steps(theirs, other, [step])
        own.after_step()
    now, report = whole(module), wire.report()
    relative = distance(now, values(plain)) / distance(values(plain), begin)
    elements = sum(each.numel() for each in plain.parameters())
    return Sites(checksums(now), relative, report.step, report.wire_bytes_per_step, elements)


@pytest.mark.parametrize("delay", rest([0, 2], but=[2]))
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_machines_of_two_ranks_train_as_two_replicas_and_send_the_model_once(
    four: Ranks, kind: str, delay: int
) -> None:
    found = four(on_two_sites, kind, "diloco", delay)
    assert found[0].own == found[1].own
    assert found[2].own == found[3].own
    assert (found[0].own == found[2].own) == (delay == 0)
    for each in found:
        assert each.relative < ROUNDINGS
        assert each.rounds == 3
        # Two machines all-reduce each half of the model between two ranks; beside it go rows and paddings.
        assert 4 * each.elements / 2 <= each.bytes_per_round <= 4 * each.elements / 2 + 300


@pytest.mark.parametrize("kind", rest(["ddp", "fsdp"], but=["fsdp"]))
def test_machines_compress_between_each_other(four: Ranks, kind: str) -> None:
    found = four(on_two_sites, kind, "topk(ratio=0.1)")
    assert len({each.own for each in found}) == 1
    assert all(each.bytes_per_round < 4 * each.elements / 4 for each in found)


def resumed(kind: str) -> tuple[Checksums, Checksums]:
    """Saved in the middle of a round, with the result of one under way: parameters of the run that goes on,
    and of one that has loaded its state.
    """
    folder, sites = common_folder(), mesh()

    def built() -> tuple[nn.Module, torch.optim.Optimizer, gradwire.OuterWire]:
        model = inside(kind, Ranked(), sites)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, outer(model, optimizer, "topk(ratio=0.1)", replicas=sites["sites"], delay=2)

    model, optimizer, wire = built()
    steps(model, optimizer, range(EVERY + 1))
    wire.save(folder)
    steps(model, optimizer, range(EVERY + 1, 3 * EVERY))
    again, theirs, other = built()
    steps(again, theirs, range(2))
    other.load(folder)
    steps(again, theirs, range(EVERY + 1, 3 * EVERY))
    found = checksums(values(model)), checksums(values(again))
    for each in (wire, other):
        each.detach()
    return found


@pytest.mark.parametrize("kind", rest(["ddp", "fsdp"], but=["fsdp"]))
def test_machines_resume_with_a_round_under_way(four: Ranks, kind: str) -> None:
    for through, again in four(resumed, kind):
        assert again == through


@dataclass(frozen=True)
class Loaded:
    """What all ranks have loaded, parameters after a rest, and what is raised once rank 3 loads alone."""

    target: Checksums
    own: Checksums
    shared: Checksums
    raised: str


def loaded(kind: str, way: Way) -> Loaded:
    """In the middle of a round."""
    sites, module, source = mesh(), Ranked(), Ranked(36)
    model = inside(kind, module, sites)
    if kind == "fsdp":
        fully_shard(source, mesh=sites["ranks"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    wire = outer(model, optimizer, "topk(ratio=0.1)", replicas=sites["sites"], delay=1)
    steps(model, optimizer, range(EVERY + 2))
    way(module, copied(source.state_dict()))
    rested(model, optimizer, EVERY + 2, 2 * EVERY)
    with wire.shared_parameters():
        shown = checksums(whole(module))
    own = checksums(whole(module))
    if dist.get_rank() == 3:
        module.load_state_dict({"first.weight": 2.0 * next(module.parameters()).detach()}, strict=False)
    heard = str(raised(partial(steps, model, optimizer, range(50, 50 + EVERY + 1))))
    way(module, copied(source.state_dict()))
    wire.detach()
    return Loaded(checksums(whole(source)), own, shown, heard)


LOADED = [("ddp", load_all), *(("fsdp", way) for way in (load_all, load_by_dcp, load_by_setting))]


@pytest.mark.rest
@pytest.mark.parametrize(("kind", "way"), cases(LOADED, but=LOADED))
def test_machines_go_on_from_what_all_ranks_load_and_hear_of_one_that_loads_alone(
    four: Ranks, kind: str, way: Way
) -> None:
    for found in four(loaded, kind, way):
        assert found.own == found.shared == found.target
        assert found.raised.startswith("RanksDisagree: ")
        assert "rank 2: nothing; rank 3: values of fingerprint" in found.raised


def one_shard_not_finite() -> tuple[float, Checksums]:
    """NaN in a shard on rank 3: its site takes θ₀ back. How far all are from what the other site had."""
    sites, module = mesh(), Ranked()
    inside("fsdp", module, sites)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    sent: list[Tensor] = []
    handle = optimizer.register_step_post_hook(lambda *_: sent.__setitem__(slice(None), whole(module)))
    outer(module, optimizer, "diloco", replicas=sites["sites"], outer=plain_sgd, every=1)

    def spoil(*_: Any) -> None:
        if dist.get_rank() == 3:
            next(module.parameters()).detach().to_local().fill_(torch.nan)  # type: ignore[attr-defined]

    other = optimizer.register_step_pre_hook(spoil)
    steps(module, optimizer, [0])
    other.remove()
    handle.remove()
    for each in sent:
        dist.broadcast(each, 0)
    now = whole(module)
    return apart(now, sent), checksums(now)


def test_a_machine_is_left_out_for_one_shard(four: Ranks) -> None:
    found = four(one_shard_not_finite)
    assert len({own for _error, own in found}) == 1
    assert all(error <= 1e-7 for error, _own in found)  # θ₀ − (θ₀ − θ)
