"""Real gloo ranks: exact gathers beside stock FSDP2 with the same policy, bit for bit."""

from __future__ import annotations

import copy
import gc
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

import gradwire
from gradwire_lab.workloads.catalogue import workload
from tests.process.fsdp_models import (
    BF16,
    LOOPS,
    WIDTH,
    Carried,
    Layered,
    Loop,
    Stock,
    Tied,
    adam,
    bits,
    carried,
    evaluated,
    in_backward,
    kinds,
    loss_of,
    mesh,
    move,
    plain,
    refusal,
    reshard,
    sharded,
    stock,
    train,
    whole,
)
from tests.support.ranks import FOLDER
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process


def like_stock(ranks: Ranks, loop: Loop = plain, nodes: Any = None, **how: Any) -> list[Carried]:
    """A run with exact gathers, which has the bits of one of stock FSDP2."""
    how = {"mp_policy": BF16, **how}
    found = ranks(carried, "dense", "exact", loop, nodes=nodes, guard_every=2, **how)
    assert len({each.masters for each in found}) == 1
    for each, other in zip(found, ranks(stock, loop, **how), strict=True):
        assert each.masters == other.masters
        assert each.losses == pytest.approx(other.losses, rel=0.0, abs=0.0, nan_ok=True)
    return found


# -- loops


