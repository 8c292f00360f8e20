"""Real gloo ranks: a parameter goes by one wire, and what is sent by number has the same names everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from tests.support.models import batch, gradients, optimizer_of, same
from tests.support.world import Ranks

pytestmark = pytest.mark.process


EVERY = 3


class Tied(nn.Module):
    """A body and a head, whose last matrix is the body's first one, as of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.body = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 8))
        self.head = nn.ModuleDict({"norm": nn.LayerNorm(8), "out": nn.Linear(8, 16, bias=False)})
        self.head["out"].weight = self.body[0].weight

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head["out"](self.head["norm"](self.body(inputs)))
        return out


class Network(nn.Module):
    """A head of its own, behind an encoder that others may have, too."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(16, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.encoder(inputs)))
        return out


def around_one_encoder() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(8)
    encoder = nn.Linear(8, 16)
    return Network(encoder), Network(encoder)


def inputs_of(step: int) -> Tensor:
    return batch(step)[0][:, :8]


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(inputs_of(step)).square().mean()


def outer(model: nn.Module, recipe: str = "diloco", **options: Any) -> gradwire.OuterWire:
    return gradwire.outer(
        model, optimizer_of(model), recipe, **{"replicas": dist.group.WORLD, "every": EVERY} | options
    )


def plain(model: nn.Module) -> gradwire.Wire:
    return gradwire.attach(model, optimizer_of(model), "dense", replicas=dist.group.WORLD)


def wrapped(model: nn.Module) -> gradwire.Wire:
    return gradwire.attach(DistributedDataParallel(model), None, "dense")


def between(model: nn.Module) -> gradwire.Wire:
    """Shards of one rank each, averaged over both."""
    return gradwire.attach(model, None, "dense", replicas=dist.group.WORLD)


def sharded(model: nn.Module) -> gradwire.Wire:
    """FSDP2's own traffic."""
    return gradwire.attach(model, None, "int8")


def under_fsdp(ranks: int) -> tuple[nn.Module, nn.Module]:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("nodes", "ranks"))
    one, other = around_one_encoder()
    fully_shard(one.encoder, mesh=mesh["ranks"])
    return fully_shard(one, mesh=mesh["ranks"]), fully_shard(other, mesh=mesh["ranks"])


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, KeyError, gradwire.GradwireError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def parts() -> tuple[nn.Module, nn.Module]:
    model = Tied()
    return model.body, model.head


def one_inside() -> tuple[nn.Module, nn.Module]:
    model, _ = around_one_encoder()
    return model, model.encoder  # type: ignore[return-value]


PAIRS: dict[str, tuple[Callable[[], tuple[nn.Module, nn.Module]], Callable[..., Any], Callable[..., Any]]] = {
    "tied weights, outer, outer": (parts, outer, outer),
    "one encoder, outer, outer": (around_one_encoder, outer, outer),
    "one inside, outer, outer": (one_inside, outer, outer),
    "one encoder, plain, plain": (around_one_encoder, plain, plain),
    "one inside, plain, plain": (one_inside, plain, plain),
    "one encoder, ddp, ddp": (around_one_encoder, wrapped, wrapped),
    "one encoder, plain, outer": (around_one_encoder, plain, outer),
    "one encoder, ddp, outer": (around_one_encoder, wrapped, outer),
    "one encoder, outer, plain": (around_one_encoder, outer, plain),
    "one encoder, outer, ddp": (around_one_encoder, outer, wrapped),
    "one encoder, shards, shards": (lambda: under_fsdp(1), between, between),
    "one encoder, shards, outer": (lambda: under_fsdp(1), between, outer),
    "one encoder, fsdp, fsdp": (lambda: under_fsdp(2), sharded, sharded),
}
"""Two modules that share parameters, and what makes a wire of each."""


def refused() -> dict[str, str]:
    """What the second call says."""
    found = {}
    for name, (build, first, second) in PAIRS.items():
        one, other = build()
        wire = first(one)
        found[name] = _said(lambda second=second, other=other: second(other))
        wire.detach()
    return found


def refused_for_the_same_module() -> str:
    """Another wrapper replaces none here, because rounds go by the optimizer's steps."""
    model, _ = around_one_encoder()
    wire = outer(model)
    said = _said(lambda: outer(torch.compile(model)))  # type: ignore[arg-type]
    wire.detach()
    return said


def refused_on_one_rank() -> dict[str, Any]:
    """Rank 1's networks have encoders of their own: it hears of rank 0's, and the first wire trains on."""
    one, other = around_one_encoder()
    if dist.get_rank() == 1:
        _, other = around_one_encoder()
    wire, said = plain(one), ""
    said = _said(lambda: plain(other))
    loss_of(one, 0).backward()
    return {"said": said, "alike": _alike(gradients(one)), "steps": wire.report().step}


def _alike(tensors: list[Tensor]) -> bool:
    flat = torch.cat([each.detach().flatten() for each in tensors])
    other = flat.clone()
    dist.broadcast(other, 0)
    return torch.equal(flat, other)


