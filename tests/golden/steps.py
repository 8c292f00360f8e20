"""What training steps leave, for every recipe: means, memory, and bytes, as a user's loop comes by them.

This is the oracle of a restructuring. Gradients go in where a user's do, by a backward pass of an attached
model. Means are read from `p.grad`, memory from `wire.state_dict()`. Ranks are processes over gloo. Nothing
here knows the reducer: of gradwire it uses `attach`, the wire's methods, and in `in_small_units` a recipe's
boundaries. So it runs on the source tree of another commit as well, and `same.py` compares the two. Rounds
of local steps, members by a script, and FSDP2's own traffic have files of their own beside this one.

Hashes differ between processors and versions of torch, so none is written down. On one rank most recipes run
densely, as they do for users.

The module reads settings from its input, and prints a line of JSON for each moment::

    echo '[["plain module", "topk(ratio=0.1)", 2]]' | python -m tests.golden.steps
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradwire import Wire, attach, recipe
from tests.golden.given import Change, Given, Play, Row, Tell, digest, gradients, nothing
from tests.golden.local_steps import LOCAL_STEPS
from tests.golden.moving_members import MEMBERS
from tests.golden.sharded_steps import SHARDED

WORLDS = (1, 2, 3, 4)
SOME = (2, 3)
"""Worlds of scenes in which their number does not matter: two addends commute, three do not."""

STEPS = 4
TIMEOUT_S = 60.0
"""Of a collective. A rank that hangs costs this, and its setting counts as one that raised."""

BY_THE_CLOCK = {"flexible, eager", "mergecomp, timed"}
"""Labels of recipes whose plans follow from times that they measure within four steps."""


def in_small_units(text: str) -> Any:
    """The recipe `text` in units of at most 1,000 elements, of which there are as many as of a large model.

    This is the only place to change when the inside of a recipe changes. A recipe that measures first chooses
    its boundaries itself.
    """
    built = recipe(text).build()

    def cutter(sizes: Sequence[int]) -> Sequence[int]:
        numel = sum(sizes)
        units = max(1, -(-numel // 1000))
        return tuple(numel * unit // units for unit in range(1, units))

    if built.next is not None:
        return text
    own = f"small units of {text}"  # by the text of a registered recipe, that recipe would run
    return replace(built, cutter=cutter, text=own, tiny=own if built.tiny == built.text else built.tiny)


@dataclass
class Loop:
    """One rank's training loop with an attached model."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    wire: Wire
    text: str
    tell: Tell

    def backward(self, number: int, moment: str, change: Change = nothing) -> None:
        """A pass with gradients of this `number`, `change`d; tells means and bytes sent at a `moment`."""
        grads = gradients(dist.get_rank(), number)
        change(grads)
        self.model(grads).backward()
        sent = self.wire.metrics().get("gradwire/bytes_sent", 0.0)
        self.tell(Row(moment, self.means(), f"{sent:.1f} bytes"))

    def step(self, number: int, moment: str = "", change: Change = nothing) -> None:
        """A pass and the optimizer's step; tells all three."""
        moment = moment or f"step {number}"
        self.backward(number, moment, change)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tell(Row(moment, memory=self.memory()))

    def means(self) -> str:
        """Of all gradients, as they stand."""
        return digest({name: each.grad for name, each in self.model.named_parameters()})

    def memory(self) -> str:
        """Of what a checkpoint says of the past. Its format and the words of a report are left out."""
        [state] = self.wire.state_dict().values()
        return digest({key: state[key] for key in ("step", "plan", "memory", "planes", "kept")})


# -- scenes


def few(loop: Loop) -> None:
    for number in range(STEPS):
        loop.step(number)


def over_a_warm_up(loop: Loop) -> None:
    """Of three steps."""
    for number in range(6):
        loop.step(number)


def over_turns(loop: Loop) -> None:
    """Turns among two, three, or all ranks are drawn anew every three cycles: another one with this seed."""
    for number in range(3 * max(3, dist.get_world_size()) + 2):
        loop.step(number)


