"""What does `auto` choose as link and computation change under it, when, and is anything lost?

Two ranks of an emulated network train an emulated model, from phase to phase: a link that is good, bad, and
good again, a batch twice as large, one rank slower than the other. A second run has a fast link from its
start. Printed are what ran, from which step of the phase on, and the median step of the phase's last tenth
beside what the phase computes. At the end, what all ranks brought is compared with what was delivered and
what is unsent: by one number per parameter, its product with a fixed random tensor. All ranks must have made
the same choices in the same steps (checked). A choice stands for 1,000 steps, and dense for 300, before it
is looked at again; the whole takes a quarter of an hour.

    python benchmarks/changes.py [--steps 1080] [--json PATH]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.lab import emulate
from gradwire.lab.bench.trainer import policy_of
from gradwire.lab.workloads.catalogue import workload
from gradwire.lab.workloads.emulated import SleepingModel

WORLD = 2
WORKLOAD = "emulated(vgg19, shrink=256, time_scale=0.25)"
GOOD, BAD = emulate.EmulatedLink(1e9, 0.0005), emulate.EmulatedLink(50e6, 0.0005)


class Phase(NamedTuple):
    """`factors` by rank: how many times as long it computes. `share` of the steps of a phase."""

    name: str
    link: emulate.EmulatedLink
    factors: tuple[float, float] = (1.0, 1.0)
    share: float = 1.0


RUNS = {
    "changes": (
        Phase("a good link", GOOD),
        Phase("a bad link", BAD),
        Phase("good again", GOOD),
        Phase("bad again", BAD),
        Phase("twice the batch", BAD, (2.0, 2.0)),
        Phase("one rank slower", BAD, (1.0, 2.0)),
    ),
    "fast from the start": (Phase("not slowed", emulate.EmulatedLink(), share=0.25),),
}


class Books:
    """What a rank brought and what was delivered, as one number for each parameter."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._named = dict(model.module.named_parameters())
        draws = torch.Generator().manual_seed(0)
        self._with = {
            name: torch.randn(each.shape, generator=draws).flatten() for name, each in self._named.items()
        }
        self.brought = dict.fromkeys(self._named, 0.0)
        self.delivered = dict.fromkeys(self._named, 0.0)
        self._norms = dict.fromkeys(self._named, 0.0)
        for name, each in self._named.items():
            each.register_hook(partial(self._bring, name))

    def _product(self, name: str, tensor: torch.Tensor) -> float:
        return float(tensor.flatten().double() @ self._with[name].double())

    def _bring(self, name: str, gradient: torch.Tensor) -> None:
        self.brought[name] += self._product(name, gradient)
        self._norms[name] += float(gradient.norm()) * float(self._with[name].norm())

    def deliver(self) -> None:
        for name, each in self._named.items():
            assert each.grad is not None
            self.delivered[name] += self._product(name, each.grad)

    def lost(self, wire: gradwire.Wire) -> float:
        """The largest gap of a parameter, as a share of all that was brought. A collective."""
        unsent = wire.mean_state_dict()["mean"]["memory"]
        shares = []
        for name in self._named:
            pair = torch.tensor([self.brought[name], self._norms[name]], dtype=torch.float64)
            dist.all_reduce(pair)
            brought, norms = (pair / WORLD).tolist()
            left = self._product(name, unsent[name]) if name in unsent else 0.0
            shares.append(abs(brought - self.delivered[name] - left) / norms)
        return max(shares)


def worker() -> None:
    """One rank: for each line on stdin so many steps, so much slower; answers with what ran."""
    torch.set_num_threads(1)
    dist.init_process_group(emulate.backend())
    made = workload(WORKLOAD)
    model = made.model(0)
    assert isinstance(model, SleepingModel)
    ddp = DistributedDataParallel(model, bucket_cap_mb=made.bucket_cap_mb, gradient_as_bucket_view=True)
    policy = None if made.policy is None else policy_of(made.policy)
    wire, books = gradwire.attach(ddp, policy=policy), Books(ddp)
    batches = made.batches(dist.get_rank(), WORLD, 0)
    before_s, ready_s = model.before_s, [layer.ready_s for layer in model.layers]
    for line in sys.stdin:
        steps, factor = int(line.split()[0]), float(line.split()[1])
        model.before_s = before_s * factor
        for layer, at_s in zip(model.layers, ready_s, strict=True):
            layer.ready_s = at_s * factor
        taken_s, ran = [], list[tuple[int, str]]()
        for number in range(steps):
            start_s = time.perf_counter()
            ddp.zero_grad(set_to_none=False)
            made.loss(ddp, next(batches)).backward()
            books.deliver()
            taken_s.append(time.perf_counter() - start_s)
            if not ran or ran[-1][1] != wire.report().recipe:
                ran.append((number, wire.report().recipe))
        answer = {
            "ran": ran,
            "why": wire.report().why,
            "step_s": median(taken_s[-steps // 10 :]),
            "computes_s": (before_s + ready_s[0]) * factor,
            "lost": books.lost(wire),
        }
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


def ask(ranks: "list[subprocess.Popen[str]]", phase: Phase, steps: int) -> dict[str, Any]:
    """Let all ranks run a phase; what the slowest says, after all have said that the same ran."""
    for rank, factor in zip(ranks, phase.factors, strict=True):
        assert rank.stdin is not None
        rank.stdin.write(f"{steps} {factor}\n")
        rank.stdin.flush()
    answers = [json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout is not None]
    assert len({json.dumps(answer["ran"]) for answer in answers}) == 1, "ranks differ"
    slowest: dict[str, Any] = max(answers, key=lambda answer: answer["computes_s"])
    return slowest


def main() -> None:
    """Build the networks, start the ranks, change what is around them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1080, help="per phase")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        worker()
        return
    entered, found = emulate.enter(), dict[str, list[dict[str, Any]]]()
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    for name, phases in RUNS.items():
        found[name] = []
        with emulate.EmulatedNetwork(WORLD, phases[0].link, entered) as network:
            ranks = [network.popen(rank, [sys.executable, __file__], **pipes) for rank in range(WORLD)]
            for phase in phases:
                network.reshape(phase.link)
                answer = ask(ranks, phase, round(phase.share * arguments.steps))
                found[name].append({"phase": phase.name, **answer})
                print(
                    f"{phase.name}: a step takes {answer['step_s'] * 1e3:.0f} ms, of which "
                    f"{answer['computes_s'] * 1e3:.0f} are computation; lost so far {answer['lost']:.1e}"
                )
                for step, recipe in answer["ran"]:
                    print(f"  from step {step}: {recipe}")
                print(f"  {answer['why']}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
