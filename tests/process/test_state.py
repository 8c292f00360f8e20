"""Real gloo ranks: exact checkpoints, other worlds, and what `attach` refuses."""

from __future__ import annotations

import importlib
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.integrations.dcp import WireState
from tests.support.looped import looped
from tests.support.models import batch, digest, optimizer_of, perceptron, train
from tests.support.ranks import FOLDER
from tests.support.states import own_state
from tests.support.tiers import rest
from tests.support.world import Ranks

pytestmark = pytest.mark.process

RECIPES = ("topk(ratio=0.05)", "leader_topk(ratio=0.05)", "covap(interval=4)", "randomk(ratio=0.1)")


@dataclass(frozen=True)
class Resumed:
    """Digests of a run through, and of a resumed one, and what that sent in its first step."""

    through: str
    resumed: str
    first_share: float
    """Of a dense step's bytes."""


def resumes(recipe: str) -> Resumed:
    """Twenty steps through, against ten, a checkpoint, and ten more in buckets of another size."""
    ddp = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, recipe)
    train(ddp, optimizer, range(10))
    file = io.BytesIO()
    torch.save({"model": ddp.module.state_dict(), "wire": wire.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    train(ddp, optimizer, range(10, 20))

    model = perceptron(seed=1)
    model.load_state_dict(saved["model"])
    again = DistributedDataParallel(model, bucket_cap_mb=25)
    wire_again = gradwire.attach(again, optimizer_of(again), recipe)
    wire_again.load_state_dict(saved["wire"])
    optimizer = optimizer_of(again)
    train(again, optimizer, range(10, 11))
    first_bytes = wire_again.report().metered_bytes_per_step
    train(again, optimizer, range(11, 20))
    share = first_bytes / wire_again.report().dense_bytes_per_step
    return Resumed(digest(ddp), digest(again), share)


@pytest.mark.parametrize("recipe", rest(RECIPES, but=["topk(ratio=0.05)", "covap(interval=4)"]))
def test_a_resumed_run_ends_where_the_uninterrupted_one_does(three: Ranks, recipe: str) -> None:
    found = three(resumes, recipe)
    assert {each.resumed for each in found} == {each.through for each in found}
    assert len({each.through for each in found}) == 1


@pytest.mark.parametrize("recipe", rest(RECIPES, but=["topk(ratio=0.05)", "covap(interval=4)"]))
def test_a_resumed_run_compresses_from_its_first_step(three: Ranks, recipe: str) -> None:
    # A dense step would send everything; a quarter of the elements or less is what these recipes send,
    # besides the vectors and the small last matrix.
    assert all(each.first_share < 0.5 for each in three(resumes, recipe))


Memory = dict[str, Tensor]


@dataclass(frozen=True)
class Smaller:
    """Memories in a world of two, by parameter, and those of the three ranks before."""

    refused: str
    """The error of one state of three."""
    of_three: list[Memory]
    from_all: Memory
    from_mean: Memory
    after_left_out: Memory
    """After a first step that no optimizer makes."""
    step: int


def from_three_to_two() -> Smaller | None:
    """The same processes, as a world of three and then of two: what was unsent in the mean stays."""
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, RECIPES[0])
    train(ddp, optimizer, range(5))
    states: list[Any] = [None] * 3
    dist.all_gather_object(states, own_state(wire))
    mean = wire.mean_state_dict()
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return None
    smaller = DistributedDataParallel(perceptron(), process_group=pair)
    optimizer = optimizer_of(smaller)
    wire = gradwire.attach(smaller, optimizer, RECIPES[0])
    try:
        wire.load_state_dict(states[dist.get_rank()])
        refused = ""
    except ValueError as error:
        refused = str(error)
    wire.load_state_dict(states)
    memory = own_state(wire)["memory"]
    wire.load_state_dict(mean)
    from_mean = own_state(wire)["memory"]
    wire.load_state_dict(states)
    smaller(batch(5)[0]).sum().backward()
    optimizer.zero_grad()
    after = own_state(wire)["memory"]
    of_three = [state["memory"] for state in states]
    return Smaller(refused, of_three, memory, from_mean, after, wire.report().step)


def test_from_three_ranks_to_two_the_mean_memory_stays(three: Ranks) -> None:
    for found in three(from_three_to_two)[:2]:
        assert found is not None
        assert "a list of all ranks'" in found.refused
        for name, memory in found.from_all.items():
            assert torch.equal(memory, torch.stack([each[name] for each in found.of_three]).mean(0))
            assert torch.allclose(memory, found.from_mean[name], atol=1e-6)
            assert torch.equal(memory, found.after_left_out[name]), "of the step that was left out"
        assert found.step == 5


@dataclass(frozen=True)
class ByDCP:
    """Tensors by plane and parameter: of two ranks, and of a rank of three that has loaded theirs."""

    again: bool
    """Whether one of the two found its own state again, bit for bit."""
    of_two: list[dict[str, Memory]]
    of_three: dict[str, Memory]
    step: int


def through_dcp() -> ByDCP:
    """A checkpoint of two ranks, loaded by two and by three."""
    folder, recipe = Path(os.environ[FOLDER], "dcp"), "dgc(ratio=0.05, warmup_steps=0)"
    pair = dist.new_group([0, 1])
    states: list[Any] = [None] * 3
    mine: dict[str, Any] | None = None
    again = True
    if dist.get_rank() < 2:
        ddp = DistributedDataParallel(perceptron(), process_group=pair)
        optimizer = optimizer_of(ddp)
        wire = gradwire.attach(ddp, optimizer, recipe)
        train(ddp, optimizer, range(4))
        dcp.save({"wire": WireState(wire)}, checkpoint_id=folder, process_group=pair)
        mine = own_state(wire)
        train(ddp, optimizer, range(4, 6))
        dcp.load({"wire": WireState(wire, folder)}, checkpoint_id=folder, process_group=pair)
        again = _same(own_state(wire) | {"why": mine["why"]}, mine)
    dist.all_gather_object(states, mine)
    ddp = DistributedDataParallel(perceptron())
    wire = gradwire.attach(ddp, optimizer_of(ddp), recipe)
    dcp.load({"wire": WireState(wire, folder)}, checkpoint_id=folder)
    found = own_state(wire)
    return ByDCP(again, [_planes(each) for each in states[:2]], _planes(found), found["step"])


def _planes(state: dict[str, Any]) -> dict[str, Memory]:
    return {"memory": state["memory"], **state["planes"]}


def test_a_dcp_checkpoint_keeps_every_ranks_memory_and_goes_to_another_world(three: Ranks) -> None:
    for found in three(through_dcp):
        assert found.again, "on as many ranks"
        tensors = [(plane, name) for plane, memories in found.of_three.items() for name in memories]
        assert len(tensors) == 2 * 6, "what is unsent and the momentum of three layers"
        for plane, name in tensors:
            mean = torch.stack([each[plane][name] for each in found.of_two]).mean(0)
            assert torch.equal(found.of_three[plane][name], mean)
        assert found.step == 4


class _Full(dict[str, Any]):
    """What nobody has the memory to read."""

    def values(self) -> Any:
        raise MemoryError("none left")


class _Unlucky(WireState):
    """Gets such a state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(_Full(state))


@dataclass(frozen=True)
class NotLoaded:
    """Types and texts of errors, by damage; what is left then."""

    errors: dict[str, tuple[str, str]]
    intact: bool
    digest: str


def dcp_on_one_rank_only() -> NotLoaded:
    """Rank 1 cannot read the checkpoint's metadata, or has no memory for what it has read."""
    folder = Path(os.environ[FOLDER], "dcp of all")
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, "topk(ratio=0.05)")
    train(ddp, optimizer, range(3))
    dcp.save({"wire": WireState(wire)}, checkpoint_id=folder)
    train(ddp, optimizer, range(3, 5))
    before, errors = own_state(wire), {}
    damages: dict[str, Callable[[Path], Any]] = {
        "lost": Path.unlink,
        "damaged": lambda file: file.write_bytes(file.read_bytes()[:100]),
        "no memory": lambda file: None,
    }
    for name, damage in damages.items():
        loaded = WireState(wire, folder)
        if dist.get_rank() == 1:
            mine = folder.with_name(name)
            shutil.copytree(folder, mine)
            damage(mine / ".metadata")
            loaded = WireState(wire, mine)
            if name == "no memory":
                loaded = _Unlucky(wire, mine)
        try:
            dcp.load({"wire": loaded}, checkpoint_id=folder)
            errors[name] = ("nothing", "")
        except Exception as error:
            errors[name] = (type(error).__name__, str(error))
    intact = _same(own_state(wire), before)
    train(ddp, optimizer, range(5, 7))
    return NotLoaded(errors, intact, digest(ddp))


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else bool(left == right)


