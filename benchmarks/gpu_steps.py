"""How long is a step beside those of DDP and of torch's hooks? GPT-2 on one rank, matrices on several.

One rank over NCCL is alone and does all that it would do with others: its table shows what kernels and the
host take. Several ranks show what a step gains over their network. `make gpu` starts them on one GPU, where
they talk over sockets, and calls `table` there. All contestants train in turns, in another order each turn;
a step's time is the slowest rank's, and a ratio is to DDP's step of the same turn.

Alone, this program makes the table of GPT-2. It needs a CUDA device; `--cpu` trains a tiny one over gloo.

    PYTHONPATH=src python benchmarks/gpu_steps.py [--turns 5] [--cpu] [--json PATH]
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradwire

DDP = "DDP"
GPT2 = ("dense", "bf16", "covap(interval=3)", "topk(ratio=0.01)", "int8", "powersgd(rank=1)", "int4")
MATRICES = ("auto", "int8", "topk(ratio=0.01)", "int4", "powersgd", "covap(interval=3)", "dense")
"""The default first."""
GRAPHS = ", cuda_graphs=True"
"""Behind the name of a recipe whose kernels are captured."""
SETTLING, CAPTURING, CHOOSING = 6, 16, 90
"""Steps before the first turn; with graphs, which are there by then; those of `auto`, which has chosen."""


class Task(NamedTuple):
    """A model, its loss, and whether it trains with autocast, bucket views and AdamW, as GPT-2 does."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    is_mixed: bool


def hooks(where: torch.device) -> dict[str, Callable[[DistributedDataParallel], None]]:
    """torch's own. Over gloo it has none for bfloat16."""
    half = fp16_compress_hook if where.type == "cpu" else bf16_compress_hook
    return {
        f"torch's {half.__name__}": lambda ddp: ddp.register_comm_hook(None, half),
        "torch's powerSGD_hook, rank 1": lambda ddp: ddp.register_comm_hook(
            PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2), powerSGD_hook
        ),
    }


class Way(NamedTuple):
    """A model that trains in its own way."""

    step: Callable[[], None]
    model: nn.Module
    wire: gradwire.Wire | None


class Turn(NamedTuple):
    """Seconds of a step, and of those the ones after which the host had enqueued it."""

    step_s: float
    host_s: float


class Gpt2(nn.Module):
    """GPT-2 as it was published, in its smallest size by default; head and embedding are one matrix."""

    def __init__(self, width: int = 768, layers: int = 12, context: int = 1024, letters: int = 50257) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, 0.0, nn.functional.gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, text: Tensor) -> Tensor:
        """Logits (batch, context, letters)."""
        causal = nn.Transformer.generate_square_subsequent_mask(text.shape[1], device=text.device)
        places = torch.arange(text.shape[1], device=text.device)
        hidden = self.blocks(self.letters(text) + self.places(places), causal, is_causal=True)
        return nn.functional.linear(hidden, self.letters.weight)