def thawed(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """Parts are frozen and thawed between steps."""
    losses = train(model, optimizer, range(2))
    model.side.requires_grad_(False)
    losses += train(model, optimizer, range(2, 4))
    model.side.requires_grad_(True)
    return losses + train(model, optimizer, range(4, 6))


def left_out(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = train(model, optimizer, range(2))
    optimizer.zero_grad()
    loss_of(model, 7).backward()
    return losses + train(model, optimizer, range(2, 4))


def not_a_number(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """A master becomes NaN, and goes back."""
    losses = train(model, optimizer, range(2))
    saved = copy.deepcopy({name: each.detach().clone() for name, each in model.state_dict().items()})
    reshard(model)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(torch.nan)
    losses += train(model, optimizer, range(2, 4))
    reshard(model)
    model.load_state_dict(saved)
    optimizer.state.clear()
    return losses + train(model, optimizer, range(4, 6))


def dropped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """A gather is begun, and its result is thrown away."""
    losses = train(model, optimizer, range(2))
    begun(model, is_dropped=True)
    return losses + train(model, optimizer, range(2, 5))


def begun(model: Any, *, is_dropped: bool) -> weakref.ref[Tensor]:
    """Gather the first block by hand, and let it go. Returns what was gathered."""
    block = model.blocks[0]
    block.unshard(async_op=True)
    state: Any = block._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    gathered = weakref.ref(groups[0]._all_gather_result.all_gather_output)
    if is_dropped:
        groups[0]._all_gather_result = None
    else:
        block.unshard()
    block.reshard()
    return gathered


def moved(how: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Masters are moved in ways that torch may not count."""
    losses = train(model, optimizer, range(2)) + move(how, model, optimizer)
    return losses + train(model, optimizer, range(4, 6))


def gathered_once(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """Three micro-batches a step, between which parameters stay gathered."""
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        for part in range(3):
            model.set_requires_gradient_sync(part == 2)
            model.set_reshard_after_backward(part == 2)
            loss = loss_of(model, 3 * step + part)
            loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def far_ahead(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """All gathers of a pass are in flight at once."""
    modules = [each for each in model.modules() if isinstance(each, FSDPModule)]
    for number, each in enumerate(modules):
        each.set_modules_to_forward_prefetch(modules[number + 1 :])
        each.set_modules_to_backward_prefetch(modules[:number][::-1])
    return train(model, optimizer, range(5))


def raised(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """All ranks raise in the middle of a pass, catch it, and begin the next pass."""
    losses = train(model, optimizer, range(2))

    def refuse(*_: Any) -> None:
        raise KeyError("planted")

    planted = model.blocks[-1][0].register_forward_pre_hook(refuse)
    with suppress(KeyError):
        loss_of(model, 9)
    planted.remove()
    return losses + train(model, optimizer, range(2, 5))


# -- models and optimizers


class Adapted(nn.Linear):
    """A linear layer, and beside it an adapter of rank 4."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + self.up(self.down(inputs))


class WithAdapters(Layered):
    """Blocks whose weights are frozen beside adapters that are trained."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block[0] = Adapted()


class Many(Layered):
    """40 modules, every second one of 130 parameters."""

    def __init__(self) -> None:
        super().__init__(blocks=0)
        for _ in range(20):
            self.blocks += nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def signs(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer whose steps have one size in all directions, as Muon's nearly have."""

    class Signs(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        each.sub_(each.grad.sign(), alpha=group["lr"])

    return Signs(model.parameters(), {"lr": 0.01})


class Both(list[torch.optim.Optimizer]):
    """Several optimizers, which step one after the other."""

    def zero_grad(self) -> None:
        for each in self:
            each.zero_grad()

    def step(self) -> None:
        for each in self:
            each.step()


def muon(model: nn.Module) -> Any:
    """torch's Muon for the matrices of blocks, and AdamW for all else."""
    inner = [each for name, each in model.named_parameters() if each.ndim == 2 and "blocks" in name]
    others = [each for each in model.parameters() if not any(each is one for one in inner)]
    return Both([torch.optim.Muon(inner, lr=0.02), torch.optim.AdamW(others, lr=0.01)])


# -- beside stock


FROZEN = "first", "last", "side", *(f"blocks.{block}.0.{name}" for block in range(2) for name in ("w", "b"))
"""Where names of parameters begin that are not adapters'."""
PLAIN: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "SGD": {"optimizer": sgd},
    "signs": {"optimizer": signs},
    "Muon": {"optimizer": muon},
    "float16": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float16)},
    **{name: {"loop": loop} for name, loop in LOOPS.items()},
    "frozen": {"frozen": ("first", "blocks.0")},
    "thawed": {"loop": thawed},
    "tied": {"make": Tied},
    "recomputing": {"make": partial(Layered, again=False)},
    "recomputing, reentrant": {"make": partial(Layered, again=True)},
    "kept gathered": {"reshard_after_forward": False},
    "compiled": {"compiled": True},
    "evaluated": {"loop": evaluated},
    "left out": {"loop": left_out},
    "not a number": {"loop": not_a_number},
    "dropped": {"loop": dropped},
    "gathered once": {"loop": gathered_once},
    "far ahead": {"loop": far_ahead, "make": partial(Layered, blocks=6)},
    "many, far ahead": {"loop": far_ahead, "make": Many},
    "raised": {"loop": raised},
    "adapters": {"loop": evaluated, "make": WithAdapters, "frozen": FROZEN},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "moved in backward": {"optimizer": in_backward},
    **{
        f"moved by {how}": {"loop": partial(moved, how)}
        for how in (".data", "_local_tensor", "average", "load_state_dict", "dcp", "on one rank")
    },
    "fused": {"optimizer": partial(adam, fused=True)},
    "for-loop": {"optimizer": partial(adam, foreach=False)},
}


@pytest.mark.parametrize("name", rest(PLAIN, but=["AdamW", "dropped"]))
def test_every_bit_is_stock_fsdp2s(two: Ranks, name: str) -> None:
    for found in like_stock(two, **PLAIN[name]):
        assert "exact: changes" in found.gathered
        assert "of gathered parameters on every rank" in found.text


ON_FOUR: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "accumulated": {"loop": LOOPS["accumulated"]},
    "gathered again over two": {"reshard_after_forward": 2},
    "by nodes, dropped": {"loop": dropped, "nodes": [[0, 2], [1, 3]]},
}


@pytest.mark.rest
@pytest.mark.parametrize(
    "name", [*ON_FOUR, *(pytest.param(each, marks=pytest.mark.full) for each in PLAIN if each not in ON_FOUR)]
)
def test_on_four_ranks_too(four: Ranks, name: str) -> None:
    like_stock(four, **{**PLAIN, **ON_FOUR}[name])


@pytest.mark.rest
def test_by_nodes_a_rank_holds_the_part_of_its_place(four: Ranks) -> None:
    by_nodes, flat = like_stock(four, nodes=[[0, 1], [2, 3]]), like_stock(four)
    assert [each.held_bytes for each in by_nodes] == [each.held_bytes // 2 for each in flat]


@dataclass(frozen=True)
class Text(Stock):
    """And bytes of gathers, as a share of stock's."""

    share: float


def of_text(gather: str | None) -> Text:
    """The lab's transformer over characters, with its optimizer and its data; `None` is stock FSDP2."""
    work = workload("chargpt")
    model = work.model(0)
    for layer in (*model.get_submodule("layers").children(), model):
        fully_shard(layer, mesh=mesh(), mp_policy=BF16)
    optimizer = work.optimizer(model.parameters())
    how: Any = {"gather": gather, "nodes": None}
    wire = gradwire.attach(model, optimizer, "dense", **how) if gather else None
    batches, losses = work.batches(dist.get_rank(), dist.get_world_size(), 0), []
    for _ in range(6):
        optimizer.zero_grad()
        loss = work.loss(model, next(batches))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    told = {} if wire is None else wire.report().as_dict()
    share = told["gather_bytes_per_step"] / (told["dense_bytes_per_step"] * 2 / 3) if told else 1.0
    return Text(losses, bits(whole(model)), share)


@pytest.mark.rest
def test_the_lab_s_transformer_has_the_bits_of_stock_for_less_than_a_third_of_its_bytes(two: Ranks) -> None:
    for found, other in zip(two(of_text, "exact"), two(of_text, None), strict=True):
        assert found.masters == other.masters
        assert found.losses == other.losses
        assert found.share < 1 / 3, "with the first gather, in which all goes as it is"


# -- breaks


@dataclass(frozen=True)
class Gone(Stock):
    """The last steps of a run, and what gathers were then."""

    gathered: list[str]


def goes_on(break_: str, recipe: str = "dense") -> Gone:
    """A run of six steps, with a `break_` after three: "none", a "switch" to the same, or "resumed"."""
    model = sharded(mp_policy=BF16)
    optimizer = sgd(model)
    wire = gradwire.attach(model, optimizer, recipe, gather="exact", nodes=None)
    train(model, optimizer, range(3))
    if break_ == "switch":
        wire.switch(recipe)
    elif break_ == "resumed":
        state, steps, ours = model.state_dict(), optimizer.state_dict(), wire.state_dict()
        model = sharded(seed=4, mp_policy=BF16)
        optimizer = sgd(model)
        wire = gradwire.attach(model, optimizer, recipe, gather="exact", nodes=None)
        model.load_state_dict(state)
        optimizer.load_state_dict(steps)
        wire.load_state_dict(ours)
    losses = train(model, optimizer, range(3, 6))
    return Gone(losses, bits(whole(model)), kinds(wire, "gathered"))


@pytest.mark.rest
@pytest.mark.parametrize(("break_", "recipe"), [("resumed", "int4"), ("switch", "dense")])
def test_a_run_that_is_resumed_or_switched_to_the_same_goes_on_bit_for_bit(
    two: Ranks, break_: str, recipe: str
) -> None:
    for found, other in zip(two(goes_on, break_, recipe), two(goes_on, "none", recipe), strict=True):
        assert found.masters == other.masters
        assert found.losses == other.losses
        if break_ == "switch":
            assert found.gathered == ["exact: changes", "exact: unchanged"], "what is held stays"


def in_another_world(gather: str | None) -> Gone:
    """A run of all ranks is saved by DCP, and goes on in halves of them, each with a wire of its own; `None`
    is stock FSDP2."""
    halves = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("halves", "ranks"))
    folder = Path(os.environ[FOLDER], f"other world {gather}")

    def begun(**how: Any) -> tuple[Any, torch.optim.Optimizer, gradwire.Wire | None]:
        model = sharded(mp_policy=BF16, **how)
        optimizer = sgd(model)
        if gather is None:
            return model, optimizer, None
        return model, optimizer, gradwire.attach(model, optimizer, "dense", gather=gather, nodes=None)

    model, optimizer, wire = begun()
    train(model, optimizer, range(3))
    reshard(model)
    dcp.save(
        dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True)), checkpoint_id=folder
    )
    model, optimizer, wire = begun(seed=4, over=halves["ranks"])
    train(model, optimizer, range(1))
    reshard(model)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = train(model, optimizer, range(3, 6))
    return Gone(losses, bits(whole(model)), [] if wire is None else kinds(wire, "gathered"))


