"""Real gloo ranks, two nodes of two: fully_shard inside, gradwire between; in full tests of three, too."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gradwire
from gradwire.checkpoint.state import Missing
from gradwire.errors import PeerFailed
from gradwire.integrations.dcp import WireState
from gradwire.step.flat_buffers import FlatBuffer
from tests.device.scenes_placed import on, watched
from tests.device.scenes_resumed import PLACES
from tests.process import fsdp_models
from tests.process.fsdp_models import all_of, bits, loss_of, prints, refusal, whole
from tests.process.sharded_models import Blocks, attached, mesh, sharded
from tests.support.ranks import FOLDER
from tests.support.simulated import DEFAULT, HOST, Near, Simulated
from tests.support.states import own_state
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process

FULL = os.environ.get("GRADWIRE_LAWS") == "full"
LOSSY = "topk(ratio=0.1)"

train = partial(fsdp_models.train, clip=0.5)


@pytest.fixture(scope="module", params=[4, 6] if FULL else [4])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Ranks of both nodes together."""
    return Ranks(request.param, tmp_path_factory.mktemp("sharded"))


# -- training


@dataclass(frozen=True)
class BesideNative:
    """How far masters are from those of HSDP's own all-reduce between nodes."""

    off: float
    masters: str
    steps: int


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, _quiet: object) -> None:
    train(model, optimizer, range(5))


def branched(model: Any, optimizer: torch.optim.Optimizer, _quiet: object) -> None:
    """The first node has a branch that the second one does not use."""
    model.branches = True
    train(model, optimizer, range(5))


def accumulated(model: nn.Module, optimizer: torch.optim.Optimizer, quiet: Callable[[], Any]) -> None:
    """Two micro-batches a step, of which `quiet` holds back the first."""
    for step in range(3):
        optimizer.zero_grad()
        with quiet():
            loss_of(model, 2 * step).backward()
        loss_of(model, 2 * step + 1).backward()
        optimizer.step()


@contextmanager
def unsynchronised(model: Any) -> Iterator[None]:
    """FSDP's own way: no reduce-scatter, so that no hook is called."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


def beside_native(loop: Callable[..., None], *, is_quiet_ours: bool = False, **how: Any) -> BesideNative:
    """Dense; micro-batches are held back by `no_sync`, or in FSDP's own way."""
    model, native = sharded(**how), sharded(mesh(), **how)
    if torch.__version__ >= "2.13":  # before, there is no such call, and no scene that needs it passes
        native.set_reduce_scatter_unused_params(True)  # type: ignore[operator]  # zeros, as ours, not no gradient
    optimizer, wire = attached(model, "dense")
    loop(model, optimizer, wire.no_sync if is_quiet_ours else partial(unsynchronised, model))
    loop(native, torch.optim.SGD(native.parameters(), lr=0.05), partial(unsynchronised, native))
    ours = whole(model)
    return BesideNative(float((ours - whole(native)).abs().max()), bits(ours), wire.report().step)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NATIVE: dict[str, tuple[Callable[..., None], dict[str, Any], int]] = {
    "plain": (clipped, {}, 5),
    "kept gathered": (clipped, {"reshard_after_forward": False}, 5),
    "mixed precision": (clipped, {"mp_policy": BF16}, 5),
    "a branch of one node": (branched, {}, 5),
    "no_sync": (accumulated, {"is_quiet_ours": True}, 3),
    "set_requires_gradient_sync": (accumulated, {}, 3),
}
"""How it is trained and sharded, and how many steps are exchanged."""


@pytest.mark.parametrize("name", rest(NATIVE, but=["plain", "no_sync"]))
def test_dense_is_native_hsdp(world: Ranks, name: str) -> None:
    loop, how, steps = NATIVE[name]
    # Two addends have no order. Three have, and what is accumulated without being sent is added up in another
    # one: a few roundings of values of about 1, in float32.
    most = 0.0 if world.count == 4 and name != "no_sync" else 1e-6
    found = world(beside_native, loop, **how)
    assert len({each.masters for each in found}) == 1
    for each in found:
        assert each.off <= most
        assert each.steps == steps


@dataclass(frozen=True)
class Learned:
    """How much of the loss is left, and memory as a share of two planes of the shard."""

    left: float
    memory: float
    replica: str


