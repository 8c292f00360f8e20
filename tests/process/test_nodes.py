"""Real gloo ranks: two nodes of two, which add up among themselves before anything crosses between nodes."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import pairwise
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.comm.checksums import SHORT_BYTES, SealedLayout
from gradwire.errors import PeerFailed, RanksDisagree, TransportError, WireError
from gradwire.integrations.dcp import WireState
from gradwire.sources.nodes.level import Packing
from tests.process.attached_models import NODES, Made, ddp, hsdp, plain
from tests.process.fsdp_models import prints
from tests.support.models import batch, digest, gradients, optimizer_of, perceptron, train
from tests.support.ranks import FOLDER, TIMEOUT_S
from tests.support.states import own_state
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

OTHERS = ((0, 2), (1, 3))
FEW = "topk(ratio=0.05)"


def _attached(recipe: str, nodes: Any = NODES, **options: Any) -> tuple[Any, torch.optim.Optimizer, Any]:
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.02, **options)
    optimizer = optimizer_of(ddp, lr=0.2)
    return ddp, optimizer, gradwire.attach(ddp, optimizer, recipe, nodes=nodes)


def first_gradients(nodes: Any) -> Tensor:
    ddp, optimizer, _wire = _attached("dense", nodes)
    train(ddp, optimizer, range(1))
    return torch.cat([gradient.view(-1) for gradient in gradients(ddp)])


def test_dense_on_two_levels_is_dense(four: Ranks) -> None:
    for flat, levels in zip(four(first_gradients, None), four(first_gradients, NODES), strict=True):
        largest = float(flat.abs().max())
        # Each way sums four numbers, of at most 4·largest in all, in another order: 3 additions each, and the
        # quarter is exact.
        assert float((levels - flat).abs().max()) <= 2 * 3 * 4 * largest * torch.finfo(torch.float32).eps
        assert largest > 0


@dataclass(frozen=True)
class Learned:
    """Forty steps, and what a wire tells of them."""

    losses: list[float]
    digest: str
    step: int
    world: int
    per_node: int
    sent_bytes: float
    metered_bytes: float
    inside_bytes: float
    text: str


def learns(recipe: str) -> Learned:
    ddp, optimizer, wire = _attached(recipe)
    losses, report = train(ddp, optimizer, range(40)), wire.report()
    sent, metered = report.wire_bytes_per_step, report.metered_bytes_per_step
    told = report.step, report.world, report.per_node, sent, metered, report.inside_bytes_per_step
    return Learned(losses, digest(ddp), *told, str(report))


RECIPES = ("dense", "int8", FEW, "powersgd(rank=2)", "auto")


@pytest.mark.parametrize("recipe", rest(RECIPES, but=["dense", FEW]))
def test_a_recipe_learns_and_its_replicas_are_identical(four: Ranks, recipe: str) -> None:
    found = four(learns, recipe)
    assert len({each.digest for each in found}) == 1
    for each in found:
        assert sum(each.losses[-10:]) < 0.8 * sum(each.losses[:10])
        assert (each.step, each.world, each.per_node) == (40, 4, 2)


@pytest.mark.parametrize("recipe", rest(RECIPES, but=["dense", FEW]))
def test_the_report_tells_bytes_between_nodes_from_those_inside(four: Ranks, recipe: str) -> None:
    parameters = 32 * 64 + 64 + 64 * 64 + 64 + 64 * 8 + 8
    for each in four(learns, recipe):
        assert each.sent_bytes == pytest.approx(each.metered_bytes, rel=1e-12)
        # Every element goes once to the neighbour and once back, less what a rank keeps: half each way.
        assert each.inside_bytes == 4 * parameters
        assert "on 2 nodes" in each.text
        if recipe == "dense":
            assert each.sent_bytes == 4 * parameters / 2  # a half, all-reduced between two


@dataclass(frozen=True)
class NotFinite:
    """By step, whether gradients are finite; steps in the end, and parameters."""

    finite: list[bool]
    step: int
    skipped: int
    digest: str


def not_finite(recipe: str) -> NotFinite:
    """Three steps, of which the second has a NaN on one rank."""
    ddp, optimizer, wire = _attached(recipe)
    finite = []
    for step in range(3):
        inputs, targets = batch(step)
        if step == 1 and dist.get_rank() == 3:
            targets[0, 0] = torch.nan
        optimizer.zero_grad()
        nn.functional.mse_loss(ddp(inputs), targets).backward()
        finite.append(all(bool(each.isfinite().all()) for each in gradients(ddp)))
        if finite[-1]:
            optimizer.step()
    report = wire.report()
    return NotFinite(finite, report.step, report.skipped_steps, digest(ddp))


@pytest.mark.parametrize("recipe", rest(["dense", "int8", FEW], but=[FEW]))
def test_a_NaN_on_one_rank_stops_the_step_on_all(four: Ranks, recipe: str) -> None:
    found = four(not_finite, recipe)
    assert len({each.digest for each in found}) == 1
    for each in found:
        assert each.finite == [True, False, True]
        assert (each.step, each.skipped) == (2, 1)


# -- faults


@dataclass(frozen=True)
class Damaged:
    """What a step raises, and a call; memory before and after; steps that are diagnosed and made then."""

    error: str
    text: str
    diagnosing: str
    before: dict[str, str]
    after: dict[str, str]
    diagnosed_step: int | None
    step: int


def damaged(made: Callable[..., Made]) -> Damaged:
    """A flipped bit in each long message that rank 3 receives in a step; one more step."""
    model, optimizer, wire = made("topk(ratio=0.5)", checksums=True)

    def backward(step: int) -> None:
        optimizer.zero_grad()
        inputs, targets = batch(step)
        nn.functional.mse_loss(model(inputs), targets).backward()

    honest = SealedLayout.open

    def struck(how: SealedLayout, message: Tensor, *arguments: Any) -> tuple[bool, bool]:
        message[0] ^= how.payload_bytes > SHORT_BYTES
        return honest(how, message, *arguments)

    def seen(action: Callable[[], object]) -> tuple[str, str]:
        with patch.object(SealedLayout, "open", struck if dist.get_rank() == 3 else honest):
            try:
                action()
            except (WireError, PeerFailed) as raised:
                return type(raised).__name__, str(raised)
        return "nothing", ""

    for step in range(2):
        backward(step)
        optimizer.step()
    before = prints(own_state(wire)["memory"])
    error, text = seen(partial(backward, 2))
    after = prints(own_state(wire)["memory"])
    wire.watching = True
    backward(3)
    diagnosing, _ = seen(wire.diagnose)
    diagnosed = wire.diagnose().step
    optimizer.step()
    return Damaged(error, text, diagnosing, before, after, diagnosed, wire.report().step)


MADE: dict[str, Callable[..., Made]] = {"nodes": partial(ddp, nodes=NODES), "plain": plain, "hsdp": hsdp}


@pytest.mark.parametrize("source", rest(MADE, but=["nodes"]))
def test_with_checksums_damage_is_raised_on_all_ranks_whatever_brings_gradients(
    four: Ranks, source: str
) -> None:
    found = four(damaged, MADE[source])
    assert [each.error for each in found] == ["PeerFailed", "PeerFailed", "PeerFailed", "WireError"]
    # By its number among all ranks, also where the message was between nodes or inside one.
    assert found[3].text.startswith("rank 3 received damaged bytes from rank ")
    for each in found:
        assert "3" in each.text
        assert each.after == each.before
        assert each.step == 3
        # A call hears of it on all ranks, too, and works again after that.
        assert each.diagnosing == each.error
        assert each.diagnosed_step == 2


@dataclass(frozen=True)
class Roomless:
    """What three steps raise, and parameters after them."""

    before: str
    during: str
    after: str
    digest: str


def without_room(name: str, size: int) -> Roomless:
    """Rank 1 has no room for what it gets or sends inside its node, in the second of three steps."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(size, size))
    optimizer, honest = optimizer_of(ddp, lr=0.01), getattr(Packing, name)
    gradwire.attach(ddp, optimizer, "int8", nodes=NODES)

    def error_in_a_step(fails: bool) -> str:
        left = [MemoryError("no room")] * fails

        def packed(*arguments: Any) -> Any:
            if left:
                raise left.pop()
            return honest(*arguments)

        drawn = torch.randn(4, size, generator=torch.Generator().manual_seed(dist.get_rank()))
        optimizer.zero_grad()
        with patch.object(Packing, name, packed):
            try:
                ddp(drawn).square().mean().backward()
            except (PeerFailed, MemoryError) as error:
                return type(error).__name__
        optimizer.step()
        return ""

    errors = [error_in_a_step(fails and dist.get_rank() == 1) for fails in (False, True, False)]
    return Roomless(*errors, digest(ddp))