@pytest.mark.rest
def test_a_run_that_dcp_has_saved_goes_on_in_another_world(four: Ranks) -> None:
    for found, other in zip(four(in_another_world, "exact"), four(in_another_world, None), strict=True):
        assert found.masters == other.masters
        assert found.losses == other.losses
        assert "exact: changes" in found.gathered


def switched() -> list[list[str]]:
    """What gathers were after each switch: from rounded ones to exact ones, to none and back."""
    model = sharded(mp_policy=BF16)
    optimizer = adam(model)
    wire = gradwire.attach(model, optimizer, "dense", gather="int8", nodes=None)
    train(model, optimizer, range(2))
    found = []
    for gather in ("exact", None, "exact"):
        wire.switch("dense", gather=gather)
        train(model, optimizer, range(2))
        found.append(kinds(wire, "gathered"))
    wire.detach()
    train(model, optimizer, range(2))
    return found


@pytest.mark.rest
def test_gathers_may_be_switched(two: Ranks) -> None:
    for found in two(switched):
        assert [any("exact" in kind for kind in each) for each in found] == [True, False, True]


@dataclass(frozen=True)
class LetGo:
    """Whether gathered parameters are gone: after a wait, and where FSDP2 has dropped the gather."""

    waited_for: bool
    switched: bool
    detached: bool