def test_a_rank_that_cannot_load_by_dcp_is_named_on_all_and_training_goes_on(three: Ranks) -> None:
    found = three(dcp_on_one_rank_only)
    for name, could_not in (
        ("lost", "read the metadata of its checkpoint: FileNotFoundError"),
        ("damaged", "read the metadata of its checkpoint: "),
        ("no memory", "put its state together: MemoryError: none left"),
    ):
        for rank in (0, 2):
            kind, text = found[rank].errors[name]
            assert kind == "PeerFailed"
            assert text.startswith(f"rank 1 could not {could_not}"), "then the system's own words"
        assert found[1].errors[name][0] not in ("PeerFailed", "nothing"), "its cause"
    assert all(each.intact for each in found)
    assert len({each.digest for each in found}) == 1


# -- what is refused


def _refusal(attach: Callable[[], Any]) -> tuple[str, str]:
    try:
        attach()
    except (ValueError, gradwire.RanksDisagree) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def _wrapped(module: nn.Module | None = None, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(perceptron() if module is None else module, **options)


def _attached(recipe: str = "topk", module: nn.Module | None = None, **options: Any) -> gradwire.Wire:
    return gradwire.attach(_wrapped(module), None, recipe, **options)


def _attached_again(*, detaches: bool) -> gradwire.Wire:
    ddp = _wrapped()
    wire = gradwire.attach(ddp, None, "dense")
    if detaches:
        wire.detach()
    return gradwire.attach(ddp)


def _hooked(*, is_hooked: bool = True) -> gradwire.Wire:
    ddp = _wrapped()
    if is_hooked:
        ddp.register_comm_hook(None, allreduce_hook)
    return gradwire.attach(ddp, None, "topk")


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "not ddp": (
        lambda: gradwire.attach(perceptron()),
        "Sequential is a plain module: wrap it in DistributedDataParallel first, or pass replicas=",
    ),
    "second attach": (
        lambda: _attached_again(detaches=False),
        "is carried already, by its DistributedDataParallel, over ranks [0, 1, 2]: for another recipe, call "
        "wire.switch(recipe)",
    ),
    "attach after detach": (lambda: _attached_again(detaches=True), "call wire.switch(recipe)"),
    "second hook": (_hooked, "has a communication hook already"),
    "unknown recipe": (lambda: _attached("covapp"), "did you mean 'covap'?"),
    "unknown key": (lambda: _attached("topk(ratoi=0.1)"), "did you mean 'ratio'?"),
    "ratio": (lambda: _attached("topk(ratio=1.5)"), "ratio=1.5 is outside (0, 1]"),
    "type": (lambda: _attached("topk(ratio='much')"), "an option has the wrong type"),
    "interval type": (lambda: _attached("covap(interval=2.5)"), "interval=2.5"),
    "target": (lambda: _attached("auto", target=1.5), "target=1.5 is outside (0, 1]"),
    "policy": (lambda: _attached(policy={"*": "topkk"}), "did you mean 'topk'?"),
    "policy that matches nothing": (
        lambda: _attached(policy={"*.wieght": "int8"}),
        "no parameter matches '*.wieght'",
    ),
    "foreign optimizer": (
        lambda: gradwire.attach(_wrapped(), optimizer_of(_wrapped()), "topk"),
        "has no parameter of this model",
    ),
    "policy that measures": (
        lambda: _attached(policy={"*": "covap"}),
        "'covap' must measure before it can decide",
    ),
    "sparse": (
        lambda: _attached(module=nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True), nn.Linear(4, 4))),
        "module '0' has sparse gradients",
    ),
    "complex": (lambda: _attached(module=nn.Linear(4, 4, dtype=torch.complex64)), "'weight' is complex"),
}