@pytest.mark.parametrize("size", [16, 512])  # gloo's own all-to-all, or messages
@pytest.mark.parametrize("name", ["rows", "pack"])
def test_a_rank_without_memory_inside_its_node_is_paid_for_and_training_goes_on(
    four: Ranks, name: str, size: int
) -> None:
    found = four(without_room, name, size)
    assert len({each.digest for each in found}) == 1
    assert [each.during for each in found] == ["PeerFailed", "MemoryError", "PeerFailed", "PeerFailed"]
    assert all(each.before == each.after == "" for each in found)


@dataclass(frozen=True)
class Unconnected:
    """What is raised, and its cause; how many groups the next model makes, which ignores nodes."""

    said: str
    cause: str
    made: int


def unconnected() -> Unconnected:
    """Rank 1 makes a group with the other rank of its node, and then hears that it could not."""
    # With a timeout of its own, so that groups of other scenes do not serve, nor the one that is left.
    group, new_group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S - 1)), dist.new_group

    def new(ranks: Sequence[int], **options: Any) -> Any:
        made = new_group(ranks, **options)
        if dist.get_rank() == 1 and len(ranks) == 2:
            raise RuntimeError("connectFullMesh failed")
        return made

    said, cause = "attached", ""
    with patch("torch.distributed.new_group", new):
        try:
            _attached("int8", process_group=group)
        except TransportError as error:
            said, cause = str(error), type(error.__cause__).__name__
    made = len(dist.distributed_c10d._world.pg_map)
    ddp, optimizer, _wire = _attached("int8", None, process_group=group)
    train(ddp, optimizer, range(1))
    return Unconnected(said, cause, len(dist.distributed_c10d._world.pg_map) - made)