def learns(recipe: str) -> Learned:
    """Twenty steps."""
    model = sharded()
    optimizer, wire = attached(model, recipe)
    losses = fsdp_models.train(model, optimizer, range(20))
    planes = 2 * 4 * sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    replica = torch.cat([whole(model), *(each.double() for each in model.buffers())])
    return Learned(losses[-1] / losses[0], wire.report().memory_bytes / planes, bits(replica))


LEFT = {"int8": 0.8, LOSSY: 0.9, "powersgd": 0.9, "gcomp": 0.8, "auto": 0.8}
OF_SHARDS = ("dgc(ratio=0.1, warmup_steps=0)", "signum", "scalecom(warmup_steps=0)", "covap(interval=2)")
"""Recipes that apply momentum to the shard, or choose by it."""
LEFT |= dict.fromkeys(OF_SHARDS, 0.9)


@pytest.mark.parametrize("recipe", rest(LEFT, but=["int8"]))
def test_recipes_learn_and_replicas_stay_identical(world: Ranks, recipe: str) -> None:
    found = world(learns, recipe)
    assert len({each.replica for each in found}) == 1
    assert all(each.left < LEFT[recipe] for each in found)


def test_two_planes_of_the_shard_are_remembered(world: Ranks) -> None:
    # Without vectors and tiny tensors, and with the rows that fill up shards.
    assert all(0.5 < each.memory < 1.05 for each in world(learns, "int8"))


def checkpointed(reentrant: bool | None, **how: Any) -> tuple[str, int]:
    """With checkpoints of either kind or without: masters and steps."""
    model = sharded(reentrant=reentrant, **how)
    optimizer, wire = attached(model, LOSSY)
    train(model, optimizer, range(4))
    return bits(whole(model)), wire.report().step


@pytest.mark.parametrize("reentrant", rest([False, True], but=[False]))
def test_checkpoints_of_either_kind_change_nothing(world: Ranks, reentrant: bool) -> None:
    how = {} if reentrant else {"reshard_after_forward": False}
    found = world(checkpointed, reentrant, **how)
    assert found == world(checkpointed, None, **how)
    assert {steps for _, steps in found} == {4}


@dataclass(frozen=True)
class Poisoned:
    """A step with a NaN on one rank: gradients, memory before and after, and masters two steps later."""

    is_all_nan: bool
    before: dict[str, str]
    after: dict[str, str]
    masters: str
    step: int


def poisoned(recipe: str, per_node: int | None) -> Poisoned:
    """A NaN in one element of one rank's shard, which FSDP has reduced already: the other shard has none."""
    over, bad = mesh(), False
    if per_node is not None:
        sizes = dist.get_world_size() // per_node, per_node
        over = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
    model: Any = sharded(over["shard"])

    def damage(parameter: Tensor) -> None:
        assert isinstance(parameter.grad, DTensor)
        if bad and dist.get_rank() == 3:
            parameter.grad.to_local().view(-1)[0] = torch.nan

    model.blocks[1].bias.register_post_accumulate_grad_hook(damage)  # ahead of ours
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wire = gradwire.attach(model, optimizer, recipe, replicas=over["replicate"])
    train(model, optimizer, range(3))
    before = prints(own_state(wire)["memory"])
    bad = True
    optimizer.zero_grad()
    loss_of(model, 3).backward()
    bad, is_nan = False, all(bool(each.grad.to_local().isnan().all()) for each in model.parameters())
    after = prints(own_state(wire)["memory"])
    optimizer.zero_grad()
    train(model, optimizer, range(4, 6))
    return Poisoned(is_nan, before, after, bits(whole(model)), wire.report().step)


@pytest.mark.parametrize(
    ("recipe", "per_node"), [pytest.param("dense", None, marks=pytest.mark.rest), ("dense", 1), (LOSSY, None)]
)
def test_a_nan_in_one_shard_stops_the_step_on_all_ranks(
    world: Ranks, recipe: str, per_node: int | None
) -> None:
    found = world(poisoned, recipe, per_node)
    assert len({each.masters for each in found}) == 1
    for each in found:
        assert each.is_all_nan
        assert each.after == each.before
        assert each.step == 5


def failed() -> str:
    """One rank's codec raises; all ranks hear of it in that step, by the rank among all."""
    model = sharded()
    optimizer, _wire = attached(model, LOSSY)

    def compensate(*_: Any) -> None:
        raise OSError("no room")

    with ExitStack() as planted:
        if dist.get_rank() == 3:
            planted.enter_context(patch.object(FlatBuffer, "compensate", compensate))
        try:
            train(model, optimizer, range(1))
        except (PeerFailed, OSError) as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def test_a_failure_is_raised_on_all_ranks_and_names_the_rank_among_all(world: Ranks) -> None:
    others = world(failed)
    assert others.pop(3) == "OSError: no room"
    assert all(other.startswith("PeerFailed: rank 3 failed") for other in others)