def refused_midway() -> dict[str, Any]:
    """A wire whose rounds run, and a second call for a part with tied weights: the first one goes on."""
    found = []
    for also in (False, True):
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        wire = gradwire.outer(model.body, optimizer, every=EVERY, replicas=dist.group.WORLD)
        for step in range(5 * EVERY):
            if also and step == EVERY + 1:
                _said(lambda m=model, o=optimizer: gradwire.outer(m.head, o, replicas=dist.group.WORLD))
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        wire.detach()
        found.append([each.detach().clone() for each in model.body.parameters()])
    return {"same": same(*found), "alike": _alike(found[0])}


def together() -> dict[str, Any]:
    """One module that holds both, as the refusal says: rounds of the parts are those of the whole, and two
    networks around an encoder get the mean gradient.
    """
    trained = []
    for whole in (True, False):
        model = Tied()
        optimizer = optimizer_of(model)
        given = model if whole else nn.ModuleList([model.body, model.head])
        wire = gradwire.outer(given, optimizer, every=EVERY, replicas=dist.group.WORLD)
        for step in range(3 * EVERY):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
        wire.detach()
        trained.append([each.detach().clone() for each in model.parameters()])
    one, other = around_one_encoder()
    both = nn.ModuleList([one, other])
    wire = plain(both)
    (loss_of(one, 0) + loss_of(other, 1)).backward()
    mine = gradients(both)
    with wire.no_sync():
        both.zero_grad()
        (loss_of(one, 0) + loss_of(other, 1)).backward()
    expected = gradients(both)
    for each in expected:
        dist.all_reduce(each)
        each /= dist.get_world_size()
    return {
        "rounds": same(*trained),
        "means": all(torch.allclose(a, b, atol=1e-7) for a, b in zip(mine, expected, strict=True)),
    }


def accepted() -> dict[str, Any]:
    """What shares no parameter, or no longer does, or replaces a wrapper."""
    found = {}
    model, encoder = one_inside()
    wires = [outer(encoder), outer(model.head)]  # type: ignore[arg-type]
    found["parts"] = True
    for wire in wires:
        wire.detach()
    outer(model).detach()
    found["detached"] = True
    one, _ = around_one_encoder()
    kept = [DistributedDataParallel(one), DistributedDataParallel(one)]
    for each in kept:
        gradwire.attach(each, None, "dense")
    found["another wrapper"] = True
    fsdp, network = under_fsdp(2)
    sharded(fsdp).detach()
    sharded(network).detach()
    found["detached from fsdp"] = True
    return found


def let_go() -> str:
    """A network that only a cycle of references keeps, as of a phase that has ended, claims nothing."""
    encoder = nn.Linear(8, 16)
    one = Network(encoder)
    object.__setattr__(one, "itself", one)
    ddp = DistributedDataParallel(one)
    object.__setattr__(ddp, "itself", ddp)
    gradwire.attach(ddp, None, "dense")
    del one, ddp
    return _said(lambda: wrapped(Network(encoder)))


class Ordered(nn.Module):
    """Two buffers, or two frozen parameters, of which rank 1 registers the second one first."""

    def __init__(self, what: str) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.linear = nn.Linear(8, 8)
        sizes = {"slow": 3, "fast": 4 if what == "frozen, unequal" else 3}
        for name in ("slow", "fast") if dist.get_rank() == 0 else ("fast", "slow"):
            value = torch.full((sizes[name],), 1.0 if name == "slow" else 5.0)
            if what == "buffers":
                self.register_buffer(name, value)
            else:
                self.register_parameter(name, nn.Parameter(value, requires_grad=False))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.linear(inputs)
        return out


def in_another_order() -> dict[str, Any]:
    """What is said, and whether each name keeps its value."""
    found: dict[str, Any] = {}
    for what in ("buffers", "frozen", "frozen, unequal"):
        for kind, attach in (("plain", plain), ("outer", outer), ("ddp", wrapped)):
            if (what, kind) != ("frozen, unequal", "ddp"):  # whose own constructor sends them
                model = Ordered(what)
                said = _said(lambda attach=attach, model=model: attach(model))
                found[f"{what}, {kind}"] = (said, model.slow.tolist()[0], model.fast.tolist()[0])
    return found


def members_in_another_order() -> dict[str, Any]:
    """Among members that come and go, values are put by name: at the start, and in rounds."""
    model = Ordered("buffers")
    optimizer = optimizer_of(model)
    everyone = gradwire.members.fixed(dist.group.WORLD)
    wire = gradwire.outer(model, optimizer, every=EVERY, members=everyone)
    for step in range(2 * EVERY):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    wire.detach()
    return {"slow": model.slow.tolist(), "fast": model.fast.tolist()}