def refused() -> dict[str, tuple[str, str]]:
    """Everything that is wrong in the same way on all ranks."""
    return {name: _refusal(attach) for name, (attach, _said) in REFUSALS.items()}


@pytest.mark.parametrize("case", REFUSALS)
def test_attach_refuses_what_is_wrong_and_says_what_to_do(three: Ranks, case: str) -> None:
    for found in three(refused):
        kind, text = found[case]
        assert kind == "ValueError"
        assert REFUSALS[case][1] in text


def refused_on_a_pair() -> tuple[list[str], str]:
    """Two refusals on a pair of the ranks, which come at different times; the digest of a training after."""
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 2:
        return [], ""
    said: list[str] = []
    for _ in range(2):
        said += _refusal(lambda: gradwire.attach(_wrapped(process_group=pair), None, "topq"))[:1]
        time.sleep(0.2 * dist.get_rank())
    ddp = _wrapped(process_group=pair)
    optimizer = optimizer_of(ddp)
    gradwire.attach(ddp, optimizer, "topk(ratio=0.05)")
    train(ddp, optimizer, range(3))
    return said, digest(ddp)


def test_after_refusals_on_some_ranks_they_still_train(three: Ranks) -> None:
    first, second, _aside = three(refused_on_a_pair)
    assert first == second
    said, _digest = first
    assert said == ["ValueError"] * 2


