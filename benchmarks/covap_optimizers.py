"""What do Adam, momentum and clipping make of gradients that come every I-th step, I at once?

One rank, weights in a unit each, whose gradient is 1 plus noise (standard deviations in the table) in every
step. The table shows how far the mean weight has come in the end under `covap`, relative to the same
optimizer under all-reduce; clipping bounds norms at the mean that they have under all-reduce. The last column
is the mean norm of the gradient that an optimizer sees, likewise.

    python benchmarks/covap_optimizers.py [--steps 2000] [--json PATH]
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from lockstep import carry
from torch import Tensor

from gradwire.comm import run_ranks
from gradwire.recipes import recipe
from gradwire.step.arena import Lane, ParameterSpec

UNITS = 64
INTERVALS = (2, 4, 8)
FEEDBACK = ("full", "schedule", "none")
NOISES = (0.0, 1.0, 10.0)
LEARNING_RATE = 1e-3

Make = Callable[[list[Tensor]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda weights: torch.optim.SGD(weights, LEARNING_RATE),
    "momentum": lambda weights: torch.optim.SGD(weights, LEARNING_RATE, momentum=0.9),
    "Adam": lambda weights: torch.optim.Adam(weights, LEARNING_RATE),
    "clipped SGD": lambda weights: torch.optim.SGD(weights, LEARNING_RATE),
}


def handed_over(text: str, gradients: Tensor) -> Tensor:
    """What the optimizer sees, (steps, UNITS)."""
    built = recipe(text).build()
    specs = [ParameterSpec(f"weight{number}", (1,), torch.float32, 1) for number in range(UNITS)]
    lane = Lane(0, specs, built.exchange, range(1, len(specs)), torch.device("cpu"))
    carried = run_ranks(
        1, lambda comm: [carry(lane, each, number, comm, False)[0] for number, each in enumerate(gradients)]
    )
    return torch.stack(carried[0])


def travelled(name: str, seen: Tensor, limit: float) -> float:
    """How far the mean weight comes."""
    weight = torch.zeros(UNITS, requires_grad=True)
    optimizer = OPTIMIZERS[name]([weight])
    for gradient in seen:
        weight.grad = gradient.clone()
        if name.startswith("clipped"):
            torch.nn.utils.clip_grad_norm_([weight], limit)
        optimizer.step()
    return -float(weight.detach().mean())


def compare(interval: int, feedback: str, noise: float, steps: int) -> dict[str, float]:
    """One row: everything relative to all-reduce."""
    gradients = 1.0 + noise * torch.randn(steps, UNITS, generator=torch.Generator().manual_seed(0))
    seen = handed_over(f"covap(interval={interval}, feedback={feedback!r})", gradients)
    limit = float(gradients.norm(dim=1).mean())
    row = {name: travelled(name, seen, limit) / travelled(name, gradients, limit) for name in OPTIMIZERS}
    return {**row, "norm": float(seen.norm(dim=1).mean()) / limit}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    columns = [*OPTIMIZERS, "norm"]
    print(
        "| interval | feedback | noise | " + " | ".join(columns) + " |\n" + "|---" * (3 + len(columns)) + "|"
    )
    raw = []
    for noise in NOISES:
        for interval in INTERVALS:
            for feedback in FEEDBACK:
                row = compare(interval, feedback, noise, options.steps)
                cells = [str(interval), feedback, f"{noise:g}", *(f"{row[name]:.2f}" for name in columns)]
                print("| " + " | ".join(cells) + " |", flush=True)
                raw.append({"interval": interval, "feedback": feedback, "noise": noise, **row})
    if options.json is not None:
        options.json.write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