def over_a_trial(loop: Loop) -> None:
    """Each election is tried for two steps per rank, in cycles of 16 steps per rank."""
    for number in range(16 * dist.get_world_size() + 2):
        loop.step(number)


def switched(loop: Loop) -> None:
    """From each recipe to the next, and at last what is unsent is sent."""
    numbers = itertools.count()
    _first, *others = loop.text.split(" > ")
    for text in ("", *others):
        if text:
            loop.wire.switch(text)
        for _ in range(3):
            number = next(numbers)
            loop.step(number, f"step {number}" + f", by {text}" * bool(text))
    loop.wire.flush()
    loop.tell(Row("flushed", means=loop.means()))
    loop.optimizer.step()
    loop.optimizer.zero_grad()
    loop.tell(Row("flushed", memory=loop.memory()))
    loop.step(next(numbers), "the step that follows")


def two_passes(loop: Loop) -> None:
    """Of two passes the first sends nothing, or both do."""
    loop.step(0)
    for number, context in ((1, loop.wire.no_sync), (3, nullcontext)):
        with context():
            loop.backward(number, f"step {number}, its first pass")
        loop.step(number + 1)


def one_silent_pass(loop: Loop) -> None:
    """Where momentum is applied before gradients are sent, a step sends once."""
    loop.step(0)
    with loop.wire.no_sync():
        loop.backward(1, "step 1, its first pass")
    loop.step(2)


def left_out(loop: Loop) -> None:
    """Gradients are cleared before the optimizer's step, dropped, not finite on one rank, and zero on one."""

    def spoil(grads: dict[str, Tensor]) -> None:
        if dist.get_rank() == dist.get_world_size() - 1:
            grads["middle.weight"][3, 5] = float("nan")

    def empty(grads: dict[str, Tensor]) -> None:
        if dist.get_rank() == 0:
            grads["last.weight"].zero_()

    loop.step(0)
    loop.backward(1, "step 1, which is cleared")
    loop.optimizer.zero_grad()
    loop.step(2)
    loop.backward(3, "step 3, which is dropped")
    loop.wire.drop_step()
    loop.optimizer.zero_grad()
    loop.step(4)
    loop.backward(5, "step 5, which is not finite", spoil)
    loop.optimizer.zero_grad()
    loop.step(6)
    loop.step(7, change=empty)
    loop.step(8)


@dataclass(frozen=True)
class Scene:
    """What a loop does, with a model and `attach`'s `options`. Without `texts` all recipes run in it."""

    play: Callable[[Loop], None]
    texts: tuple[str, ...] = ()
    worlds: tuple[int, ...] = WORLDS
    is_plain: bool = False
    small_units: bool = False
    narrow: tuple[str, ...] = ()
    adam: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def run(self, text: str, tell: Tell) -> None:
        """Play it with a model, attached. A collective over all ranks."""
        model: nn.Module = Given(self.narrow)
        options = dict(self.options)
        if self.is_plain:
            options["replicas"] = dist.group.WORLD
        else:
            model = DistributedDataParallel(model, bucket_cap_mb=0.01)
        first = text.split(" > ")[0]
        make = torch.optim.Adam if self.adam else torch.optim.SGD
        optimizer = make(model.parameters(), lr=0.05)
        wire = attach(model, optimizer, in_small_units(first) if self.small_units else first, **options)
        self.play(Loop(model, optimizer, wire, text, tell))


SENDING_ONCE = ("dgc(ratio=0.1, momentum=0.9, warmup_steps=0)", "signum")
"""Recipes that apply momentum before gradients are sent."""

