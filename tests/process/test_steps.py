"""Real gloo ranks: what people do between `backward()` and `step()`.

The table is in `docs/engineering/design.md`; its rows are in `tests/unit/step/test_undo.py`. Here is shown
that hooks see what happens, that memory goes back on all ranks, and that ranks that differ hear of it.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire._api.report import Report
from gradwire.environment import TIMED_EVERY
from gradwire.errors import GradwireError, RanksDisagree
from gradwire.integrations.dcp import WireState
from tests.support.called import (
    Loop,
    Run,
    attached,
    backward,
    clear,
    clear_in_place,
    ended,
    steps,
    told,
    wrapped,
)
from tests.support.models import SHAPE, batch, digest, optimizer_of, perceptron
from tests.support.ranks import FOLDER
from tests.support.states import own_state
from tests.support.tiers import rest
from tests.support.world import Ranks, lose_groups

pytestmark = pytest.mark.process

TOPK = "topk(ratio=0.1)"
RECIPES = ("dense", TOPK)
"""Without a memory, and with one: what each recipe goes back to is `tests/laws/test_dropped.py`'s."""
STEPS, BAD = 8, 4


def memory_of(wire: gradwire.Wire) -> dict[str, Tensor]:
    """What is remembered, by parameter."""
    return dict(own_state(wire)["memory"])


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# -- what a run tells

TELLING = 72
"""Steps of a run that tells: twice as many as norms are weighed in, and enough to know the link."""

TELLING_RECIPES = ("dense", TOPK, "int4")

METRICS = """
    backward_s backward_s_mean bytes_sent bytes_sent_mean compile_s compress_s compress_s_mean dense_bytes
    dropped_steps exposed_s exposed_s_mean health_warnings median_computing_s memory_bytes ratio ratio_mean
    residual_to_gradient share_of_linear skipped_steps slowest_computing_s slowest_rank step step_s
    step_s_mean
"""
ATTACHED = {
    "dense": "gradwire N: dense, N % of N kB, no memory",
    TOPK: "gradwire N: topk(ratio=N), N units, N % of N kB, memory N kB",
    "int4": "gradwire N: intN, N unit, N % of N kB, memory N kB",
}


@dataclass(frozen=True)
class Told:
    """Which fields of report and metrics a run knows, and its log.

    Numbers that vary from run to run are left out, and so are what is said of compiling, and fields that
    depend on what the link did.
    """

    report: list[str]
    unknown: list[str]
    metrics: list[str]
    apart: list[str]
    """Metrics of which the report says something else."""
    timeline: list[str]
    meters_what_is_planned: bool
    timed: bool
    log: list[str]


def tells(recipe: str, timed_every: int = 1) -> Told:
    """After one step of each kind that fails. One step in `timed_every` is timed; the last ones are not,
    unless all are.
    """
    with told(logging.INFO) as lines, mock.patch.dict(os.environ, {TIMED_EVERY: str(timed_every)}):
        model, optimizer, wire = attached(recipe)
        for number in range(TELLING):
            optimizer.zero_grad()
            backward(model, number, math.nan if number == BAD else 1.0)
            if number not in (BAD, BAD + 2):  # as a scaler skips the one, and a user leaves out the other
                optimizer.step()
    report, metrics = wire.report().as_dict(), wire.metrics()
    backward(model, TELLING)
    timed = wire.report().timeline != report["timeline"]
    unknown = {name for name, each in report.items() if each is None or each == [] or each == ()}
    return Told(
        report=sorted(report),
        unknown=sorted(unknown - {"link", "link_changes", "health"}),
        metrics=sorted(each.removeprefix("gradwire/") for each in metrics if "/link_" not in each),
        apart=sorted(name for name, each in reported(report).items() if metrics[f"gradwire/{name}"] != each),
        timeline=sorted({str(span["what"]) for span in report["timeline"]}),
        meters_what_is_planned=report["metered_bytes_per_step"] == report["wire_bytes_per_step"],
        timed=timed,
        log=[re.sub(r"[0-9][0-9.]*(dev[0-9]+)?", "N", line) for line in lines if "compiling" not in line],
    )


