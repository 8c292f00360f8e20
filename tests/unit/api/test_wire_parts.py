"""What the kinds of wires have not: one rank by itself. The sentence says what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire
from tests.support.models import optimizer_of, perceptron

pytestmark = pytest.mark.usefixtures("world_of_one")


def outer(**who: Any) -> gradwire.OuterWire:
    model = perceptron()
    return gradwire.outer(model, optimizer_of(model), "dense", every=2, **who)


def sharded() -> gradwire.Wire:
    model = perceptron()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    return gradwire.attach(model, optimizer_of(model), "dense")


KINDS: dict[str, Callable[[Path], gradwire.Wire]] = {
    "replicas": lambda _folder: outer(replicas=dist.group.WORLD),
    "members": lambda _folder: outer(members=gradwire.members.fixed(dist.group.WORLD)),
    "store": lambda folder: outer(members=gradwire.members.store(str(folder / "run"), "site", at_least=1)),
    "FSDP2": lambda _folder: sharded(),
}
CALLS: dict[str, Callable[[Any], object]] = {
    "attached": lambda wire: wire.attached,
    "diagnose": lambda wire: wire.diagnose(),
    "exact": lambda wire: wire.exact(),
    "flush": lambda wire: wire.flush(),
    "join": lambda wire: wire.join(),
    "load": lambda wire: wire.load("nowhere"),
    "load_state_dict": lambda wire: wire.load_state_dict({}),
    "mean_state_dict": lambda wire: wire.mean_state_dict(),
    "note_loss": lambda wire: wire.note_loss(1.0),
    "overlap": lambda wire: setattr(wire, "overlap", False),
    "state_dict": lambda wire: wire.state_dict(),
    "switch": lambda wire: wire.switch("dense"),
    "trace": lambda wire: wire.trace("step.json"),
    "watching": lambda wire: setattr(wire, "watching", True),
}
FLUSH = "flush() adds to gradients, which replicas keep to themselves here: detach() sends what is unsent"
FIXED = "is for a fixed set of replicas, and members= has others"
RESUME = f"{FIXED}: pass outer(…, resume=folder)"
MEMBERS = {
    "diagnose": f"diagnose() {FIXED}: diagnose a run of one replica",
    "exact": f"exact() {FIXED}: no parameters are rounded",
    "flush": FLUSH,
    "join": f"join() {FIXED}: members need not make as many steps",
    "load": f"load() {RESUME}, so that members hear of it before they meet",
    "load_state_dict": f"load_state_dict() {RESUME}",
    "mean_state_dict": f"mean_state_dict() {FIXED}: call save(folder)",
    "state_dict": f"state_dict() {FIXED}: call save(folder)",
    "switch": f"switch() {FIXED}: start all members with the recipe",
    "watching": f"watching {FIXED}: diagnose a run of one replica",
}
NOT_KNOWN = (
    "FSDP2 carries out its steps itself, so that this is not known of its own traffic. With replicas= a wire "
    "between nodes has it"
)
REFUSED: dict[str, dict[str, str]] = {
    "replicas": {"flush": FLUSH},
    "members": MEMBERS,
    "store": {
        **MEMBERS,
        "attached": "rounds over a store have no process group, and so no exchange to look at",
        "overlap": f"overlap = False {FIXED}: leave out delay=",
        "trace": f"trace() {FIXED}: look at wire.events",
    },
    "FSDP2": dict.fromkeys(("attached", "diagnose", "note_loss", "overlap", "trace", "watching"), NOT_KNOWN),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_wire_has_not_says_why_and_what_to_do(kind: str, tmp_path: Path) -> None:
    wire, said = KINDS[kind](tmp_path), dict[str, str]()
    for name in REFUSED[kind]:
        with pytest.raises(ValueError) as refused:  # noqa: PT011 - the text is compared below
            CALLS[name](wire)
        said[name] = str(refused.value)
    assert said == REFUSED[kind]


@pytest.mark.parametrize("kind", ["members", "store"])
def test_what_a_part_that_is_lacking_has_may_be_written_as_it_is(kind: str, tmp_path: Path) -> None:
    wire = KINDS[kind](tmp_path)
    wire.watching, wire.overlap = False, True
    assert (wire.watching, wire.overlap, wire.settled) == (False, True, True)
    with wire.no_sync():
        pass
    assert isinstance(wire, gradwire.OuterWire)