FAMILIES = (
    "dense", "fp16", "fp8(block=100)", "int8", "int4(block=33)", "int4(collective='all_gather')", "efsignsgd",
    "topk(ratio=0.1)", "topk(ratio=0.2, values='int8')", "leader_topk(ratio=0.1)",
    "leader_topk(ratio=0.1, beta=0.25)", "ar_topk", "scalecom(rate=10, warmup_steps=0)",
    "powersgd(warmup_steps=0)", "acpsgd(warmup_steps=0)", "covap(interval=3)",
    "dgc(ratio=0.1, momentum=0.0, warmup_steps=0)", "gcomp(refresh=3)", "qsgd(feedback=True)",
    "sketchsgd(ratio=0.1)", "allreduce(algorithm='ring')",
)  # fmt: skip
"""Of all kinds: by memory, by what is sent, by how it is added up."""

FEW = (
    "dense",
    "int4(block=33)",
    "topk(ratio=0.1)",
    "powersgd(warmup_steps=0)",
    "covap(interval=3)",
    "ar_topk",
)

SEED = 64
"""All turns are drawn differently for the first three cycles and for the next."""

UNITS_IN_TURN = (
    "covap(interval=3, ascend_steps=4)",
    "covap(interval=3, sharding='paper', unit_mb=0.01, ascend_steps=4)",
    "covap(interval=3, sharding='off', unit_mb=0.01, ascend_steps=4)",
    "covap(interval=3, order='paper')",
    "covap(interval=3, feedback='none')",
    "local_every(interval=2)",
)
RANKS_IN_TURN = (
    "leader_topk(ratio=0.1)", "leader_topk(ratio=0.1, beta=0.25)", "star_topk(algorithm='tree')",
    "scalecom(rate=10, rates={'first.*': 3}, warmup_steps=0)", "acpsgd(warmup_steps=0)",
    "acpsgd(warmup_steps=0, order='paper')", "gcomp(refresh=3)",
)  # fmt: skip
"""Or factors of a matrix, or whole steps."""

SWITCHES = (
    "topk(ratio=0.1) > int4(block=33) > dense > powersgd(warmup_steps=0) > covap(interval=3) > fp16",
    "covap(interval=3) > leader_topk(ratio=0.1) > gcomp(refresh=3) > acpsgd(warmup_steps=0) > topk",
    "dgc(ratio=0.1, momentum=0.9, warmup_steps=0) > topk(ratio=0.1) > signum > int8",
    "dense > topk(ratio=0.1) > topk(ratio=0.01)",
)

SCENES: dict[str, Scene | Play] = {
    "buckets of DDP, small units": Scene(few, small_units=True),
    "plain module": Scene(few, is_plain=True),
    "memory in bfloat16": Scene(few, FAMILIES, SOME, options={"memory_dtype": torch.bfloat16}),
    "warm-up": Scene(
        over_a_warm_up,
        (
            "powersgd(warmup_steps=3)",
            "acpsgd(warmup_steps=3)",
            "dgc(ratio=0.1, momentum=0.9, warmup_steps=3)",
            "scalecom(rate=10, warmup_steps=3)",
        ),
    ),
    "turns": Scene(over_turns, (*UNITS_IN_TURN, *RANKS_IN_TURN), options={"seed": SEED}),
    "turns, small units": Scene(over_turns, RANKS_IN_TURN, (3,), small_units=True, options={"seed": SEED}),
    "trials": Scene(over_a_trial, ("ar_topk", "ar_topk(fused=False)")),
    "switches": Scene(switched, SWITCHES),
    "two passes": Scene(two_passes, FAMILIES, (3,), small_units=True),
    "two passes, one silent": Scene(one_silent_pass, SENDING_ONCE, SOME),
    "left out": Scene(left_out, (*FAMILIES, *SENDING_ONCE), (3,), small_units=True),
    "left out, plain module": Scene(left_out, (*FEW, *SENDING_ONCE), (2,), is_plain=True),
    "two types": Scene(few, FAMILIES, (3,), narrow=("middle", "last.bias"), small_units=True),
    "Adam": Scene(few, ("gcomp(refresh=3)", "gcomp(mode='levels')"), SOME, adam=True),
    "nodes": Scene(few, FAMILIES, (4,), small_units=True, options={"nodes": [[0, 1], [2, 3]]}),
    **LOCAL_STEPS,
    **MEMBERS,
    **SHARDED,
}  # fmt: skip