def gpt2(where: torch.device) -> Task:
    """124 M parameters and 8 sequences of 1024; on the CPU one that is tiny."""
    small = where.type == "cpu"
    model = Gpt2(64, 2, 32, 256) if small else Gpt2()
    shape, letters = ((2, 33), 256) if small else ((8, 1025), 50257)
    text = torch.randint(letters, shape, generator=_draw()).to(where)

    def loss(wrapped: nn.Module) -> Tensor:
        logits = wrapped(text[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    return Task(model.to(where), loss, is_mixed=True)


def matrices(where: torch.device) -> Task:
    """Four of 4096 x 4096, which are 67 M parameters; on the CPU of 64 x 64."""
    width = 64 if where.type == "cpu" else 4096
    layers = [nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(4)]
    inputs = torch.randn(64, width, generator=_draw()).to(where)
    model = nn.Sequential(*layers).to(where)
    return Task(model, lambda wrapped: wrapped(inputs).square().mean(), is_mixed=False)


def _draw() -> torch.Generator:
    """Each rank has data of its own."""
    return torch.Generator().manual_seed(dist.get_rank())


def way(name: str, task_at: Callable[[torch.device], Task], where: torch.device) -> Way:
    """By the name of a recipe, or of a hook of torch's; or plain DDP. It has settled."""
    torch.manual_seed(0)
    task = task_at(where)
    devices = None if where.type == "cpu" else [where.index]
    ddp = DistributedDataParallel(task.model, device_ids=devices, gradient_as_bucket_view=task.is_mixed)
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(ddp.parameters(), lr=1e-5, fused=True)
        if task.is_mixed
        else torch.optim.SGD(ddp.parameters(), lr=1e-4)
    )
    wire, settling = None, CHOOSING if name == "auto" else SETTLING
    if name in hooks(where):
        hooks(where)[name](ddp)
    elif name != DDP:
        recipe = name.removesuffix(GRAPHS)
        wire = gradwire.attach(ddp, optimizer, recipe, cuda_graphs=recipe != name)
        settling = settling if recipe == name else CAPTURING

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(where.type, torch.bfloat16, enabled=task.is_mixed):
            loss = task.loss(ddp)
        loss.backward()
        optimizer.step()

    for _ in range(settling):
        step()
    return Way(step, ddp, wire)


def in_turns(ways: Mapping[str, Way], turns: int, steps: int, where: torch.device) -> dict[str, list[Turn]]:
    """Of each, per turn of `steps`: the times of a step."""
    names = list(ways)
    rows: dict[str, list[Turn]] = {name: [] for name in names}
    for turn in range(turns):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            _wait(where)
            _slowest(0.0, where)  # all ranks begin together
            start_s = time.perf_counter()
            for _ in range(steps):
                ways[name].step()
            host_s = time.perf_counter() - start_s
            _wait(where)
            taken_s = time.perf_counter() - start_s
            rows[name].append(Turn(_slowest(taken_s, where) / steps, _slowest(host_s, where) / steps))
    return rows


def _wait(where: torch.device) -> None:
    if where.type == "cuda":
        torch.cuda.synchronize()


def _slowest(seconds: float, where: torch.device) -> float:
    found = torch.tensor(seconds, dtype=torch.float64, device=where)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def table(
    task_at: Callable[[torch.device], Task],
    recipes: Sequence[str],
    where: torch.device,
    *,
    turns: int = 5,
    steps: int = 6,
    hooked: bool = True,
) -> tuple[list[list[str]], dict[str, Way]]:
    """Rows of text, one for each contestant, DDP first; and the contestants, by their names. Without `hooked`
    torch's hooks are left out."""
    names = (DDP, *(hooks(where) if hooked else ()), *recipes)
    ways = {name: way(name, task_at, where) for name in names}
    found = in_turns(ways, turns, steps, where)
    rows = []
    for name, taken in found.items():
        wire = ways[name].wire
        chosen = f", which chose {wire.report().recipe}" if name == "auto" and wire is not None else ""
        beside = [one.step_s / ddp.step_s for one, ddp in zip(taken, found[DDP], strict=True)]
        rows.append(
            [
                name + chosen,
                f"{_spread([1e3 * each.step_s for each in taken], 1)} ms",
                _spread(beside, 2),
                f"{1e3 * median(each.host_s for each in taken):.1f} ms",
            ]
        )
    return rows, ways


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    head = ["contestant", "step", "beside DDP's of the same turn", "host"]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def alone(turns: int, where: torch.device) -> list[list[str]]:
    """The table of GPT-2, on one rank that does as if it had company."""
    backend = "gloo" if where.type == "cpu" else "nccl"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        with patch("gradwire._api.attach.is_alone", lambda _comm: False):
            return table(gpt2, GPT2, where, turns=turns)[0]
    finally:
        dist.destroy_process_group()


def main() -> None:
    """Print a line for each contestant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="a tiny model over gloo: does it run?")
    parser.add_argument("--json", type=Path, help="write all rows to this file")
    options = parser.parse_args()
    if not (options.cpu or torch.cuda.is_available()):
        print(f"torch {torch.__version__} finds no CUDA device: nothing is measured")
        return
    rows = alone(options.turns, torch.device("cpu") if options.cpu else torch.device("cuda", 0))
    print(as_text(rows))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
