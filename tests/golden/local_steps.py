"""Scenes of local steps: what replicas, the shared parameters and saved states hold after each of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gradwire import OuterWire, outer
from tests.golden.given import SHAPES, Change, Given, Play, Row, Tell, digest, gradients, nothing

EVERY = 3


class Following(Given):
    """`Given` with a buffer that follows what comes in, as BatchNorm's do, and with a count."""

    def __init__(self, seed: int = 7, names: tuple[str, ...] = tuple(SHAPES)) -> None:
        super().__init__(seed=seed, names=names)
        self.register_buffer("follows", torch.zeros(5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        self.follows.mul_(0.9).add_(grads["last.bias"][:5], alpha=0.1)
        self.count += 1
        return super().forward(grads)


def here(tensor: Tensor) -> Tensor:
    """The part of a tensor that this rank has."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


class Replica:
    """One rank's loop of local steps, of a model that each rank begins from other values."""

    def __init__(self, text: str, tell: Tell, model: nn.Module | None = None, **options: Any) -> None:
        self.tell = tell
        self.model = Following(seed=7 + dist.get_rank()) if model is None else model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        who = {} if "members" in options else {"replicas": dist.group.WORLD}
        self.wire: OuterWire = outer(self.model, self.optimizer, text, **{"every": EVERY} | who | options)

    def backward(self, number: int, change: Change = nothing) -> None:
        grads = gradients(dist.get_rank(), number)
        change(grads)
        self.model(grads).backward()

    def step(self, number: int, moment: str = "", change: Change = nothing) -> None:
        """A pass and the optimizer's step; tells everything."""
        self.optimizer.zero_grad()
        self.backward(number, change)
        self.optimizer.step()
        self.say(moment or f"step {number}")

    def say(self, moment: str) -> None:
        """Tell own values, and the state, for which a round that is under way is awaited."""
        [state] = self.wire.state_dict().values()
        kept = {key: state[key] for key in ("step", "plan", "memory", "planes", "kept", "source")}
        sent = self.wire.metrics().get("gradwire/bytes_sent", 0.0)
        self.tell(Row(moment, self.own(), f"{sent:.1f} bytes", digest(kept)))

    def own(self) -> str:
        """Of parameters and buffers, as they stand."""
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return digest({name: here(each) for name, each in named})

    def shared(self, moment: str) -> None:
        with self.wire.shared_parameters():
            self.tell(Row(moment, self.own()))


def rounds(text: str, tell: Tell, **options: Any) -> None:
    """Two or three rounds; with a delay, of which the state is not asked for in each step."""
    loop = Replica(text, tell, **options)
    for number in range(7):
        loop.step(number)
    loop.shared("shared")
    for number in range(7, 11):
        loop.optimizer.zero_grad()
        loop.backward(number)
        loop.optimizer.step()
        loop.tell(Row(f"step {number}", loop.own()))
    loop.say("at last")


def left_out(text: str, tell: Tell, **options: Any) -> None:
    """Steps are cleared, dropped, not finite on one rank, and not finite on all."""

    def spoil(grads: dict[str, Tensor], alone: bool) -> None:
        if not alone or dist.get_rank() == dist.get_world_size() - 1:
            grads["middle.weight"][3, 5] = float("nan")

    loop = Replica(text, tell, **options)
    loop.step(0)
    loop.backward(1)
    loop.optimizer.zero_grad()
    loop.step(2)
    loop.optimizer.zero_grad()
    loop.backward(3)
    loop.wire.drop_step()
    loop.say("step 3, which is dropped")
    for number, change in ((4, partial(spoil, alone=True)), (5, nothing), (6, nothing)):
        loop.step(number, change=change)
    for number, change in ((7, partial(spoil, alone=False)), (8, nothing), (9, nothing), (10, nothing)):
        loop.step(number, change=change)


def resumed(text: str, tell: Tell, **options: Any) -> None:
    """From a state in the middle of a round, and from a mean at the end of one, by another replica."""
    loop = Replica(text, tell, **options)
    for number in range(4):
        loop.step(number)
    saved, model = deepcopy(loop.wire.state_dict()), deepcopy(loop.model.state_dict())
    loop.step(4, "the step that follows")
    after = Replica(text, tell, Following(seed=30 + dist.get_rank()), **options)
    after.model.load_state_dict(model)
    after.wire.load_state_dict(saved)
    after.say("resumed")
    for number in range(4, 9):
        after.step(number, f"resumed, step {number}")
    while after.wire.attempts % EVERY or after.wire.attempts < 9 + options.get("delay", 0):
        after.step(after.wire.attempts)
    if "delay" in options:  # a round has just been sent
        return
    mean = after.wire.mean_state_dict()
    last = Replica(text, tell, Following(seed=60 + dist.get_rank()), **options)
    last.wire.load_state_dict(mean)
    for number in range(2, 6):
        last.step(number, f"from the mean, step {number}")


def loaded(text: str, tell: Tell, **options: Any) -> None:
    """All is loaded in the middle of a round, then a part, then buffers, on all ranks alike."""
    loop = Replica(text, tell, **options)
    other = Following(seed=50)
    other.follows.add_(2.0)
    for number in range(4):  # with a delay, a round is under way
        loop.step(number)
    loop.model.load_state_dict(other.state_dict())
    for number in range(4, 8):
        loop.step(number)
    loop.model.get_submodule("middle").load_state_dict(other.get_submodule("middle").state_dict())
    loop.step(8)
    loop.model.load_state_dict({"follows": torch.arange(5.0)}, strict=False)
    loop.say("loaded")
    for number in range(9, 14):
        loop.step(number)


def ended(text: str, tell: Tell, **options: Any) -> None:
    """The recipe and the optimizer change, replicas finish one after the other, and part at last."""
    loop = Replica(text, tell, **options)
    for number in range(4):
        loop.step(number)
    loop.optimizer = torch.optim.Adam(loop.model.parameters(), lr=0.01)
    loop.wire.switch_optimizer(loop.optimizer)
    loop.step(4)
    loop.wire.switch("int4")
    with loop.wire.join():
        for number in range(5, 9 + 4 * dist.get_rank()):
            loop.optimizer.zero_grad()
            loop.backward(number)
            loop.optimizer.step()
    loop.say("joined")
    loop.step(30)
    loop.wire.detach()
    loop.tell(Row("detached", loop.own()))


def of_two_ranks(kind: str, text: str, tell: Tell) -> None:
    """Replicas of two ranks each, which hold their parameters alike or in shards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ranks"))
    names = tuple(name for name in SHAPES if name not in ("scalar.weight", "nothing.weight"))
    model: nn.Module = Following(7 + mesh.get_local_rank("replicas"), names)
    if kind == "FSDP2":
        fully_shard(model, mesh=mesh["ranks"])
    else:
        # Buffers would be the first rank's at each pass; those of the others travel.
        model = DistributedDataParallel(model, process_group=mesh.get_group("ranks"), broadcast_buffers=False)
    loop = Replica(text, tell, model, replicas=mesh["replicas"], delay=1)
    for number in range(8):
        loop.step(number)
    saved = loop.wire.state_dict()
    loop.step(8)
    loop.wire.load_state_dict(saved)
    loop.step(8, "again")


RECIPES = ("diloco", "int4(block=33)", "sparseloco", "topk(ratio=0.1)", "powersgd(warmup_steps=0)")
FEW = ("diloco", "int4(block=33)")


def _both(play: Callable[..., None], texts: tuple[str, ...], *worlds: int) -> dict[str, Play]:
    name = f"local steps, {play.__name__.replace('_', ' ')}"
    late = Play(partial(play, delay=2), texts, worlds)
    return {name: Play(play, texts, worlds), f"{name}, late": late}


LOCAL_STEPS = {
    **_both(rounds, RECIPES, 2, 3),
    **_both(left_out, FEW, 3),
    **_both(resumed, FEW, 2),
    **_both(loaded, FEW, 2),
    **_both(ended, ("sparseloco",), 3),
    "local steps of two ranks, DDP": Play(partial(of_two_ranks, "DDP"), FEW, (4,)),
    "local steps of two ranks, FSDP2": Play(partial(of_two_ranks, "FSDP2"), FEW, (4,)),
}