class Sparse(nn.Linear):
    """A module with a `sparse` attribute that has nothing to do with gradients."""

    sparse = True


def takes_what_is_right() -> bool:
    """After refusals, and on a module that only looks sparse, attaching works."""
    ddp = _wrapped(Sparse(64, 64))
    for wrong in ("covapp", "topk(ratio=2)"):
        assert _refusal(partial(gradwire.attach, ddp, None, wrong))[0] == "ValueError"
    gradwire.attach(ddp, None, "topk(ratio=0.5)")
    ddp(torch.ones(1, 64)).sum().backward()
    return all(bool(p.grad.any()) for p in ddp.parameters() if p.grad is not None)


def test_after_a_refusal_the_right_arguments_still_work(three: Ranks) -> None:
    assert three(takes_what_is_right) == [True, True, True]


# -- what differs between ranks


DIFFERENT: dict[str, Callable[[bool], Any]] = {
    "recipe": lambda odd: _attached("topk(ratio=0.2)" if odd else "topk(ratio=0.1)"),
    "seed": lambda odd: _attached(seed=int(odd)),
    "parameter names": lambda odd: _attached(
        module=nn.Sequential(nn.Linear(4, 4)) if odd else nn.ModuleDict({"x": nn.Linear(4, 4)})
    ),
    "parameter dtypes": lambda odd: _attached(
        "dense", nn.Linear(4, 4, dtype=torch.float64 if odd else torch.float32)
    ),
    "policy": lambda odd: _attached(policy={"*.bias": "topk"} if odd else None),
    "scaler": lambda odd: _attached(scaler=torch.amp.GradScaler("cpu") if odd else None),
    "memory_dtype": lambda odd: _attached(memory_dtype=torch.bfloat16 if odd else None),
    "gradwire version": lambda odd: _attached_as("0.0.0" if odd else gradwire.__version__),
    "optimizer": lambda odd: _attached_with(None if odd else torch.optim.SGD),
    "optimizer group 0 lr": lambda odd: _attached_with(partial(torch.optim.SGD, lr=0.2 if odd else 0.1)),
}
"""What is right on each rank but differs on an odd one; shapes DDP compares itself."""