def reported(report: dict[str, Any]) -> dict[str, float]:
    """Metrics of a run in which one step was not finite and one was left out, as its report has them.

    Of times the report has medians, and metrics have means.
    """
    computing_s, dense = report["computing_by_rank_s"], report["dense_bytes_per_step"]
    found = {
        "step": report["step"],
        "skipped_steps": 1,
        "dropped_steps": 1,
        "health_warnings": len(report["health"]),
        "bytes_sent": report["wire_bytes_per_step"],
        "bytes_sent_mean": report["metered_bytes_per_step"],
        "dense_bytes": dense,
        "ratio": report["wire_bytes_per_step"] / dense,
        "ratio_mean": report["metered_bytes_per_step"] / dense,
        "slowest_rank": computing_s.index(max(computing_s)),
        "slowest_computing_s": max(computing_s),
        "median_computing_s": median(computing_s),
        "memory_bytes": report["memory_bytes"],
        "compile_s": report["compile_s"],
    }
    link = report["link"] or {"alpha_s": 0.0, "beta_s": 0.0}
    found |= {"link_bytes_per_s": 1.0 / link["beta_s"]} if link["beta_s"] else {}
    return found | ({"link_latency_s": link["alpha_s"]} if link["alpha_s"] else {})


@pytest.mark.parametrize("recipe", rest(TELLING_RECIPES, but=[TOPK]))
def test_a_fixed_recipe_tells_all_that_it_knows(two: Ranks, recipe: str) -> None:
    first, second = two(tells, recipe)
    for each in (first, second):
        assert each.report == sorted([*Report.__dataclass_fields__, "ratio"])
        lateness = ["late"] if recipe != "dense" else []  # it takes more steps to be known
        elsewhere = ["gather", "members", "modules"]  # FSDP2's own traffic, replicas that come and go
        assert each.unknown == sorted(
            [*lateness, *elsewhere, "choices", "diagnosis", "facts", "predicted_step_s", "times_led"]
        )
        assert each.metrics == METRICS.split()
        assert each.apart == []
        assert each.timeline == ["backward", "decode", "encode", "wait", "wire"]
        assert each.meters_what_is_planned
        assert each.timed
    attached, skipped, left_out = first.log
    assert attached == ATTACHED[recipe]
    assert skipped.startswith("step N is skipped: NaN, Inf or a gradient too large")
    assert left_out.startswith("step N is left out: its gradients were cleared")
    assert second.log == [], "rank 0 speaks for all"


@pytest.mark.parametrize("recipe", rest(TELLING_RECIPES, but=[TOPK]))
def test_it_tells_the_same_where_few_steps_are_timed(two: Ranks, recipe: str) -> None:
    assert two(tells, recipe, 16) == [replace(each, timed=False) for each in two(tells, recipe)]


# -- a step that is left out

Leave = Callable[[nn.Module, torch.optim.Optimizer, gradwire.Wire], None]