def test_a_rank_that_cannot_connect_inside_its_node_is_named_on_all_ranks(four: Ranks) -> None:
    for rank, found in enumerate(four(unconnected)):
        assert found.said == "ranks [1] could not connect to those of their node"
        assert found.cause == ("TransportError" if rank == 1 else "NoneType")
        assert found.made == 0, "the group of the refused model is lent to the next one"


def groups_made() -> list[int]:
    """How many groups each of two models makes, one after the other."""
    counts = [len(dist.distributed_c10d._world.pg_map)]
    for _ in range(2):
        ddp, optimizer, wire = _attached("int8")
        train(ddp, optimizer, range(1))
        counts.append(len(dist.distributed_c10d._world.pg_map))
        del ddp, optimizer, wire
    return [after - before for before, after in pairwise(counts)]


def test_groups_are_lent_to_the_next_model(four: Ranks) -> None:
    for first, second in four(groups_made):
        assert first >= 3, "among all, inside the node, and between nodes"
        assert second == 0


# -- states and buffers


def statistics() -> list[float]:
    """Of a layer that normalises, after three passes."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 64)))
    gradwire.attach(ddp, optimizer_of(ddp), "int8", nodes=NODES)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        ddp(torch.randn(16, 8, generator=generator)).sum().backward()
    found: list[float] = ddp.module[1].running_mean.tolist()
    return found


def test_buffers_come_from_rank_0(four: Ranks) -> None:
    found = four(statistics)
    assert any(found[0])
    assert found == [found[0]] * 4


@dataclass(frozen=True)
class States:
    """Parameters of a run, and of one that was resumed; what is unsent, as it was and as it is elsewhere."""

    whole: str
    resumed: str
    mean: dict[str, str]
    to_flat: dict[str, str]
    back: dict[str, str]
    """On other nodes."""
    own_by_dcp: tuple[dict[str, str], dict[str, str]]
    flat_by_dcp: tuple[dict[str, str], dict[str, str]]
    files: int
    saved_step: int
    loaded_steps: list[int]
    off: dict[str, float]
    """By nodes that have read these files, how far the mean is from what it was."""


def states() -> States:
    """Own states resume bit for bit; the mean moves to a flat world and back."""

    def mean_of(wire: Any) -> dict[str, Tensor]:
        memory: dict[str, Tensor] = wire.mean_state_dict()["mean"]["memory"]
        return memory

    ddp, optimizer, wire = _attached(FEW)
    train(ddp, optimizer, range(3))
    own, mean = wire.state_dict(), wire.mean_state_dict()["mean"]
    model = {name: value.clone() for name, value in ddp.module.state_dict().items()}
    train(ddp, optimizer, range(3, 6))
    again, optimizer, wire = _attached(FEW)
    again.module.load_state_dict(model)
    wire.load_state_dict(own)
    train(again, optimizer, range(3, 6))
    *_, flat = _attached(FEW, None)
    flat.load_state_dict(mean)
    place = Path(os.environ[FOLDER], "dcp")
    dcp.save({"wire": WireState(wire)}, checkpoint_id=place)
    before = prints(own_state(wire)["memory"]), prints(mean_of(wire))
    by_dcp = []
    for nodes in (NODES, None):
        *_, other = _attached(FEW, nodes)
        dcp.load({"wire": WireState(other, place)}, checkpoint_id=place)
        by_dcp.append(prints(own_state(other)["memory"] if nodes else mean_of(other)))
    *_, back = _attached(FEW, OTHERS)
    back.load_state_dict(flat.mean_state_dict()["mean"])
    here = mean_of(back)
    folders = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folders)
    [folder] = folders
    saved_step = back.save(folder)
    dist.barrier()  # a rank returns once all are ready, and its file has its last name a little later
    files, loaded, off = len(list(Path(folder).glob("*.pt"))), [], {}
    for name, nodes in (("own files", OTHERS), ("other nodes", NODES), ("no nodes", None)):
        *_, other = _attached(FEW, nodes)
        loaded.append(other.load(folder))
        memory = mean_of(other)
        off[name] = float(torch.stack([(memory[key] - each).abs().max() for key, each in here.items()]).max())
    return States(
        digest(ddp),
        digest(again),
        prints(mean["memory"]),
        prints(mean_of(flat)),
        prints(here),
        (before[0], by_dcp[0]),
        (before[1], by_dcp[1]),
        files,
        saved_step,
        loaded,
        off,
    )


@pytest.mark.rest
def test_states_resume_and_move(four: Ranks) -> None:
    for found in four(states):
        assert found.resumed == found.whole
        assert found.mean
        assert found.to_flat == found.mean
        assert found.back == found.mean
        for before, after in (found.own_by_dcp, found.flat_by_dcp):
            assert after == before
        assert found.files == 4
        assert found.loaded_steps == [found.saved_step] * 3
        # The mean over other nodes: the states are added up in another order, of numbers below 1.
        assert {name: off for name, off in found.off.items() if not off <= 1e-6} == {}


@dataclass(frozen=True)
class HandedOver:
    """By parameter, gradients that a flush gave, and the mean unsent before; parameters in the end."""

    given: dict[str, Tensor]
    unsent: dict[str, Tensor]
    diagnosis: str
    digest: str


def handed_over() -> HandedOver:
    """After the flush the wire is detached, and training goes on."""
    ddp, optimizer, wire = _attached(FEW)
    wire.watching = True
    train(ddp, optimizer, range(3))
    diagnosis = str(wire.diagnose())
    unsent = wire.mean_state_dict()["mean"]["memory"]
    optimizer.zero_grad()
    wire.flush()
    given = {name: p.grad.clone() for name, p in ddp.module.named_parameters() if p.grad is not None}
    wire.detach()
    train(ddp, optimizer, range(2))
    return HandedOver(given, unsent, diagnosis, digest(ddp))


def test_flush_detach_and_diagnose_are_those_of_whole_parameters(four: Ranks) -> None:
    found = four(handed_over)
    assert len({each.digest for each in found}) == 1
    for each in found:
        assert each.unsent
        assert each.diagnosis
        for name, unsent in each.unsent.items():
            torch.testing.assert_close(each.given[name], unsent, rtol=1e-6, atol=1e-8)


def uneven_batches() -> str:
    """Under `join()`, with one batch more on every second rank."""
    ddp, optimizer, _wire = _attached("int8", find_unused_parameters=True)
    with ddp.join():
        train(ddp, optimizer, range(3 + dist.get_rank() % 2))
    return digest(ddp)


def test_ranks_may_have_different_numbers_of_batches(four: Ranks) -> None:
    assert len(set(four(uneven_batches))) == 1


# -- which nodes there are


@contextmanager
def launched(per_node: str | None) -> Iterator[None]:
    """By a launcher that says this."""
    with patch.dict(os.environ):
        os.environ.pop("LOCAL_WORLD_SIZE", None)
        if per_node is not None:
            os.environ["LOCAL_WORLD_SIZE"] = per_node
        yield


@dataclass(frozen=True)
class Found:
    """How many ranks of a node add up first, and warnings, also of a switch."""

    per_node: int
    warned: list[str]


def found_nodes(said: tuple[str | None, ...], nodes: Any = "auto") -> Found:
    """Where launchers say this, by rank."""
    log, logger = BufferingHandler(100), logging.getLogger("gradwire")
    logger.addHandler(log)
    with launched(said[dist.get_rank()]):
        *_, wire = _attached("int8", nodes)
        wire.switch("int4")
    logger.removeHandler(log)
    lines = [each.getMessage() for each in log.buffer]
    return Found(wire.report().per_node, [line for line in lines if "not added up inside" in line])


UNEVEN = ("3", "3", "3", "1")


def test_auto_goes_by_the_launcher_and_leaves_alone_what_would_not_gain(four: Ranks) -> None:
    for said, per_node in ((None, 1), ("2", 2), ("4", 1), ("two", 1)):
        assert four(found_nodes, (said,) * 4) == [Found(per_node, [])] * 4, said
    assert four(found_nodes, UNEVEN, None) == [Found(1, [])] * 4, "asked to be flat"
    for rank, found in enumerate(four(found_nodes, UNEVEN)):
        assert found.per_node == 1
        assert len(found.warned) == (rank == 0)
        for line in found.warned:
            assert line.startswith("nodes differ in size, from 1 to 3 ranks: ")
            assert "nodes=None" in line


def adding_up(recipe: str, nodes: Any) -> int:
    """How many ranks of a node add up first, where the launcher says two.

    Without biases, which are summed by all ranks, and gain by two levels however few they are.
    """
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(2))))
    with launched("2"):
        return gradwire.attach(ddp, optimizer_of(ddp), recipe, nodes=nodes).report().per_node


def test_auto_stays_flat_where_a_recipe_sends_little(four: Ranks) -> None:
    assert four(adding_up, "dense", "auto") == [2] * 4
    assert four(adding_up, "topk(ratio=0.001)", "auto") == [1] * 4
    assert four(adding_up, "topk(ratio=0.001)", NODES) == [2] * 4


def told_in_other_ways() -> dict[str, int]:
    """Groups, and a mesh of nodes by ranks; ranks that can be read once, and an array of them."""
    ways = {
        "groups": [dist.new_group(list(each)) for each in NODES],
        "mesh": dist.init_device_mesh("cpu", (2, 2)),
        "across": [[0, 3], [2, 1]],
        "generators": (iter(each) for each in NODES),
        "array": torch.tensor(NODES).numpy(),
    }
    return {name: _attached("int8", nodes)[2].report().per_node for name, nodes in ways.items()}


def test_nodes_may_be_groups_or_a_mesh_or_be_read_once(four: Ranks) -> None:
    for found in four(told_in_other_ways):
        assert set(found.values()) == {2}, found


def refused(*nodes: Any) -> tuple[str, str]:
    """What is raised; `nodes` are of each rank, or alike on all."""
    try:
        _attached("int8", nodes[dist.get_rank() % len(nodes)])
    except (ValueError, RanksDisagree) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_what_cannot_be_is_refused_on_all_ranks(four: Ranks) -> None:
    for nodes, words in {
        ("auto", NODES, NODES, NODES): "nodes",
        (NODES, NODES, OTHERS, OTHERS): "say otherwise",
        (((0, 1, 2), (3,)),): "differ in size",
        (((0, 1), (2, 3, 9)),): "9",
        ("two",): "neither 'auto'",
        (2,): "nodes=2 is neither 'auto'",
        ((0, 1, 2, 3),): "nodes has 0, which is neither the ranks of a node nor a group",
    }.items():
        found = four(refused, *nodes)
        assert all(words in text for _, text in found), words
        if nodes[0] == "auto":
            assert [error for error, _ in found] == ["RanksDisagree"] * 4
    one_lacks = four(refused, NODES, NODES, NODES, ((0, 1), (2,)))
    assert [error for error, _ in one_lacks] == ["RanksDisagree"] * 3 + ["ValueError"]