def let_go() -> LetGo:
    model = sharded(mp_policy=BF16)
    wire = gradwire.attach(model, adam(model), "dense", gather="exact", nodes=None)
    reshard(model)

    def is_gone(gathered: weakref.ref[Tensor]) -> bool:
        gc.collect()
        return gathered() is None

    waited_for = is_gone(begun(model, is_dropped=False))
    gathered = begun(model, is_dropped=True)
    wire.switch("dense", gather="exact")
    is_switched = is_gone(gathered)
    gathered = begun(model, is_dropped=True)
    wire.detach()
    return LetGo(waited_for, is_switched, is_gone(gathered))


def test_nothing_keeps_what_was_gathered(two: Ranks) -> None:
    for found in two(let_go):
        assert found.waited_for
        assert found.switched
        assert found.detached


def refused() -> dict[str, str]:
    """Each in its words."""

    def said(model: nn.Module, **how: Any) -> str:
        return refusal(lambda: gradwire.attach(model, None, "dense", **how))

    def switched(gather: Any) -> str:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).bfloat16())
        wire = gradwire.attach(fully_shard(model, mesh=mesh()), None, "dense")
        return refusal(lambda: wire.switch("dense", gather=gather))

    return {
        "mixed, exact": switched("exact"),
        "mixed, int8": switched("int8"),
        "float32": said(sharded(), gather="exact"),
        "held_on": said(sharded(mp_policy=BF16), gather="int8", held_on="host"),
        "guard_every": said(sharded(), guard_every=5),
        "nowhere": said(sharded(mp_policy=BF16), gather="exact", held_on="disk"),
    }


MIXED = "gathered as raw bytes, because it has torch.bfloat16 and torch.float32"
REFUSED = {
    "mixed, exact": MIXED,
    "mixed, int8": MIXED,
    "float32": "param_dtype=torch.bfloat16",
    "held_on": 'held_on= is for gather="exact"',
    "guard_every": "guard_every= is for",
    "nowhere": "held_on='disk'",
}


def test_what_cannot_be_exact_is_refused_with_what_to_write(two: Ranks) -> None:
    for found in two(refused):
        assert [name for name in REFUSED if REFUSED[name] not in found[name]] == [], found