class Setting(NamedTuple):
    """A scene of one recipe, or of several in turn, in one world."""

    scene: str
    text: str
    world: int

    def __str__(self) -> str:
        return f"{self.text} | {self.world} ranks | {self.scene}"


def settings(texts: Iterable[str]) -> Iterator[Setting]:
    """All settings, in which `texts` are those of the scenes that have none of their own."""
    every = tuple(dict.fromkeys(texts))
    for name, scene in SCENES.items():
        for world, text in itertools.product(scene.worlds, scene.texts or every):
            yield Setting(name, text, world)


# -- ranks


def perform(world: int, todo: Sequence[Setting]) -> Iterator[dict[str, Any]]:
    """Run settings of one world on ranks that are forked; the rows of all ranks, moment by moment.

    After a setting in which a rank has raised, ranks are forked anew.
    """
    context = multiprocessing.get_context("fork")
    while todo:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            ranks = [
                context.Process(target=_rank, args=(rank, world, todo, folder), daemon=True)
                for rank in range(world)
            ]
            for number, each in enumerate(ranks):
                (folder / f"{number}.jsonl").touch()
                each.start()
            for each in ranks:
                each.join()
            told = [
                [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]
                for rank in range(world)
            ]
        # A rank that raises is the first to end.
        done = min(of_rank[-1][0] if of_rank else 0 for of_rank in told)
        for number, setting in enumerate(todo[: done + 1]):
            yield from _merged(setting, [[row for at, row in of_rank if at == number] for of_rank in told])
        todo = todo[done + 1 :]


def _merged(setting: Setting, told: Sequence[Sequence[Mapping[str, str]]]) -> Iterator[dict[str, Any]]:
    """One row for each moment and kind, with what all ranks say."""
    for moment in dict.fromkeys(row["moment"] for of_rank in told for row in of_rank):
        found: dict[str, list[str]] = {}
        for kind in Row._fields[1:]:
            by_rank = ["".join(row[kind] for row in of_rank if row["moment"] == moment) for of_rank in told]
            if any(by_rank):
                found[kind] = by_rank
        yield {"setting": setting, "moment": moment, **found}


def _rank(rank: int, world: int, todo: Sequence[Setting], folder: Path) -> None:
    """One rank: a line for each moment, under the number of its setting."""
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "GRADWIRE_CONNECTIONS": "1"}
    warnings.simplefilter("ignore")
    logging.getLogger("gradwire").setLevel(logging.CRITICAL)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    with (folder / f"{rank}.jsonl").open("w", encoding="utf-8", buffering=1) as file:
        for number, setting in enumerate(todo):

            def tell(row: Row, number: int = number) -> None:
                file.write(json.dumps([number, row._asdict()]) + "\n")

            try:
                SCENES[setting.scene].run(setting.text, tell)
            except Exception as error:
                tell(Row("its end", raised=f"{type(error).__name__}: {error}"))
                break
            gc.collect()  # DDP and a wire refer to each other; groups are lent again once they are gone
            if number % 20 == 0:
                gc.freeze()  # kernels and recipes that have been loaded, which a collection would go through
    os._exit(0)  # peers may have raised: an orderly end would wait for them


def main() -> None:
    """Run the settings of the input, world by world."""
    todo = [Setting(*each) for each in json.load(sys.stdin)]
    torch.set_num_threads(1)
    # Loaded before ranks are forked, once for all of them; optimizers import it.
    importlib.import_module("torch._dynamo")
    gc.freeze()
    start_s = time.perf_counter()
    for world in WORLDS:
        for row in perform(world, [each for each in todo if each.world == world]):
            print(json.dumps(row), flush=True)
    print(
        f"{time.perf_counter() - start_s:.0f} s, {sum(os.times()[:4]):.0f} s of processors", file=sys.stderr
    )


if __name__ == "__main__":
    main()