def clear_and_step(model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> None:
    """A step without gradients does nothing."""
    optimizer.zero_grad()
    optimizer.step()


def say_it(model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> None:
    """The gradients stand until the next pass; the user says that they count for nothing."""
    wire.drop_step()
    for parameter in model.parameters():
        parameter.grad = None


def flush_and_clear(model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> None:
    """What a flush has added is thrown away with the rest."""
    wire.flush()
    optimizer.zero_grad()


def never(model: nn.Module, optimizer: torch.optim.Optimizer, wire: gradwire.Wire) -> None:
    """There was no such batch."""


def left_out(recipe: str, source: str, leave: Leave, exchanges: int = 1) -> Run:
    """Train with a bad batch that is left out."""
    model, optimizer, wire = attached(recipe, source)
    with told() as lines:
        for number in range(STEPS):
            if number == BAD:
                for more in range(exchanges if leave is not never else 0):
                    backward(model, 100 + more, 100.0)
                leave(model, optimizer, wire)
                continue
            steps(model, optimizer, [number])
    return ended(model, wire, lines)


LEFT_OUT = [
    *(("dense", "ddp", leave) for leave in (clear, say_it)),
    *(
        (TOPK, source, leave)
        for source in ("ddp", "plain")
        for leave in (clear, clear_in_place, clear_and_step, say_it, flush_and_clear)
    ),
]
"""Recipe, source and way."""


@pytest.mark.parametrize(
    "scene", rest(LEFT_OUT, but=[(TOPK, "ddp", leave) for leave in (clear, flush_and_clear, say_it)])
)
def test_a_step_that_is_left_out_leaves_no_trace(two: Ranks, scene: tuple[str, str, Leave]) -> None:
    recipe, source, leave = scene
    without, found = two(left_out, recipe, source, never), two(left_out, recipe, source, leave)
    assert [each.end for each in found] == [each.end for each in without], "bit for bit, and in the same step"
    assert [each.dropped for each in found] == [1, 1]
    assert [len(each.said) for each in found] == [1, 0], "rank 0 says so once"
    assert [(each.dropped, each.said) for each in without] == [(0, ())] * 2


def test_several_exchanges_of_one_step_go_back_as_one(two: Ranks) -> None:
    without, found = two(left_out, TOPK, "ddp", never), two(left_out, TOPK, "ddp", clear, 2)
    assert [each.end for each in found] == [each.end for each in without]
    assert [each.dropped for each in found] == [1, 1]


def flushed_after_zeros() -> tuple[bool, int | None]:
    """Whether memory is as it was, and steps left out. The pass before the flush has brought zeros."""
    model, optimizer, wire = attached("threshold(1e6)")
    steps(model, optimizer, range(2))
    before = memory_of(wire)
    optimizer.zero_grad()
    (0.0 * model(batch(2)[0])).sum().backward()
    wire.flush()
    optimizer.zero_grad(set_to_none=False)
    return same(before, memory_of(wire)), wire.report().dropped_steps


def test_a_flush_is_taken_back_where_its_gradients_become_zero(two: Ranks) -> None:
    assert two(flushed_after_zeros) == [(True, 1)] * 2


def kept_if_asked() -> Run:
    """`skipped="keep"`: what the bad batch has left comes with the next step."""
    model, optimizer, wire = attached(TOPK, skipped="keep")
    for number in range(3):
        optimizer.zero_grad()
        backward(model, number)
        if number != 1:
            optimizer.step()
    return ended(model, wire)


def test_a_user_may_say_that_nothing_is_left_out(two: Ranks) -> None:
    for found in two(kept_if_asked):
        assert (found.step, found.dropped) == (3, 0)


def many_in_a_row() -> list[str]:
    """No optimizer steps."""
    model, optimizer, _wire = attached(TOPK)
    steps(model, optimizer, range(1))
    with told() as lines:
        for number in range(12):
            model.zero_grad()
            backward(model, number)
    return lines if dist.get_rank() == 0 else []


def test_many_left_out_in_a_row_say_that_something_else_steps(two: Ranks) -> None:
    lines, nothing = two(many_in_a_row)
    assert nothing == []
    assert [line.split()[0] for line in lines] == ["step", "10"]
    assert "something other than an optimizer" in lines[1]


def in_each_phase_of_auto() -> Run:
    """Every fifth step is left out while `auto` measures, tries and has settled."""
    model, optimizer, wire = attached("auto")
    for number in range(60):
        optimizer.zero_grad()
        backward(model, number, 100.0 if number % 5 == 4 else 1.0)
        if number % 5 != 4:
            optimizer.step()
    optimizer.zero_grad()
    wire.flush()
    return ended(model, wire)


def test_steps_may_be_left_out_in_each_phase_of_auto(two: Ranks) -> None:
    first, second = two(in_each_phase_of_auto)
    assert first == second
    assert (first.step, first.dropped) == (48, 12), "of sixty, every fifth"


def ranks_differ(recipe: str, clears: bool = True) -> str:
    """One rank leaves the step out, or only makes no step yet. The group cannot go on after that."""
    model, optimizer, _wire = attached(recipe)
    try:
        for number in range(4):
            if clears or number < 3 or dist.get_rank() == 0:
                optimizer.zero_grad()
            backward(model, number)
            if number != 2 or dist.get_rank() == 0:
                optimizer.step()
    except RanksDisagree as error:
        lose_groups()
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("clears", "said"),
    [
        (True, "a backward pass after a step that was left out"),
        pytest.param(False, "another backward pass before the optimizer's step", marks=pytest.mark.rest),
    ],
)
def test_ranks_that_differ_in_it_all_hear_of_it(two: Ranks, clears: bool, said: str) -> None:
    for text in two(ranks_differ, "covap(interval=2)", clears=clears):
        assert said in text
        assert "rank 0: a training step" in text


# -- a run that is resumed

RESUMED = [
    *(("ddp", way) for way in ("state", "folder", "dcp", "mean", "optimizer first", "optimizer last")),
    ("plain", "state"),
]
"""Ways to resume, by source. The optimizer has a state of its own in two."""


def load(wire: gradwire.Wire, way: str, folder: Path, saved: Any) -> None:
    """Load from `folder`, by the wire or with DCP, or what was `saved` in memory."""
    if way == "folder":
        wire.load(folder)
    elif way == "dcp":
        dcp.load({"wire": WireState(wire, folder)}, checkpoint_id=folder)
    else:
        wire.load_state_dict(saved)


def resumed(source: str, way: str, *, leaves_out: bool, at: int = 3) -> Run:
    """Train, resume in another model by some `way` after `at` steps, and perhaps leave the next batch out."""
    folder = Path(os.environ[FOLDER], f"resumed {source} {way} {leaves_out}")
    momentum = 0.9 if way.startswith("optimizer") else 0.0

    def made() -> Loop:
        model, replicas = wrapped(perceptron(), source)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
        return model, optimizer, gradwire.attach(model, optimizer, TOPK, **replicas)

    model, optimizer, wire = made()
    steps(model, optimizer, range(at))
    if way != "never":
        parameters, of_optimizer = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        saved = wire.mean_state_dict() if way == "mean" else wire.state_dict()
        if way == "older":
            (mine,) = saved.values()
            mine.pop("stepped", None)
        wire.save(folder)
        if way == "dcp":
            dcp.save({"wire": WireState(wire)}, checkpoint_id=folder)
        model, optimizer, wire = made()
        if way == "rewound":
            backward(model, 50)
            optimizer.step()
            optimizer.zero_grad()
        model.load_state_dict(parameters)
        if way != "optimizer last":
            optimizer.load_state_dict(of_optimizer)
        load(wire, way, folder, saved)
        if way == "optimizer last":
            optimizer.load_state_dict(of_optimizer)
    if leaves_out:
        optimizer.zero_grad()
        backward(model, 100, 100.0)
    steps(model, optimizer, range(at, 6))
    return ended(model, wire)


@pytest.mark.parametrize("scene", rest(RESUMED, but=[("ddp", "state")]))
def test_the_first_step_of_a_resumed_run_may_be_left_out(two: Ranks, scene: tuple[str, str]) -> None:
    without = two(resumed, *scene, leaves_out=False)
    assert [(each.step, each.dropped) for each in without] == [(6, 0)] * 2
    found = two(resumed, *scene, leaves_out=True)
    assert found == [replace(each, dropped=1) for each in without], "bit for bit, and in the same step"


@pytest.mark.parametrize("source", ["ddp", "plain"])
def test_a_resumed_run_leaves_out_what_one_that_never_stopped_does(two: Ranks, source: str) -> None:
    for leaves_out in (True, False):
        found = two(resumed, source, "state", leaves_out=leaves_out)
        assert found == two(resumed, source, "never", leaves_out=leaves_out)


def test_a_state_that_does_not_say_who_has_stepped_can_be_loaded(two: Ranks) -> None:
    for leaves_out in (True, False):
        for found in two(resumed, "ddp", "older", leaves_out=leaves_out):
            assert (found.step, found.dropped) == (6 + leaves_out, 0), "as before an optimizer's first step"


def test_a_run_that_goes_back_to_its_start_does_as_it_did(two: Ranks) -> None:
    for leaves_out in (True, False):
        found = two(resumed, "ddp", "rewound", leaves_out=leaves_out, at=0)
        assert found == two(resumed, "ddp", "never", leaves_out=leaves_out, at=0)
        assert [(each.step, each.dropped) for each in found] == [(6 + leaves_out, 0)] * 2


def loaded_before_the_step(source: str) -> int | None:
    """A state is loaded while gradients wait for the optimizer; a recipe's momentum has them no more."""
    if source == "fsdp":
        model: nn.Module = fully_shard(perceptron(), mesh=init_device_mesh("cpu", (2,)))
        optimizer = optimizer_of(model)
        wire = gradwire.attach(model, optimizer, "int8")
    else:
        model, optimizer, wire = attached("dgc(ratio=0.1, warmup_steps=0)", source)
    steps(model, optimizer, range(2))
    saved = wire.state_dict()
    backward(model, 2)
    wire.load_state_dict(saved)
    backward(model, 3)
    optimizer.step()
    return wire.report().step


@pytest.mark.parametrize("source", ["ddp", "fsdp"])
def test_a_pass_after_a_load_is_the_first_of_its_step(two: Ranks, source: str) -> None:
    assert two(loaded_before_the_step, source) == [3, 3]


LOOK, LOOKS = 4, 12
"""Steps from one look at the losses to the next, and the number of looks until a rise has been found."""
RISEN = ("state", "folder", "dcp", "mean")
"""Ways to resume after losses have begun to rise."""


def losses_that_rise(way: str) -> list[tuple[int, str]]:
    """Signs found in a run that resumes by some `way`, between two looks, one step after the rise."""
    folder = Path(os.environ[FOLDER], f"losses {way}")
    rises = (LOOKS - 2) * LOOK

    def made() -> Loop:
        model = DistributedDataParallel(perceptron())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        return model, optimizer, gradwire.attach(model, optimizer, "topk(ratio=0.5)")

    with mock.patch("gradwire.control.controller.EVERY", LOOK):
        model, optimizer, wire = made()
        for number in range(LOOKS * LOOK + 1):
            if number == rises + 2 and way != "never":
                saved = wire.mean_state_dict() if way == "mean" else wire.state_dict()
                wire.save(folder)
                if way == "dcp":
                    dcp.save({"wire": WireState(wire)}, checkpoint_id=folder)
                model, optimizer, wire = made()
                load(wire, way, folder, saved)
            optimizer.zero_grad()
            backward(model, number % 4)
            optimizer.step()
            wire.note_loss(1.0 + (number > rises) + 0.01 * (number % 2 + dist.get_rank()))
    return list(wire.report().health)


@pytest.mark.parametrize("way", rest(RISEN, but=["folder"]))
def test_a_resumed_run_finds_losses_that_rise_in_the_same_step(two: Ranks, way: str) -> None:
    found = two(losses_that_rise, way)
    assert found == two(losses_that_rise, "never")
    assert [sign for [(_step, sign)] in found] == 2 * ["the loss has risen from 1.01 to 2.01"]


# -- other optimizers than the one given


@dataclass(frozen=True)
class Waiting:
    """The end of a run, and by parameter the sum of magnitudes of what it has not sent."""

    run: Run
    unsent: dict[str, float]


def another_optimizer(recipe: str, steps_from: int) -> Waiting:
    """From a step on another optimizer than the one given steps; one step is left out."""
    model, optimizer, wire = attached(recipe)
    other = torch.optim.SGD(model.parameters(), lr=0.05)
    with told() as lines:
        for number in range(STEPS):
            model.zero_grad()
            backward(model, number)
            if number != BAD:
                (optimizer if number < steps_from else other).step()
    unsent = {name: float(each.abs().sum()) for name, each in memory_of(wire).items()}
    return Waiting(ended(model, wire, lines), unsent)


@pytest.mark.parametrize("recipe", rest(RECIPES, but=[TOPK]))
def test_steps_of_another_optimizer_than_the_one_given_count(two: Ranks, recipe: str) -> None:
    given, found = two(another_optimizer, recipe, STEPS), two(another_optimizer, recipe, 2)
    for one, other in zip(found, given, strict=True):
        assert replace(one.run, said=other.run.said) == other.run, "bit for bit"
        assert one.unsent == other.unsent
        assert one.run.dropped == 1
        said = [line for line in one.run.said if line not in other.run.said]
        assert len(said) == (recipe != "dense"), "which goes by no optimizer and remembers nothing"
        assert all("SGD, which attach was not given" in line for line in said)


@dataclass(frozen=True)
class Switched:
    """What came of other optimizers."""

    refused: list[str]
    """Types of the errors: of one with momentum, of rates that differ, of another model's."""
    stayed: bool
    """Whether the optimizer was the same after these."""
    taken_over: bool
    said: list[str]
    """Beside what is said of momentum."""
    dropped: int


def switches_optimizer() -> Switched:
    """No warning any more; what does not suit is refused on all ranks, and then nothing has changed."""
    model, optimizer, wire = attached("dgc(ratio=0.1, warmup_steps=0)")
    steps(model, optimizer, range(1))
    other, refused = optimizer_of(model), list[str]()
    uneven = torch.optim.SGD(model.parameters(), lr=0.05 + dist.get_rank())
    foreign = optimizer_of(nn.Linear(1, 1))
    for wrong in (torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), uneven, foreign):
        try:
            wire.switch_optimizer(wrong)
        except Exception as error:
            refused.append(type(error).__name__)
    stays = wire.attached.optimizers == (optimizer,)
    wire.switch_optimizer(other)
    with told() as lines:
        steps(model, other, range(3))
        other.zero_grad()
        wire.detach()
        other.step()
        third = optimizer_of(model)
        steps(model, third, range(2))
    said = [line for line in lines if "momentum is no longer applied" not in line]
    taken_over = wire.attached.optimizers == (other,)
    return Switched(refused, stays, taken_over, said, wire.report().dropped_steps)


def test_another_optimizer_may_take_over(two: Ranks) -> None:
    for found in two(switches_optimizer):
        assert found.refused == ["ValueError", "RanksDisagree", "ValueError"]
        assert found.stayed
        assert found.taken_over
        assert found.said == []
        assert found.dropped == 0


def goes_by_the_other() -> list[float]:
    """The share of a gradient that arrives where the optimizer could tell, then could not: by gcomp."""
    model, optimizer, wire = attached("gcomp")
    other = torch.optim.SGD(model.parameters(), lr=1e-12)
    shares = []
    for now in (optimizer, other):
        if now is other:
            wire.switch_optimizer(other)
        now.zero_grad()
        backward(model, 0)
        whole = torch.cat([each.grad.reshape(-1) for each in model.parameters() if each.grad is not None])
        shares.append(float(whole.count_nonzero()) / whole.numel())
        now.step()
    return shares


def test_recipes_go_by_the_optimizer_that_took_over(two: Ranks) -> None:
    for before, after in two(goes_by_the_other):
        assert before > 0.9
        assert after < 0.1, "a rate of 1e-12 moves hardly any parameter"


# -- several exchanges, several optimizers


class Gan(nn.Module):
    """A generator and a discriminator in one wrapper."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.g = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, SHAPE[0]))
        self.d = nn.Sequential(nn.Linear(SHAPE[0], 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, real: Tensor | None, noise: Tensor) -> tuple[Tensor | None, Tensor]:
        """The judgement of real ones, and of generated ones; with `real` the generator is not trained."""
        made = self.g(noise)
        return (None, self.d(made)) if real is None else (self.d(real), self.d(made.detach()))


@dataclass(frozen=True)
class Played:
    """Six steps of generator and discriminator."""

    digest: str
    kept: list[bool]
    """Per step, whether the discriminator's memory was after the generator's loss what it was before."""
    said: list[str]


def gan(recipe: str | None) -> Played:
    """The ordinary loop: the generator's loss goes back through the discriminator, too."""
    ddp = DistributedDataParallel(Gan(), bucket_cap_mb=0.01, find_unused_parameters=True)
    both = [torch.optim.SGD(part.parameters(), lr=0.05) for part in (ddp.module.d, ddp.module.g)]
    wire = None if recipe is None else gradwire.attach(ddp, both, recipe)
    kept = []
    with told() as lines:
        for number in range(6):
            real, _ = batch(number)
            noise = torch.randn(
                16, 16, generator=torch.Generator().manual_seed(dist.get_rank() * 100 + number)
            )
            for judge in (True, False):
                optimizer = both[0 if judge else 1]
                optimizer.zero_grad()
                before = {} if wire is None else _of(wire, "d.")
                true, fake = ddp(real if judge else None, noise)
                loss = -fake.mean() if true is None else (nn.functional.softplus(fake - true)).mean()
                loss.backward()
                optimizer.step()
                if wire is not None and not judge:
                    both[0].zero_grad()
                    kept.append(same(_of(wire, "d."), before))
    return Played(digest(ddp), kept, lines)


def _of(wire: gradwire.Wire, prefix: str) -> dict[str, Tensor]:
    return {name: plane for name, plane in memory_of(wire).items() if name.startswith(prefix)}


def test_a_discriminator_moves_as_under_plain_ddp(two: Ranks) -> None:
    plain = {each.digest for each in two(gan, None)}
    for recipe in ("dense", "gcomp(mode='lossless')"):
        assert {each.digest for each in two(gan, recipe)} == plain


@pytest.mark.parametrize("recipe", ["gcomp", TOPK])
def test_the_memory_of_a_discriminator_holds_nothing_of_the_generators_loss(two: Ranks, recipe: str) -> None:
    for found in two(gan, recipe):
        assert found.kept == [True] * 6
        assert found.said == [], "nothing was left out: some parameters were"


def two_optimizers(recipe: str, every: int) -> Run:
    """One steps after every pass, the other after `every` passes, of which its gradients add up."""
    model = DistributedDataParallel(perceptron(), bucket_cap_mb=0.01)
    halves = list(model.module)
    first = torch.optim.SGD(halves[0].parameters(), lr=0.02)
    second = torch.optim.SGD([*halves[2].parameters(), *halves[4].parameters()], lr=0.02)
    wire = gradwire.attach(model, [first, second], recipe)
    with told() as lines:
        for number in range(8):
            steps(model, first, [number])
            if number % every == every - 1:
                second.step()
                second.zero_grad()
    return ended(model, wire, lines)


@pytest.mark.parametrize("recipe", RECIPES)
def test_two_optimizers_may_step_at_different_times(two: Ranks, recipe: str) -> None:
    one, other = two(two_optimizers, recipe, 2)
    assert one == other
    assert (one.step, one.dropped, one.said) == (8, 0, ())


def accumulation() -> list[int]:
    """The step after each of three steps of the optimizer, with two passes each and without `no_sync`."""
    model, optimizer, wire = attached(TOPK)
    numbers = []
    for number in range(6):
        if number % 2 == 0:
            optimizer.zero_grad()
        backward(model, number)
        if number % 2 == 1:
            optimizer.step()
            numbers.append(wire.report().step)
    return numbers


def test_accumulated_passes_make_one_step(two: Ranks) -> None:
    # Before the optimizer's first step nobody knows that it will step: there both passes count.
    assert two(accumulation) == [[2, 3, 4]] * 2


# -- optimizers that call `backward()` themselves, or leave steps out on the device


def closures() -> tuple[Run, str]:
    """`step(closure)` runs `backward()` inside the step. Also the digest of plain DDP."""
    model, plain = (DistributedDataParallel(perceptron()) for _ in range(2))
    made, other = (torch.optim.LBFGS(each.parameters(), lr=0.1, max_iter=4) for each in (model, plain))
    wire = gradwire.attach(model, made, "dense")

    def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            optimizer.zero_grad()
            return backward(model, number)

        return closure

    for number in range(4):
        made.step(closure_of(model, made, number))
        other.step(closure_of(plain, other, number))
    return ended(model, wire), digest(plain)


def test_closures_are_inside_the_step(two: Ranks) -> None:
    for run, plain in two(closures):
        assert (run.digest, run.dropped) == (plain, 0)


@dataclass(frozen=True)
class LeftOutByDevice:
    """A step that a scaler leaves out, and the end of the run."""

    memory_kept: bool
    parameters_moved: bool
    run: Run


def left_out_by_the_device() -> LeftOutByDevice:
    """A scaler finds Inf in a gradient that is not exchanged: the step is left out, and so is its memory."""
    model = DistributedDataParallel(perceptron())
    extra = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.05, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    wire = gradwire.attach(model, optimizer, TOPK, scaler=scaler)
    for number in range(5):
        optimizer.zero_grad()
        inputs, targets = batch(number)
        scaler.scale(nn.functional.mse_loss(model(inputs), targets)).backward()
        extra.grad = torch.full((3,), torch.inf if number == 3 else 1.0)
        scaler.step(optimizer)
        scaler.update()
        if number == 2:
            before, parameters = memory_of(wire), digest(model)
        if number == 3:
            optimizer.zero_grad()
            kept, moved = same(memory_of(wire), before), digest(model) != parameters
    return LeftOutByDevice(kept, moved, ended(model, wire))


def test_what_a_scaler_leaves_out_leaves_no_trace(two: Ranks) -> None:
    for found in two(left_out_by_the_device):
        assert found.memory_kept
        assert not found.parameters_moved
        assert (found.run.step, found.run.dropped) == (4, 1)


# -- calls between `backward()` and `step()`


@dataclass(frozen=True)
class Between:
    """A checkpoint between `backward()` and `step()`."""

    has_the_memory_before: bool
    saved_step: int
    step: int
    step_after: int


def saved_in_between() -> Between:
    """A checkpoint has the memory that belongs to the parameters as they are."""
    model, optimizer, wire = attached(TOPK)
    steps(model, optimizer, range(3))
    before = memory_of(wire)
    optimizer.zero_grad()
    backward(model, 3)
    between, step = own_state(wire), wire.report().step
    optimizer.step()
    after = own_state(wire)
    return Between(same(dict(between["memory"]), before), between["step"], step, after["step"])


def test_a_checkpoint_between_backward_and_step_belongs_to_the_parameters(two: Ranks) -> None:
    for found in two(saved_in_between):
        assert found == Between(has_the_memory_before=True, saved_step=3, step=3, step_after=4)


# -- steps without an exchange, or with a part of one


@dataclass(frozen=True)
class Heard:
    """What was said, and the error of a guard."""

    said: list[str]
    raised: str


def partly(how: str, guard_every: int = 0) -> Heard:
    """Optimizer steps after passes that add to what was exchanged, or that look as if they did."""
    model, options = wrapped(perceptron(), "plain" if how == "added, plain" else "ddp")
    optimizer = optimizer_of(model)
    wire = gradwire.attach(model, optimizer, "dense", guard_every=guard_every, **options)
    raised = ""
    with told() as lines:
        try:
            for number in range(0, 8, 2):
                optimizer.zero_grad()
                for micro in range(2):
                    inputs, targets = batch(number + micro)
                    is_local = micro == 1 if how.startswith("added") else how == "clipped" and micro == 0
                    with wire.no_sync() if is_local else nullcontext():
                        loss = nn.functional.mse_loss(model(inputs), targets)
                        if how == "flag":  # too late: DDP has read the last one in the forward pass
                            model.require_backward_grad_sync = micro == 1
                        loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
        except GradwireError as error:
            raised = str(error)
    return Heard(lines, raised)


@pytest.mark.parametrize("how", rest(["flag", "added, plain"], but=["flag"]))
def test_a_step_with_a_part_of_an_exchange_is_said_once(two: Ranks, how: str) -> None:
    for found in two(partly, how):
        assert found.raised == ""
        (line,) = found.said
        assert "only a part was exchanged" in line


def test_a_step_with_a_part_of_an_exchange_is_an_error_under_a_guard(two: Ranks) -> None:
    for found in two(partly, "flag", guard_every=4):
        assert found.said == []
        assert "only a part was exchanged" in found.raised


def test_a_pass_that_adds_nothing_after_an_exchange_is_no_such_case(two: Ranks) -> None:
    assert two(partly, "clipped") == [Heard([], "")] * 2


def unseen(how: str, guard_every: int = 0) -> Heard:
    """Optimizer steps, some of them with gradients that were never exchanged."""
    model = DistributedDataParallel(perceptron())
    optimizer = optimizer_of(model)
    text = "local_every(interval=2)" if how == "local_every" else "dense"
    wire = gradwire.attach(model, optimizer, text, guard_every=guard_every)
    raised = ""
    with told() as lines:
        try:
            for number in range(4):
                optimizer.zero_grad()
                if how == "flush" and number == 2:
                    wire.flush()
                elif (how == "detach, around" and number > 2) or (how == "around" and number >= 2):
                    backward(model.module, number)
                elif how.startswith("detach") and number == 2:
                    wire.detach()
                else:
                    backward(model, number)
                optimizer.step()
        except GradwireError as error:
            raised = str(error)
    return Heard(lines, raised)


def test_a_step_without_an_exchange_is_said_once(two: Ranks) -> None:
    for found in two(unseen, "around"):
        assert found.raised == ""
        (line,) = found.said
        assert "never exchanged" in line
    for found in two(unseen, "around", guard_every=4):
        assert found.said == []
        assert "never exchanged" in found.raised


@pytest.mark.parametrize("how", ["flush", "detach, around", "local_every"])
def test_steps_that_need_no_exchange_are_no_such_case(two: Ranks, how: str) -> None:
    assert two(unseen, how, guard_every=int(how.startswith("detach"))) == [Heard([], "")] * 2
