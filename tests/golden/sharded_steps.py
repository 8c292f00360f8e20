"""Scenes of FSDP2's own traffic: what is gathered, scattered, remembered and sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gradwire import Wire, attach
from tests.golden.given import Change, Play, Row, Tell, digest, gradients, nothing

PARTS = ("first", "middle", "last")
"""Modules of `SHAPES` with parameters that FSDP2 takes; the last one is left to the root."""


class Part(nn.Module):
    """Some parameters: the sum of their products with what is given."""

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        products = [(each.float() * grads[name]).sum() for name, each in self.named_parameters()]
        return torch.stack(products).sum()


class Parts(nn.Module):
    """Modules that are gathered each for itself, and a root with parameters of its own."""

    def __init__(self, seed: int = 7) -> None:
        super().__init__()
        drawn = gradients(1000 + seed, 0)
        for part in PARTS:
            self.add_module(part, Part())
        for name, values in drawn.items():
            part, leaf = name.split(".")
            if part in PARTS:
                getattr(self, part).register_parameter(leaf, nn.Parameter(values))
        self.scale = nn.Parameter(torch.full((7,), 1.5))

    def forward(self, grads: Mapping[str, Tensor]) -> Tensor:
        of_parts = [
            part({name.split(".")[1]: each for name, each in grads.items() if name.startswith(place)})
            for place, part in self.named_children()
        ]
        return torch.stack(of_parts).sum() + (self.scale.float() * grads["last.bias"][:7]).sum()


class Loop:
    """One rank's loop with a sharded model."""

    def __init__(self, text: str, tell: Tell, **options: Any) -> None:
        self.tell, self.model = tell, Parts()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if options.get("gather") == "exact":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        else:
            policy = MixedPrecisionPolicy()
        for part in (self.model.first, self.model.middle):
            fully_shard(part, mesh=mesh, mp_policy=policy)
        fully_shard(self.model, mesh=mesh, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.wire: Wire = attach(self.model, self.optimizer, text, **options)

    def backward(self, number: int, moment: str, change: Change = nothing) -> None:
        """A pass; tells the loss, which has what was gathered, and gradients, which were scattered."""
        grads = gradients(dist.get_rank(), number)
        change(grads)
        loss = self.model(grads)
        loss.backward()
        named = self.model.named_parameters()
        seen = {"loss": loss} | {name: each.grad.to_local() for name, each in named if each.grad is not None}
        report = self.wire.report()
        sent = f"{report.gather_bytes_per_step:.1f} and {report.scatter_bytes_per_step:.1f} bytes"
        self.tell(Row(moment, digest(seen), sent))

    def step(self, number: int, moment: str = "", change: Change = nothing) -> None:
        moment = moment or f"step {number}"
        self.backward(number, moment, change)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.say(moment)

    def say(self, moment: str) -> None:
        own = {name: each.to_local() for name, each in self.model.named_parameters()}
        [state] = self.wire.state_dict().values()
        kept = {key: each for key, each in state.items() if key not in ("version", "versions")}
        self.tell(Row(moment, digest(own), memory=digest(kept)))


def traffic(text: str, tell: Tell, **options: Any) -> None:
    """Steps, of which some are left out; parts that rest; states that are loaded; another coding; the end."""

    def rest(grads: dict[str, Tensor]) -> None:
        grads["middle.weight"].zero_()

    loop = Loop(text, tell, **options)
    for number in range(3):
        loop.step(number)
    loop.backward(3, "step 3, which is cleared")
    loop.optimizer.zero_grad()
    loop.step(4, change=rest)
    loop.backward(5, "step 5, which is dropped")
    loop.wire.drop_step()
    loop.optimizer.zero_grad()
    loop.step(6)
    with loop.wire.no_sync():
        loop.backward(7, "step 7, its first pass")
    loop.step(8)
    with loop.wire.exact(), torch.no_grad():
        tell(Row("exactly", digest(loop.model(gradients(0, 0)))))
    saved = loop.wire.state_dict()
    mean = loop.wire.mean_state_dict()
    loop.step(9)
    loop.wire.load_state_dict(saved)
    loop.step(9, "step 9, again")
    loop.wire.load_state_dict(mean)
    loop.step(10, "step 10, from the mean")
    loop.wire.switch("int8")
    loop.step(11, "step 11, by int8")
    loop.wire.flush()
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.say("flushed")
    loop.wire.detach()
    loss = loop.model(gradients(dist.get_rank(), 12))
    loss.backward()
    tell(Row("detached", digest(loss)))


def inside(text: str, tell: Tell) -> None:
    """Shards inside nodes, whose traffic is coded, averaged between nodes by the recipe."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "ranks"))
    model = Parts()
    for part in (model.first, model.middle):
        fully_shard(part, mesh=mesh["ranks"])
    fully_shard(model, mesh=mesh["ranks"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    wire = attach(model, optimizer, text, replicas=mesh["nodes"], inside="int8", gather="int8")
    for number in range(4):
        loss = model(gradients(dist.get_rank(), number))
        loss.backward()
        named = model.named_parameters()
        means = {name: each.grad.to_local() for name, each in named if each.grad is not None}
        sent = wire.metrics().get("gradwire/bytes_sent", 0.0)
        optimizer.step()
        optimizer.zero_grad()
        [state] = wire.state_dict().values()
        kept = {key: state[key] for key in ("step", "plan", "memory", "planes", "kept")}
        tell(Row(f"step {number}", digest({"loss": loss} | means), f"{sent:.1f} bytes", digest(kept)))


def _by(**options: Any) -> Callable[[str, Tell], None]:
    return partial(traffic, **options)


NODES: dict[str, Any] = {"nodes": [[0, 1], [2, 3]]}
INT4 = "int4(block=33)"

SHARDED = {
    "FSDP2": Play(traffic, (INT4, "int8", "bf16"), (2, 3)),
    "FSDP2, gathers in int8": Play(_by(gather="int8"), (INT4, "dense"), (2, 3)),
    "FSDP2, exact gathers": Play(_by(gather="exact", guard_every=2), (INT4, "dense"), (2, 3)),
    "FSDP2, nodes": Play(_by(gather="int8", **NODES), (INT4,), (4,)),
    "FSDP2, nodes, exact gathers": Play(_by(gather="exact", **NODES), (INT4,), (4,)),
    "FSDP2 inside nodes": Play(inside, (INT4,), (4,)),
}