def wrong_on_one_rank() -> dict[str, str]:
    """Rank 1 alone has an argument that cannot be, or optimizers that cannot be read."""
    is_wrong = dist.get_rank() == 1
    wrong: dict[str, dict[str, Any]] = {
        "every": {"every": 0},
        "delay": {"delay": EVERY},
        "placement": {"placement": "nowhere"},
        "outer": {"outer": 3},
        "every_seconds": {"every_seconds": 2.0},
    }
    found = {
        name: _said(lambda options=options: outer(nn.Linear(8, 8), **(options if is_wrong else {})))
        for name, options in wrong.items()
    }

    def read(model: nn.Module) -> Any:
        yield optimizer_of(model)
        if is_wrong:
            raise KeyError("no such group")

    for name, model, options in (
        ("ddp", DistributedDataParallel(nn.Linear(8, 8)), {}),
        ("plain", nn.Linear(8, 8), {"replicas": dist.group.WORLD}),
        ("fsdp", under_fsdp(2)[0], {}),
    ):
        found[name] = _said(lambda m=model, o=options: gradwire.attach(m, read(m), "int8", **o))
    linear = nn.Linear(8, 8)
    found["rounds"] = _said(lambda: gradwire.outer(linear, read(linear), replicas=dist.group.WORLD))
    return found


KINDS = {
    "outer": "local steps",
    "plain": "plain parameters",
    "ddp": "DistributedDataParallel",
    "shards": "shards of FSDP2",
    "fsdp": "traffic of FSDP2",
}
NAMES = {
    "tied weights": "'out.weight' (there '0.weight')",
    "one encoder": "'encoder.bias' (there 'encoder.bias')",
    "one inside": "'bias' (there 'encoder.bias')",
}


@pytest.mark.parametrize("pair", PAIRS)
def test_a_parameter_in_two_wires_is_refused_with_its_names(two: Ranks, pair: str) -> None:
    what, first, _ = pair.split(", ")
    for each in two(refused):
        text = each[pair]
        assert text.startswith(
            f"ValueError: parameters of this model are carried already, by the {KINDS[first]} of another "
            "model, over ranks [0, 1]: "
        )
        assert NAMES[what] in text
        assert "torch.nn.ModuleList([one, other])" in text


@pytest.mark.rest
def test_another_wrapper_around_a_module_whose_rounds_run_is_refused(two: Ranks) -> None:
    for said in two(refused_for_the_same_module):
        assert said.startswith(
            "ValueError: this model is carried already, by its local steps, over ranks [0, 1]: for another "
        )


def test_a_refusal_on_one_rank_is_heard_by_all_and_the_first_wire_goes_on(two: Ranks) -> None:
    one, other = two(refused_on_one_rank)
    assert one["said"].startswith("ValueError: parameters of this model are carried already")
    assert other["said"].startswith("RanksDisagree: ranks disagree on the configuration: rank 0: refused")
    assert (one["alike"], other["alike"]) == (True, True)


@pytest.mark.rest
def test_rounds_go_on_as_if_nothing_had_been_asked(two: Ranks) -> None:
    assert two(refused_midway) == [{"same": True, "alike": True}] * 2


@pytest.mark.rest
def test_one_module_that_holds_both_is_one_wire(two: Ranks) -> None:
    assert two(together) == [{"rounds": True, "means": True}] * 2


def test_what_shares_no_parameter_or_no_longer_does_is_accepted(two: Ranks) -> None:
    for each in two(accepted):
        assert all(each.values())
    assert two(let_go) == [""] * 2


NUMBERED = [
    *((what, kind) for what in ("buffers", "frozen") for kind in ("plain", "outer", "ddp")),
    *(("frozen, unequal", kind) for kind in ("plain", "outer")),  # DDP's own constructor would send them
]


@pytest.mark.parametrize(("what", "kind"), NUMBERED)
def test_tensors_that_are_sent_by_number_have_the_same_names_on_all_ranks(
    two: Ranks, what: str, kind: str
) -> None:
    named = "buffers" if what == "buffers" else "frozen parameters"
    for said, slow, fast in (each[f"{what}, {kind}"] for each in two(in_another_order)):
        assert said.startswith(
            f"RanksDisagree: ranks disagree on {named}: rank 0: slow (3,) torch.float32;fast"
        )
        if kind != "ddp":  # whose constructor has swapped them on rank 1
            assert (slow, fast) == (1.0, 5.0)


@pytest.mark.rest
def test_members_put_buffers_by_name(two: Ranks) -> None:
    assert two(members_in_another_order) == [{"slow": [1.0] * 3, "fast": [5.0] * 3}] * 2


WRONG = {
    "every": "ValueError: every=0 is not a number of steps",
    "delay": "ValueError: delay=3 is not a number of steps below every=3",
    "placement": "ValueError: placement='nowhere' is neither",
    "outer": "ValueError: outer=3 is not a function",
    "every_seconds": "ValueError: resume= and every_seconds= are for members=",
    "ddp": "KeyError: 'no such group'",
    "plain": "KeyError: 'no such group'",
    "fsdp": "KeyError: 'no such group'",
    "rounds": "KeyError: 'no such group'",
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_on_one_rank_is_heard_by_all(two: Ranks, what: str) -> None:
    zero, one = (each[what] for each in two(wrong_on_one_rank))
    assert one.startswith(WRONG[what])
    assert zero.startswith("RanksDisagree: ranks disagree on the configuration: rank 0: accepted")
    assert "rank 1: refused, " in zero