@dataclass(frozen=True)
class Flushed:
    """What has come late, and masters after a step with it."""

    late: float
    masters: str


def flushed() -> Flushed:
    model = sharded()
    optimizer, wire = attached(model, LOSSY)
    train(model, optimizer, range(3))
    optimizer.zero_grad()
    wire.flush()
    late = sum(float(p.grad.to_local().abs().sum()) for p in model.parameters() if p.grad is not None)
    optimizer.step()
    return Flushed(late, bits(whole(model)))


def test_what_is_unsent_lands_in_the_shards(world: Ranks) -> None:
    found = world(flushed)
    assert all(each.late > 0 for each in found)
    assert len({each.masters for each in found}) == 1


# -- states


def _off(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference between two memories, in parts of their largest value."""
    left, right = one["memory"], other["memory"]
    assert left.keys() == right.keys()
    largest = max(float(each.abs().max()) for each in left.values())
    return max(float((left[name] - right[name]).abs().max()) for name in left) / largest


@dataclass(frozen=True)
class Resumed:
    """Masters; what is said to a neighbour's state; how far a mean that was loaded is from what it was, and
    the shape of a block's in it."""

    masters: str
    refused: str
    mean_off: float
    shape: tuple[int, ...]


def resumed(*, breaks: bool) -> Resumed:
    """With a break in the middle, after which the states of all are loaded, or without."""
    model = sharded()
    optimizer, wire = attached(model, LOSSY)
    train(model, optimizer, range(3))
    said = ""
    if breaks:
        states, values = all_of(wire.state_dict()), copy.deepcopy(model.state_dict())
        model = sharded(seed=5)
        model.load_state_dict(values)
        optimizer, wire = attached(model, LOSSY)
        said = refusal(lambda: wire.load_state_dict(states[dist.get_rank() ^ 1]))
        wire.load_state_dict(states)
        wire.load_state_dict(wire.state_dict())
    train(model, optimizer, range(3, 6))
    mean = wire.mean_state_dict()["mean"]
    wire.load_state_dict(mean)
    apart = _off(mean, wire.mean_state_dict()["mean"])
    return Resumed(bits(whole(model)), said, apart, tuple(mean["memory"]["blocks.1.weight"].shape))


def test_a_run_resumes_bit_for_bit_and_shards_are_not_confused(world: Ranks) -> None:
    for found, other in zip(world(resumed, breaks=True), world(resumed, breaks=False), strict=True):
        assert found.masters == other.masters
        assert found.refused
        assert found.mean_off == 0.0
        assert found.shape == (65, 65)


@dataclass(frozen=True)
class Moved:
    """How far the mean unsent is from what it was: among all ranks, and back in shards."""

    out: float
    back: float
    step: int


def moved() -> Moved:
    """From shards to whole parameters on all ranks, and back."""
    model, plain = sharded(), Blocks()
    optimizer, wire = attached(model, LOSSY)
    train(model, optimizer, range(3))
    theirs = gradwire.attach(plain, None, LOSSY, replicas=dist.group.WORLD)
    theirs.load_state_dict(all_of(wire.state_dict()))
    out = _off(wire.mean_state_dict()["mean"], theirs.mean_state_dict()["mean"])
    for step in range(2):
        loss_of(plain, step).backward()
    _optimizer, again = attached(sharded(), LOSSY)
    again.load_state_dict(all_of(theirs.state_dict()))
    back = _off(theirs.mean_state_dict()["mean"], again.mean_state_dict()["mean"])
    return Moved(out, back, again.report().step)


def test_the_mean_unsent_moves_between_shards_and_parameters(world: Ranks) -> None:
    # The mean of n ranks rounds n - 1 partial sums, and the share 1/n and its product unless n is a power of
    # two, each relative to the largest value. Of two ranks, and of four equal ones, nothing is rounded. Going
    # back, ranks differ, and are added up in another order.
    power = world.count & (world.count - 1) == 0
    rounded = (world.count - 1 + (0 if power else 2)) * 2**-24
    for found in world(moved):
        assert found.out <= (0.0 if power else rounded)
        assert found.back <= 2 * rounded
        assert found.step == 5


@dataclass(frozen=True)
class Elsewhere:
    """A checkpoint of two replicas, taken up by others: how far their mean unsent is from what it was."""

    off: float
    step: int
    stepped: list[str]
    health: Any


@dataclass(frozen=True)
class ThroughDCP:
    """The state of a rank as it was saved, and loaded by as many replicas, and what that has asked for."""

    saved: dict[str, Any]
    loaded: dict[str, Any]
    asked: list[str]
    elsewhere: dict[str, Elsewhere]


def through_dcp(recipe: str) -> ThroughDCP:
    """Taken up by two replicas, by as many as there are ranks, by one, and unsharded."""
    folder = Path(os.environ[FOLDER], f"dcp {recipe}")
    model = sharded()
    optimizer, wire = attached(model, recipe)
    train(model, optimizer, range(3))
    wire.note_loss(1.0 + dist.get_rank())
    saved, mean = own_state(wire), wire.mean_state_dict()["mean"]
    dcp.save({"wire": WireState(wire)}, checkpoint_id=folder)
    _optimizer, again = attached(sharded(seed=5), recipe)
    dcp.load({"wire": (loaded := WireState(again, folder))}, checkpoint_id=folder)
    world, found = dist.get_world_size(), {}

    def take_up(name: str, model: nn.Module, replicas: Any) -> None:
        other = gradwire.attach(model, None, recipe, replicas=replicas)
        dcp.load({"wire": WireState(other, folder)}, checkpoint_id=folder)
        apart, own = _off(mean, other.mean_state_dict()["mean"]), own_state(other)
        found[name] = Elsewhere(apart, other.report().step, own["stepped"], own["health"])

    for name, shape in (("more", (world, 1)), ("one", (1, world))):
        over = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        take_up(name, sharded(over["shard"]), over["replicate"])
    take_up("flat", Blocks(), dist.group.WORLD)
    own = own_state(again) | {"why": saved["why"]}
    return ThroughDCP(prints(saved), prints(own), list(loaded.state_dict()), found)


@pytest.mark.parametrize("recipe", rest([LOSSY, "powersgd", "onebit"], but=[LOSSY]))
def test_a_dcp_checkpoint_is_read_by_shards_and_moves_to_other_replicas(world: Ranks, recipe: str) -> None:
    # The states of two replicas are added and halved, which rounds once. The mean of equal memories over n
    # ranks rounds n - 1 partial sums, and the share 1/n and its product unless n is a power of two.
    rounded, per_node = (world.count + 2) * 2**-24, world.count // 2
    for rank, found in enumerate(world(through_dcp, recipe)):
        assert found.loaded == found.saved, "bit for bit, on as many replicas"
        assert found.asked == [f"replica{rank // per_node * per_node}"], "a rank reads its own replica alone"
        for name, each in found.elsewhere.items():
            assert each.off <= rounded, name
            assert each.step == 3
            if name != "flat":
                assert each.stepped == found.saved["stepped"]
                assert each.health == found.saved["health"]


@dataclass(frozen=True)
class Dropped:
    """Steps that were loaded; what is said where a node's files are lost; memory with the first node's."""

    loaded: int | None
    said: str
    memory: dict[str, str]
    first_nodes: dict[str, str]


def dropped() -> Dropped:
    """Nodes have folders of their own, and the second node's is lost; then both have the first one's."""
    model = sharded()
    optimizer, wire = attached(model, LOSSY)
    train(model, optimizer, range(2))
    node, place = divmod(dist.get_rank(), mesh()["shard"].size())
    kept, mine = (Path(os.environ[FOLDER], f"node {each}") for each in (0, node))
    wire.save(mine)
    states = all_of(prints(own_state(wire)["memory"]))
    _optimizer, again = attached(sharded(), LOSSY)
    loaded = again.load(mine)
    dist.barrier()
    if node:
        for path in mine.iterdir():
            path.unlink(missing_ok=True)
    dist.barrier()
    said = refusal(lambda: again.load(mine, missing="drop"), FileNotFoundError)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is lost
        again.load(kept, missing="drop")  # where both nodes have the first one's files
    return Dropped(loaded, said, prints(own_state(again)["memory"]), states[place])


@pytest.mark.rest
def test_what_is_left_in_folders_of_nodes_is_dropped_to_only_where_all_ranks_see_it(world: Ranks) -> None:
    per_node = world.count // 2
    seen = ", ".join([str(per_node)] * per_node + ["0"] * per_node)
    for found in world(dropped):
        assert found.loaded == 2
        assert f"ranks see {seen} of its files" in found.said
        assert "copy what is left on each of them to all" in found.said
        assert found.memory == found.first_nodes


@dataclass(frozen=True)
class Changed:
    """A state that is loaded where other parameters train: what is said and warned of; memory as it was
    saved and as it is then; parameters without any; steps after two more."""

    said: str
    warned: list[str]
    saved: dict[str, str]
    loaded: dict[str, str]
    empty: set[str]
    step: int


def changed(before: tuple[int, ...], after: tuple[int, ...]) -> dict[str, Changed]:
    """Blocks are frozen or thawed before the model is wrapped anew: what fits of a state goes along."""
    folder = Path(os.environ[FOLDER], f"changed {before} {after}")
    model = sharded(frozen=before)
    optimizer, wire = attached(model, LOSSY)
    train(model, optimizer, range(3))
    own, mean = own_state(wire), wire.mean_state_dict()["mean"]
    states = all_of(own)
    wire.save(folder / "folder")
    dcp.save({"wire": WireState(wire)}, checkpoint_id=folder / "dcp")
    found: dict[str, Changed] = {}
    ways: dict[str, Callable[[gradwire.Wire, Missing], object]] = {
        "own": lambda to, missing: to.load_state_dict(own, missing=missing),
        "all": lambda to, missing: to.load_state_dict(states, missing=missing),
        "mean": lambda to, missing: to.load_state_dict(mean, missing=missing),
        "folder": lambda to, missing: to.load(folder / "folder", missing=missing),
        "dcp": lambda to, missing: dcp.load(
            {"wire": WireState(to, folder / "dcp", missing=missing)}, checkpoint_id=folder / "dcp"
        ),
    }
    for way, load in ways.items():
        again = sharded(frozen=after)
        optimizer, to = attached(again, LOSSY)
        said = refusal(partial(load, to, "refuse"), FileNotFoundError)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            load(to, "drop")
        # A rank reads its own state of DCP only where that has no more parameters than the model.
        is_mean = way == "mean" or (way == "dcp" and before == ())
        now, then = (to.mean_state_dict()["mean"], mean) if is_mean else (own_state(to), own)
        train(again, optimizer, range(3, 5))
        found[way] = Changed(
            said,
            [text for text in (str(each.message) for each in warned) if "parameters have changed" in text],
            prints(then["memory"]),
            prints(now["memory"]),
            {name for name, each in now["memory"].items() if not each.any()},
            to.report().step,
        )
    return found


@pytest.mark.rest
@pytest.mark.parametrize("way", ["own", "all", "mean", "folder", "dcp"])
@pytest.mark.parametrize(("before", "after"), [((), (1,)), ((1,), ())], ids=["frozen", "thawed"])
def test_shards_that_fit_go_along_when_parameters_are_frozen_or_thawed(
    world: Ranks, before: tuple[int, ...], after: tuple[int, ...], way: str
) -> None:
    for each in (found[way] for found in world(changed, before, after)):
        assert "other parameter names" in each.said, "refused, unless asked for"
        assert "missing='drop'" in each.said
        [warned] = each.warned
        assert "blocks.1.weight" in warned
        fits = each.saved.keys() & each.loaded.keys()
        assert len(fits) > 1
        assert {name: each.loaded[name] for name in fits} == {name: each.saved[name] for name in fits}
        assert each.empty - fits == (set() if before == () else {"blocks.1.weight"})
        assert each.step == 5


# -- streams


@dataclass(frozen=True)
class OnADevice:
    """A training on a simulated device, and on the CPU."""

    races: list[str]
    streams: set[str]
    """In which hooks run."""
    placement: str
    there: str
    """Masters."""
    here: str
    steps: list[int]


def on_a_device(placed: str) -> OnADevice:
    """FSDP has its own streams there."""
    (asked, streamed), streams = PLACES[placed], set[str]()
    device = Simulated() if placed == "host" else Near()

    def note(_parameter: Tensor) -> None:
        streams.add(device.current().name)

    found, reports = [], []
    for there in (True, False):
        with ExitStack() as held:
            if there:
                held.enter_context(device.being(torch.cpu))
                held.enter_context(on(device, streams=streamed))
            model = sharded()
            optimizer, wire = attached(model, LOSSY, placement=asked)
            if there:
                held.enter_context(watched(device, wire))
                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(note)
            train(model, optimizer, range(3))
        found.append(bits(whole(model)))
        reports.append(wire.report())
    return OnADevice(device.races[:5], streams, reports[0].placement, *found, [each.step for each in reports])


@pytest.mark.rest
@pytest.mark.parametrize("placed", PLACES)
def test_hooks_of_shards_run_in_the_stream_of_their_reduction_and_nothing_races(
    world: Ranks, placed: str
) -> None:
    for found in world(on_a_device, placed):
        assert found.races == []
        assert found.there == found.here, "bit for bit as on the CPU"
        assert found.placement == placed
        assert found.steps == [3, 3]
        [stream] = found.streams
        assert stream != DEFAULT


def deaf(call: str) -> int:
    """How often the reducer's copies race in a training without what `call` orders."""
    device = Simulated(call)
    with device.being(torch.cpu), on(device):
        model = sharded()
        optimizer, wire = attached(model, LOSSY, placement="host")
        ours = next(iter(set(device.streams) - {HOST, DEFAULT}))
        with watched(device, wire):
            train(model, optimizer, range(2))
    return sum(f"on the {ours}" in race for race in device.races)


@pytest.mark.rest
@pytest.mark.parametrize("call", ["wait_event", "join"])
def test_each_order_that_shards_rely_on_is_missed(world: Ranks, call: str) -> None:
    # The reducer's copies wait for FSDP's streams, and the optimizer waits for them.
    assert any(world(deaf, call)), "on some rank: it depends on when threads run"


# -- what is refused


def refused() -> dict[str, str]:
    """Each in its words."""
    between, inside = mesh()["replicate"], mesh()["shard"]
    part = Blocks()
    fully_shard(part.blocks[0], mesh=inside)
    columns = fully_shard(nn.Linear(12, 8), mesh=inside, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    offloaded = fully_shard(nn.Linear(8, 8), mesh=inside, offload_policy=CPUOffloadPolicy(pin_memory=False))
    tensor_parallel = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    parallelize_module(tensor_parallel, inside, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    by_rows = parallelize_module(nn.Linear(8, 12), inside, ColwiseParallel())
    both = nn.Sequential(nn.Linear(8, 12))
    parallelize_module(both, inside, {"0": ColwiseParallel()})
    fully_shard(both, mesh=between)
    ignored = nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8))
    parallelize_module(ignored[1], inside, ColwiseParallel())
    fully_shard(ignored, mesh=inside, ignored_params=set(ignored[1].parameters()))
    by_columns = parallelize_module(nn.Linear(12, 8), inside, RowwiseParallel())
    node, place = divmod(dist.get_rank(), per_node := inside.size())
    pairs = [(first, per_node + (first + 1) % per_node) for first in range(per_node)]
    crossed = [dist.new_group(ranks) for ranks in pairs][(place - node) % per_node]

    def said(model: nn.Module, replicas: Any = between) -> str:
        return refusal(lambda: gradwire.attach(model, replicas=replicas))

    return {
        "no replicas": said(sharded(), None),
        "native": said(sharded(mesh())),
        "replicate": said(replicate(nn.Linear(8, 8), mesh=between)),
        "part": said(part),
        "columns": said(columns),
        "tensor parallel": said(tensor_parallel),
        "tensor parallel, by rows": said(by_rows),
        "tensor parallel, by columns": said(by_columns),
        "tensor parallel, ignored": said(ignored),
        "both": said(both),
        "offload": said(offloaded),
        "wrong dimension": said(sharded(), inside),
        "everyone": said(sharded(), dist.group.WORLD),
        "crossed": said(sharded(), crossed),
    }


REFUSED = {
    "no replicas": "replicas= the group or mesh dimension between nodes",
    "native": "FSDP averages between nodes itself",
    "replicate": "was made by replicate()",
    "part": "is not sharded, while others are",
    "columns": "shards by rows",
    "tensor parallel": "Tensor parallelism is not carried yet",
    "tensor parallel, by rows": "not by fully_shard",
    "tensor parallel, by columns": "not by fully_shard",
    "tensor parallel, ignored": "parameter '1.weight' is sharded, but not by fully_shard",
    "both": "by fully_shard and by tensor parallelism",
    "offload": "CPUOffloadPolicy",
    "wrong dimension": "must have one rank in common",
    "everyone": "must have one rank in common",
    "crossed": "joins ranks with different shards",
}


def test_what_cannot_be_is_refused_with_what_to_do(world: Ranks) -> None:
    for found in world(refused):
        assert [name for name in REFUSED if REFUSED[name] not in found[name]] == [], found