WRONG_ON_ONE: dict[str, tuple[Callable[[bool], Any], str]] = {
    "the configuration": (
        lambda odd: _attached("topkk" if odd else "topk"),
        "unknown recipe 'topkk'; did you mean 'topk'?",
    ),
    "the optimizer's place": (
        lambda odd: gradwire.attach(_wrapped(), "topk" if odd else None, "topk"),  # type: ignore[arg-type]
        "the second argument is the optimizer, got a str; write attach(model, optimizer, 'topk')",
    ),
    "no seed": (lambda odd: _attached(seed=None if odd else 0), "seed=None is not a whole number"),
    "no scaler": (
        lambda odd: _attached(scaler=1.0 if odd else None),
        "scaler=1.0 is not a torch.amp.GradScaler",
    ),
    "a hook": (
        lambda odd: _hooked(is_hooked=odd),
        "this DDP module has a communication hook already (mixed_precision= is one); use a new one",
    ),
}
"""What an odd rank must refuse, and its error."""


def _attached_with(optimizer: Callable[..., torch.optim.Optimizer] | None) -> gradwire.Wire:
    ddp = _wrapped()
    return gradwire.attach(ddp, None if optimizer is None else optimizer(ddp.parameters()), "topk")


def _attached_as(version: str) -> gradwire.Wire:
    module = importlib.import_module("gradwire._api.configuration")
    honest = module.__version__
    module.__version__ = version
    try:
        return _attached()
    finally:
        module.__version__ = honest


def disagreements() -> dict[str, tuple[str, str]]:
    """By what differs on rank 1."""
    cases = {**DIFFERENT, **{name: attach for name, (attach, _said) in WRONG_ON_ONE.items()}}
    return {name: _refusal(partial(attach, dist.get_rank() == 1)) for name, attach in cases.items()}


@pytest.mark.parametrize("field", DIFFERENT)
def test_ranks_that_differ_are_told_so_on_all_of_them(three: Ranks, field: str) -> None:
    for found in three(disagreements):
        kind, text = found[field]
        assert kind == "RanksDisagree"
        assert f"ranks disagree on {field}: rank 0: " in text
        assert "; rank 2: " in text


@looped("case", WRONG_ON_ONE)
def test_what_one_rank_must_refuse_reaches_the_others(three: Ranks, case: str) -> None:
    said = WRONG_ON_ONE[case][1]
    first, (kind, text), last = (found[case] for found in three(disagreements))
    assert kind == "ValueError"
    assert text.partition(" Known: ")[0] == said
    for kind, text in (first, last):
        assert kind == "RanksDisagree"
        assert f"rank 1: refused, {said.partition(';')[0]}" in text


def without_process_group() -> tuple[str, str]:
    ddp = _wrapped()
    dist.destroy_process_group()
    return _refusal(lambda: gradwire.attach(ddp))


def test_attach_without_a_process_group_says_what_to_call(three: Ranks) -> None:
    for kind, text in three(without_process_group):
        assert kind == "ValueError"
        assert "init_process_group" in text


def read_one_by_one() -> tuple[str, int]:
    """Rank 0 cannot read the second of the states, which it reads one by one; then it can. What
    is said, and the step.
    """
    ddp = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(ddp)
    wire = gradwire.attach(ddp, optimizer, "topk(ratio=0.05)")
    train(ddp, optimizer, range(2))
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, wire.state_dict())

    def read(*, fails: bool) -> Iterator[Any]:
        yield states[0]
        if fails and dist.get_rank() == 0:
            raise FileNotFoundError("wire-1.pt")
        yield from states[1:]

    said = ""
    try:
        wire.load_state_dict(read(fails=True))
    except (OSError, gradwire.GradwireError) as error:
        said = f"{type(error).__name__}: {error}"
    wire.load_state_dict(read(fails=False))
    return said, wire.report().step


def test_a_rank_that_cannot_read_a_state_tells_the_others(three: Ranks) -> None:
    (first, step), *others = three(read_one_by_one)
    assert (first, step) == ("FileNotFoundError: wire-1.pt", 2)
    for said, step in others:
        assert said == "PeerFailed: rank 0 could not read the states: FileNotFoundError: wire-1.pt"
        assert step == 2
