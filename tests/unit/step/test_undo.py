"""What becomes of an exchange, and what `outer` counts, whatever people do between `backward()` and `step()`.

The table is in `docs/engineering/design.md`, "A step is what the optimizer makes". Each of its rows is a
script here (`tests/support/undo.py` has the words), with its answers: the fate of each exchange when the next
one begins, what is said, and how many steps were attempted after each word. A last pass follows each script.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch._dynamo import reset

from gradwire.placement import HostDevice
from gradwire.sources.attempts import Attempted
from gradwire.sources.attempts import read as read_attempt
from gradwire.step.events import KnownOptimizer, StepBegan, StepEnded
from gradwire.step.optimizer_log import OptimizerLog
from gradwire.step.optimizers import is_stepping
from tests.support.undo import Model, Player, Stepper, Told


@dataclass(frozen=True)
class Row:
    """A script and its answers."""

    name: str
    script: str
    fates: str
    attempts: str
    optimizers: str = "a=wb"
    given: str = "a"
    options: Mapping[str, Any] = field(default_factory=dict)


ROWS = [
    Row(
        "one optimizer steps", "pass a -a pass a -a pass a", "final; final; final; final", "0 1 1 1 2 2 2 3 3"
    ),
    Row(
        "several optimizers, each of which steps",
        "pass a b -a -b pass a b -a -b pass b a",
        "final; final; final; final",
        "0 0 1 1 1 1 1 2 2 2 2 2 3 3",
        optimizers="a=w b=b",
        given="ab",
    ),
    Row(
        "cleared, no step",
        "pass a -a pass -a pass a",
        "final; final; left out, dropped bw; final",
        "0 1 1 1 1 2 3 3",
    ),
    Row(
        "cleared many times in a row",
        "pass a -a pass -a pass -a pass -a pass a",
        "final; final; left out, dropped bw; left out, dropped bw; left out, dropped bw; final",
        "0 1 1 1 1 2 2 3 3 4 5 5",
    ),
    Row(
        "cleared, then a step",
        "pass a -a pass -a a pass a",
        "final; final; left out, dropped bw; final",
        "0 1 1 1 1 2 2 3 3",
    ),
    Row(
        "cleared by a hook before the step",
        "pass a -a pass ~a pass a",
        "final; final; left out, dropped bw; final",
        "0 1 1 1 2 2 3 3",
    ),
    Row(
        "filled with zeros, no step",
        "pass a -a pass 0a pass a",
        "final; final; left out, dropped bw; final",
        "0 1 1 1 1 2 3 3",
    ),
    Row(
        "filled with zeros, then a step",
        "pass a -a pass 0a a pass a",
        "final; final; left out, dropped bw; final",
        "0 1 1 1 1 2 2 3 3",
    ),
    Row(
        "zeros that an exchange has brought",
        "pass a -a rest a -a rest 0a a rest pass a",
        "final; final; final; final; not yet, open bw; passes; made",
        "0 1 1 1 2 2 2 2 3 3 4 5 5",
    ),
    Row(
        "a step raises, and is left out",
        "pass a -a pass ^a -a pass a",
        "final; final; left out, dropped bw; final",
        "0 1 1 1 1 1 2 3 3",
    ),
    Row(
        "a step raises, then a save",
        "pass a -a pass ^a -a ask pass a",
        "final; final; left out, dropped bw; left out, dropped bw; final",
        "0 1 1 1 1 1 1 2 3 3",
    ),
    Row(
        "a step raises, and is tried again",
        "pass a -a pass ^a a -a pass a",
        "final; final; final; final",
        "0 1 1 1 1 2 2 2 3 3",
    ),
    Row(
        "a step raises, and another steps instead",
        "pass a -a pass ^a x -x pass a",
        "final; final; another; final; final",
        "0 1 1 1 1 2 2 2 3 3",
        optimizers="a=wb x=wb",
    ),
    Row(
        "a step raises, and the gradients stand",
        "pass a -a pass ^a pass a",
        "final; final; not yet, open bw; passes; made",
        "0 1 1 1 1 1 2 2",
    ),
    Row(
        "a step raises, and a pass without an exchange adds to its gradients",
        "pass a -a pass ^a local a -a pass a",
        "final; final; partly; final; final",
        "0 1 1 1 1 1 2 2 2 3 3",
    ),
    Row(
        "the step of one of two raises",
        "pass a b -a -b pass a ^b -a -b pass a b",
        "final; final; made, dropped b; final",
        "0 0 1 1 1 1 1 1 1 1 2 2 3 3",
        optimizers="a=w b=b",
        given="ab",
    ),
    Row(
        "the one inside raises, and steps alone",
        "pass a -a pass x( ^a ) a -a pass x( a )",
        "final; final; final; final",
        "0 1 1 1 1 2 2 2 3 3",
        optimizers="a=wb x=wb",
    ),
    Row(
        "one that was not given raises",
        "pass x -x pass ^x -x pass x",
        "final; another; final; left out, dropped bw; final",
        "0 1 1 1 1 1 2 3 3",
        optimizers="a=wb x=wb",
    ),
    Row(
        "one that was not given raises, and has more parameters",
        "pass x -x pass ^x -x pass x",
        "final; another; final; left out, dropped w; final",
        "0 1 1 1 1 1 2 3 3",
        optimizers="a=w x=wb",
    ),
    Row(
        "one that was not given raises in its second step",
        "pass a -a pass x ^x pass a",
        "final; final; another; final; final",
        "0 1 1 1 2 2 2 3 3",
        optimizers="a=wb x=wb",
    ),
    Row(
        "a closure raises after its pass",
        "a( -a pass ) a( -a pass raise ) -a a( -a pass )",
        "final; final; left out, dropped bw; final",
        "1 1 1 2 2",
    ),
    Row(
        "the user drops it",
        "pass a -a pass drop -a pass a",
        "final; final; left out, dropped bw; final",
        "0 1 1 1 2 2 2 3 3",
    ),
    Row(
        "dropped, and the gradients stand",
        "pass a -a pass drop pass a",
        "final; final; left out, dropped bw; final",
        "0 1 1 1 2 2 3 3",
    ),
    Row(
        "nothing to drop",
        "drop pass a drop -a pass a",
        "nothing to drop!; final; nothing to drop!; final; final",
        "0 0 1 1 1 1 2 2",
    ),
    Row(
        "one of two is dropped",
        "pass a b -a -b pass a drop pass a b",
        "final; final; made, dropped b; final",
        "0 0 1 1 1 1 1 2 2 2 3 3",
        optimizers="a=w b=b",
        given="ab",
    ),
    Row(
        "another backward",
        "pass a -a pass pass a -a pass pass pass a",
        "final; final; not yet, open bw; passes; made; not yet, open bw; not yet, open bw; made",
        "0 1 1 1 1 2 2 2 2 2 3 3",
    ),
    Row(
        "another backward, then cleared",
        "pass a -a pass pass -a pass a",
        "final; final; not yet, open bw; left out, dropped bw; final",
        "0 1 1 1 1 1 2 3 3",
    ),
    Row(
        "one of two steps, the other accumulates",
        "pass a b -a -b pass a -a pass a -a pass a b",
        "final; final; made, open b; made, open b; made",
        "0 0 1 1 1 1 1 1 2 2 2 3 3 4 4",
        optimizers="a=w b=b",
        given="ab",
    ),
    Row(
        "one of two steps, the other's are cleared later",
        "pass a b -a -b pass a -a pass a -a -b pass a b",
        "final; final; made, open b; made, dropped b; final",
        "0 0 1 1 1 1 1 1 2 2 2 2 3 3 4 4",
        optimizers="a=w b=b",
        given="ab",
    ),
    Row(
        "an optimizer that was not given",
        "pass a -a pass x -x pass x -x pass -x pass x",
        "final; final; another; final; final; left out, dropped bw; final",
        "0 1 1 1 2 2 2 3 3 3 3 4 5 5",
        optimizers="a=wb x=wb",
    ),
    Row(
        "of a part",
        "pass a -a pass x -a pass x -a pass a",
        "final; final; another; made, dropped b; made, dropped b; final",
        "0 1 1 1 1 1 2 2 2 3 4 4",
        optimizers="a=wb x=w",
    ),
    Row(
        "it takes over",
        "pass a -a pass >x x -x pass x -x pass -x pass x",
        "final; final; unseen; final; final; left out, dropped bw; final",
        "0 1 1 1 1 2 2 2 3 3 3 3 4 5 5",
        optimizers="a=wb x=wb",
    ),
    Row(
        "both in turn",
        "pass a -a pass x -x pass a -a pass x",
        "final; final; another; final; final; final",
        "0 1 1 1 2 2 2 3 3 3 4 4",
        optimizers="a=wb x=wb",
    ),
    Row(
        "around the one given",
        "pass x( a ) -a pass x( a ) -a pass -a pass x( a )",
        "final; final; final; left out, dropped bw; final",
        "0 1 1 1 2 2 2 2 3 4 4",
        optimizers="a=wb x=wb",
    ),
    Row(
        "inside the one given",
        "pass a( x ) -a pass a( x ) -a pass -a pass a( x )",
        "final; final; final; left out, dropped bw; final",
        "0 1 1 1 2 2 2 2 3 4 4",
        optimizers="a=wb x=wb",
    ),
    Row(
        "a discriminator's gradients of the generator's loss are cleared",
        "pass a b -a -b pass a -a -b pass b -a -b pass a -a -b pass b",
        "final; final; made, dropped b; made, dropped w; made, dropped b; made, open w",
        "0 0 1 1 1 1 1 1 1 2 2 2 2 3 3 3 3 4 4 5",
        optimizers="a=w b=b",
        given="ab",
    ),
    Row(
        "sharpness-aware: the first gradients are cleared",
        "pass a -a pass write -a pass a -a pass write -a pass a",
        "final; final; left out, dropped bw; final; left out, dropped bw; final",
        "0 1 1 1 1 1 1 2 2 2 2 2 2 3 3",
    ),
    Row(
        "sharpness-aware: both halves are left out",
        "pass a -a pass write -a pass write -a pass a",
        "final; final; left out, dropped bw; left out, dropped bw; final",
        "0 1 1 1 1 1 1 1 1 2 3 3",
    ),
    Row(
        "sharpness-aware: another optimizer inside",
        "pass x -a pass write -a pass x -a pass write -a pass x",
        "final; another; final; left out, dropped bw; final; left out, dropped bw; final",
        "0 1 1 1 1 1 1 2 2 2 2 2 2 3 3",
        optimizers="a=wb x=wb",
    ),
    Row("a closure", "a( -a pass ) a( -a pass )", "final; final; final", "1 2 2"),
    Row(
        "a closure of several passes",
        "a( -a pass -a pass -a pass ) a( -a pass -a pass )",
        "final; final; final; final; final; final",
        "1 2 2",
    ),
    Row(
        "a closure of another",
        "pass a -a x( -a pass ) x( -a pass ) -a pass a",
        "final; final; another; final; final; final",
        "0 1 1 2 3 3 3 4 4",
        optimizers="a=wb x=wb",
    ),
    Row(
        "a scaler skips step()",
        "pass a -a pass -a pass a",
        "final; final; left out, dropped bw; final",
        "0 1 1 1 1 2 3 3",
    ),
    Row(
        "a scaler has the device leave it out",
        "pass a -a pass a! -a pass a",
        "final; final; left out, dropped bw; final",
        "0 1 1 1 2 2 2 3 3",
    ),
    Row(
        "a scaler has the device leave it out, and the gradients stand",
        "pass a -a pass a! pass a",
        "final; final; not yet, open bw; passes; made",
        "0 1 1 1 2 2 3 3",
    ),
    Row(
        "a save in between",
        "pass a -a pass ask a ask -a pass a",
        "final; final; not yet, open bw; made; final; final",
        "0 1 1 1 1 2 2 2 2 3 3",
    ),
    Row(
        "a save in between, then cleared",
        "pass a -a pass ask -a ask pass a",
        "final; final; not yet, open bw; left out, dropped bw; left out, dropped bw; final",
        "0 1 1 1 1 1 1 2 3 3",
    ),
    Row(
        "a save after the clearing, then a step",
        "pass a -a pass -a ask a pass a",
        "final; final; left out, dropped bw; left out, dropped bw; final",
        "0 1 1 1 1 1 2 2 3 3",
    ),
    Row("clipping", "pass a -a pass look a -a pass a", "final; final; final; final", "0 1 1 1 1 2 2 2 3 3"),
    Row(
        "no optimizer was given",
        "pass a -a pass -a pass drop pass a",
        "final; final; final; left out, dropped bw; final",
        "0 1 1 1 1 2 3 3 4 4",
        given="",
    ),
    Row(
        "it has never stepped",
        "pass -a pass -a pass a -a pass -a pass a",
        "final; final; final; final; left out, dropped bw; final",
        "0 0 1 1 2 3 3 3 3 4 5 5",
    ),
    Row(
        "it, or one that shares its parameters, has stepped",
        "pass a -a -b pass a -b pass -b pass b",
        "final; made, dropped b; made, dropped b; left out, dropped bw; final",
        "0 0 0 0 1 1 1 2 2 3 3 4",
        optimizers="a=w b=wb",
        given="ab",
    ),
    Row(
        "join",
        "pass a -a pass -a pass a",
        "final; final; final; final",
        "0 1 1 1 1 2 3 3",
        options={"may_differ": lambda: True},
    ),
    Row(
        "what is skipped is kept",
        "pass a -a pass -a pass x -x pass a",
        "final; final; final; final; final",
        "0 1 1 1 1 2 3 3 3 4 4",
        optimizers="a=wb x=wb",
        options={"skipped": "keep"},
    ),
    Row(
        "another state is loaded",
        "pass a -a pass -a forget pass a",
        "final; final; final; final",
        "0 1 1 1 1 0 0 1 1",
    ),
    Row(
        "the recipe is detached",
        "pass a -a pass retire -a a round a",
        "final; final; final",
        "0 1 1 1 1 1 2 2 3 3",
    ),
    Row(
        "a pass that nobody saw", "pass a -a round a -a round a", "final; unseen; final", "0 1 1 1 2 2 2 3 3"
    ),
    Row(
        "a pass that nobody saw, and raises",
        "pass a -a round a -a",
        "final; unseen!; final",
        "0 1 1 1 1 1 1",
        options={"raises": True},
    ),
    Row(
        "a pass that nobody saw, and a hook clears after the step",
        "pass a -a round a~",
        "final; unseen; final",
        "0 1 1 1 2 2",
    ),
    Row(
        "a pass that nobody saw, and a hook clears before the step",
        "pass a -a round ~a",
        "final; final",
        "0 1 1 1 2 2",
    ),
    Row("one rank alone", "pass a -a round a -a", "final; final", "0 1 1 1 2 2 2", options={"alone": True}),
    Row("gradients that it has used before", "pass a a a -a a", "final; final", "0 1 2 3 3 4 4"),
    Row(
        "a pass without an exchange",
        "pass a -a local a -a pass a -a local local pass a",
        "final; final; final; final",
        "0 1 1 1 2 2 2 3 3 3 3 3 4 4",
    ),
    Row(
        "a part of it was exchanged",
        "pass a -a pass local a -a pass a",
        "final; final; partly; final; final",
        "0 1 1 1 1 2 2 2 3 3",
    ),
    Row(
        "a part of it was exchanged, and raises",
        "pass a -a pass local a",
        "final; final; partly!; final",
        "0 1 1 1 1 1 1",
        options={"raises": True},
    ),
    Row(
        "a part, then cleared",
        "pass a -a pass local -a pass a",
        "final; final; left out, dropped bw; final",
        "0 1 1 1 1 1 2 3 3",
    ),
    Row(
        "a part, then another exchange",
        "pass a -a pass local pass a",
        "final; final; not yet, open bw; passes; made",
        "0 1 1 1 1 1 2 2",
    ),
    Row(
        "passes of some parameters",
        "pass a b -a -b reach a -a pass a b",
        "final; final; made, dropped b; final",
        "0 0 1 1 1 1 1 1 2 2 3 3",
        optimizers="a=w b=b",
        given="ab",
    ),
    Row(
        "a step between two passes of the other's",
        "pass a b -a -b pass a pass b pass a b",
        "final; final; made, open b; made, open w; made",
        "0 0 1 1 1 1 1 2 2 3 3 4 4",
        optimizers="a=w b=b",
        given="ab",
    ),
    Row(
        "an optimizer of a part that clears it, then the one given",
        "pass a -a pass x -x a -a pass x -x a",
        "final; final; another; final; final",
        "0 1 1 1 1 1 2 2 2 2 2 3 3",
        optimizers="a=wb x=w",
    ),
    Row(
        "nothing is left to drop where another has stepped",
        "pass a -a pass x drop",
        "final; final; another; nothing to drop!; final",
        "0 1 1 1 2 2 2",
        optimizers="a=wb x=wb",
    ),
    Row(
        "dropped before the first step",
        "pass -a pass drop -a ask pass a",
        "final; final; left out, dropped bw; left out, dropped bw; final",
        "0 0 1 2 2 2 2 3 3",
    ),
    Row(
        "two passes before the first step, and later",
        "pass pass a -a pass pass a",
        "final; final; final; not yet, open bw; passes; made",
        "0 0 1 1 1 1 2 2",
    ),
]

DRAWN = [
    Row(
        "drawn, 1",
        "pass -x x! reach pass look a( y local pass ask )",
        "final; another; not yet, dropped w, open b; not yet, open bw; made; final; final",
        "0 0 0 1 1 1 2 2",
        optimizers="a=wb x=w y=b",
        given="a",
        options={},
    ),
    Row(
        "drawn, 2",
        "pass a( pass ask -b b ) drop",
        "final; final; final; nothing to drop!; final",
        "0 0 0 1",
        optimizers="a=w b=b x=w",
        given="ab",
        options={"alone": True},
    ),
    Row(
        "drawn, 3",
        "pass -x x pass pass -a a x pass",
        "final; another; not yet, dropped w, open b; not yet, open bw; passes; left out, dropped bw; "
        "not yet, open bw",
        "0 0 0 1 1 1 2 2 2 2",
        optimizers="a=wb x=w",
    ),
    Row(
        "drawn, 4",
        "x~ a( local ) a( x -x ask -a ) -x x -x",
        "final; final",
        "0 1 2 2 2 2 2",
        optimizers="a=wb x=w y=b",
        given="a",
        options={"raises": True},
    ),
    Row(
        "drawn, 5",
        "rest 0x x( -x ) pass ~a",
        "final; another; final; left out, dropped w",
        "0 0 1 1 2 2",
        optimizers="a=w x=wb",
        given="a",
        options={},
    ),
    Row(
        "drawn, 6",
        "-b pass a! a~ >x pass pass pass a",
        "final; final; final; final; another; final",
        "0 0 0 1 2 2 2 2 3 3",
        optimizers="a=w b=b x=w",
        given="ab",
        options={},
    ),
    Row(
        "drawn, 7",
        "pass retire a pass drop look",
        "final; final; left out, dropped bw",
        "0 0 1 1 2 2 2",
        optimizers="a=wb",
        given="",
        options={},
    ),
    Row(
        "drawn, 8",
        "a 0a retire b local x( pass )",
        "final; not yet, open bw",
        "0 0 0 1 1 2 2",
        optimizers="a=w b=b x=wb",
        given="ab",
        options={},
    ),
    Row(
        "drawn, 9",
        "b( ask pass local ) -b a( -a pass ask -x )",
        "final; final; final; final; final",
        "0 0 1 1",
        optimizers="a=w b=b x=w",
        given="ab",
        options={"skipped": "keep"},
    ),
    Row(
        "drawn, 10",
        "reach pass -x ~x -a pass pass >x -a pass",
        "final; final; another; left out, dropped bw; not yet, open bw; final; final",
        "0 0 0 0 0 1 1 1 1 2 2",
        optimizers="a=wb x=w",
        given="a",
        options={},
    ),
    Row(
        "drawn, 11",
        "pass x( -x local ) ask pass ask x( ask -x ) round x",
        "final; another; final; final; not yet, open bw; made; unseen!; final",
        "0 1 1 1 1 2 2 2 2",
        optimizers="a=w b=b x=wb",
        given="ab",
        options={"raises": True},
    ),
    Row(
        "drawn, 12",
        "-a -a a( pass local ) a! pass a~ pass pass a 0a ask",
        "final; not yet, open bw; passes; made; not yet, open bw; made; final",
        "0 0 1 2 2 3 3 3 4 4 4 4",
        optimizers="a=wb",
        given="a",
        options={},
    ),
    Row(
        "drawn, 13",
        "pass pass a( local -x pass pass ) x! -x",
        "final; final; final; final; another; final",
        "0 0 1 2 2 2",
        optimizers="a=w x=wb",
        given="a",
        options={"alone": True},
    ),
    Row(
        "drawn, 14",
        "b pass drop b( ask ) pass b",
        "final; left out, dropped bw; left out, dropped bw; final",
        "0 1 2 2 3 3 4",
        optimizers="a=w b=b",
        given="ab",
        options={},
    ),
    Row(
        "drawn, 15",
        "y y >x y ask pass pass x drop ask pass a~ pass",
        "final; final; final; nothing to drop!; final; final; another; final; not yet, open w",
        "0 0 0 0 0 0 0 1 1 1 1 2 2 2",
        optimizers="a=wb x=w y=b",
        given="a",
        options={"alone": True},
    ),
    Row(
        "drawn, 16",
        "look pass y pass -x x( local ) ask a y",
        "final; another; made, open w; not yet, dropped w, open b; partly!; made, dropped w",
        "0 0 0 1 1 1 1 1 2 2",
        optimizers="a=wb x=w y=b",
        given="a",
        options={"raises": True},
    ),
]
"""Random scripts: each notices a planted fault in `step/fates.py` that no row above notices."""

rows = pytest.mark.parametrize("row", [*ROWS, *DRAWN], ids=lambda row: row.name)


@rows
def test_events_have_their_answers(row: Row) -> None:
    told = Told(row.optimizers, row.given, **row.options)
    assert told.play(row.script) == f"{row.fates} | {row.attempts}"


@rows
def test_hooks_of_torch_tell_of_these_events(row: Row) -> None:
    player = Player(row.optimizers, row.given, **row.options)
    assert player.play(row.script) == f"{row.fates} | {row.attempts}"


def test_steps_that_are_left_out_are_counted_until_an_optimizer_steps() -> None:
    told = Told()
    told.play("pass a -a pass -a pass -a pass -a")
    assert (told.state.dropped, told.state.in_a_row) == (3, 3)
    told.play("a")
    assert (told.state.dropped, told.state.in_a_row) == (3, 0)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_any_thread_can_tell_whether_a_step_runs(compiles: bool) -> None:
    optimizer = Stepper([Model().w])
    other = Stepper([Model().w])
    reset()
    step = torch.compile(optimizer.step, backend="eager") if compiles else optimizer.step

    @torch.compiler.disable  # type: ignore[no-untyped-call, untyped-decorator]
    def closure() -> float:
        assert is_stepping(optimizer)
        assert not is_stepping(other)
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(is_stepping, optimizer).result()
        return 0.0

    step(closure)
    assert not is_stepping(optimizer)


def test_changed_optimizers_keep_no_hooks() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = OptimizerLog(dict(model.named_parameters()), (optimizer,), HostDevice())
    log.watch(model)
    for _ in range(3):
        log.change((optimizer,), model)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    log.change((), model)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_step_that_is_tried_again_inside_another_is_none_of_its_own() -> None:
    inside, around = (KnownOptimizer(is_given=each, names=frozenset("wb")) for each in (True, False))
    attempted = Attempted(given=(inside,))
    for each in (around, inside, inside):  # the first one of `inside` raises
        read_attempt(attempted, StepBegan(each))
    read_attempt(attempted, StepEnded(inside))
    assert attempted.count == 0
    read_attempt(attempted, StepEnded(around))
    assert attempted.count == 1
