"""How much of a real gradient arrives, and at how many bytes? A table and a picture per family of recipes.

Gradients of a model in training are recorded on four ranks over some steps (the ranks' batches differ, the
weights do not: they follow plain averages). Every recipe then carries the same gradients, with its memory,
ranks as threads, and bytes counted at the verbs. Error is relative, ‖Σ carried − Σ averages‖ / ‖Σ averages‖:

- `first`: of the first step, with an empty memory;
- `all`: of all steps together, when a memory has had time to deliver what it kept.

Vectors and tiny tensors are left out: they travel densely whatever the recipe.

    python benchmarks/fidelity.py [--workload resnet18] [--steps 12] [--pictures docs/pictures] [--json PATH]
"""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from gradwire import recipes
from gradwire.arena import ParameterSpec, specs_of
from gradwire.engine.fidelity import average, carried, relative_error, sum_of
from gradwire.engine.layout import TINY_ELEMENTS
from gradwire.lab.report import svg
from gradwire.lab.workloads import catalogue

WORLD = 4
WARM_UP = 20
"""Steps of training before anything is recorded: the first gradients are like no others."""

FAMILIES = {
    "sparsifiers": {
        "topk": [f"topk(ratio={r})" for r in (0.001, 0.01, 0.1)],
        "lwtopk": [f"lwtopk(ratio={r})" for r in (0.001, 0.01, 0.1)],
        "leader_topk": [f"leader_topk(ratio={r})" for r in (0.001, 0.01, 0.1)],
        "oktopk": [f"oktopk(ratio={r})" for r in (0.001, 0.01, 0.1)],
        "gtopk": [f"gtopk(ratio={r})" for r in (0.001, 0.01, 0.1)],
        "randomk": [f"randomk(ratio={r})" for r in (0.001, 0.01, 0.1)],
        "sketchsgd": [f"sketchsgd(ratio={r})" for r in (0.001, 0.01)],
        "adacomp": ["adacomp"],
        "covap": ["covap(interval=4)", "covap(interval=2)"],
    },
    "quantizers": {
        "cast": ["fp16", "bf16"],
        "int8, fp8, int4": ["int4", "fp8", "int8"],
        "truncate": [f"truncate(bits={b})" for b in (18, 16, 12)],
        "qsgd": [f"qsgd(bits={b})" for b in (2, 4, 8)],
        "terngrad": ["terngrad"],
        "efsignsgd": ["efsignsgd"],
        "onebit": ["onebit"],
        "signsgd": ["signsgd"],
    },
    "low-rank": {
        "powersgd": [f"powersgd(rank={r}, warmup_steps=0)" for r in (1, 2, 4, 8)],
        "acpsgd": [f"acpsgd(rank={r}, warmup_steps=0)" for r in (1, 2, 4, 8)],
        "topk, for comparison": [f"topk(ratio={r})" for r in (0.001, 0.01)],
    },
}


@dataclass(frozen=True)
class Found:
    """One recipe on one recording. Bytes are sent per rank, step and element."""

    recipe: str
    bytes_per_element: float
    first_error: float
    all_error: float


def record(workload_text: str, steps: int) -> tuple[tuple[ParameterSpec, ...], list[list[Tensor]]]:
    """Specs of what is not tiny, and the gradients by step and rank, each flat in layout order."""
    workload = catalogue.workload(workload_text)
    model = workload.model(seed=0)
    optimizer = workload.optimizer(model.parameters())
    batches = [workload.batches(rank, WORLD, seed=0) for rank in range(WORLD)]
    specs = tuple(s for s in specs_of(model) if len(s.shape) >= 2 and s.numel >= TINY_ELEMENTS)
    parameters = dict(model.named_parameters())
    recorded = []
    for step in range(WARM_UP + steps):
        gradients, total = [], None
        for rank in range(WORLD):
            optimizer.zero_grad(set_to_none=True)
            workload.loss(model, next(batches[rank])).backward()
            mine = [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
            total = mine if total is None else [a + b for a, b in zip(total, mine, strict=True)]
            if step >= WARM_UP:
                flat = [_gradient(parameters[spec.name]).reshape(-1) for spec in specs]
                gradients.append(torch.cat(flat))
        assert total is not None
        for parameter, summed in zip(model.parameters(), total, strict=True):
            parameter.grad = summed / WORLD
        optimizer.step()
        if gradients:
            recorded.append(gradients)
    return specs, recorded


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def carry(text: str, specs: Sequence[ParameterSpec], recorded: list[list[Tensor]]) -> Found:
    """What one recipe makes of the recording."""
    means, sent_bytes = carried(recipes.recipe(text).build(), specs, recorded)
    averages = [average(gradients) for gradients in recorded]
    per_element = sent_bytes / len(recorded) / averages[0].numel()
    first = relative_error(means[0], averages[0])
    return Found(text, per_element, first, relative_error(sum_of(means), sum_of(averages)))


# -- pictures

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640.0, 400.0, 64.0, 150.0, 16.0, 48.0
COLOURS = ("#3b6fb6", "#c8553d", "#3a8f5c", "#8a5fb0", "#b58900", "#2aa1a8", "#a0467a", "#6b6b6b", "#d08c2b")
STYLE = (
    "<style>text{font:12px sans-serif;fill:#444}.grid{stroke:#ddd}.curve{fill:none;stroke-width:1.6}</style>"
)
HEADER = "| recipe | bytes per element | error, first step | error, all steps |\n|---|---|---|---|"


def picture(family: dict[str, list[Found]], title: str) -> str:
    """Error of all steps against bytes, both logarithmic; a curve per method, a dot per setting."""
    points = [found for curve in family.values() for found in curve]
    across = _log_scale([p.bytes_per_element for p in points], LEFT, WIDTH - RIGHT)
    up = _log_scale([max(p.all_error, 1e-8) for p in points], HEIGHT - BOTTOM, TOP)
    parts = [STYLE, '<rect width="100%" height="100%" fill="white"/>', *_grid(across, up)]
    for number, (name, curve) in enumerate(family.items()):
        colour = COLOURS[number % len(COLOURS)]
        places = [
            (across(math.log10(p.bytes_per_element)), up(math.log10(max(p.all_error, 1e-8)))) for p in curve
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(svg.element("polyline", points=path, class_="curve", stroke=colour))
        parts += [
            svg.element("circle", svg.element("title", p.recipe), cx=x, cy=y, r=4, fill=colour)
            for (x, y), p in zip(places, curve, strict=True)
        ]
        line = TOP + 14 + 18 * number
        parts.append(svg.element("circle", cx=WIDTH - RIGHT + 16, cy=line - 4, r=4, fill=colour))
        parts.append(svg.text(WIDTH - RIGHT + 26, line, name))
    parts.append(
        svg.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "bytes sent per rank, step and element", "middle")
    )
    drawn = svg.drawing(WIDTH, HEIGHT, parts, title)
    return drawn.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)


def _log_scale(values: list[float], start: float, stop: float) -> svg.Scale:
    low, high = math.log10(min(values)), math.log10(max(values))
    margin = 0.05 * (high - low) + 0.02
    return svg.Scale(low - margin, high + margin, start, stop)


def _grid(across: svg.Scale, up: svg.Scale) -> list[str]:
    parts = []
    for power in range(math.ceil(across.low), math.floor(across.high) + 1):
        x = across(power)
        parts.append(svg.line(x, up.start, x, up.stop, "grid"))
        parts.append(svg.text(x, HEIGHT - BOTTOM + 16, f"{10.0**power:g}", "middle"))
    for power in range(math.ceil(up.low), math.floor(up.high) + 1):
        y = up(power)
        parts.append(svg.line(across.start, y, across.stop, y, "grid"))
        parts.append(svg.text(LEFT - 6, y + 4, f"{10.0**power:g}", "end"))
    parts.append(svg.text(LEFT + 4, TOP + 8, "relative error of all steps together"))
    return parts


def shown(found: Found) -> Found:
    """Print a line of the table."""
    numbers = (found.bytes_per_element, found.first_error, found.all_error)
    print(f"| `{found.recipe}` | " + " | ".join(f"{number:.2g}" for number in numbers) + " |", flush=True)
    return found


def main() -> None:
    """Print the tables; draw on request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workload", default="resnet18")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--pictures", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    specs, recorded = record(options.workload, options.steps)
    print(f"{options.workload}: {recorded[0][0].numel():,} elements, {WORLD} ranks, {options.steps} steps\n")
    raw = {}
    for title, methods in FAMILIES.items():
        print(f"### {title}\n\n{HEADER}")
        family = {
            name: [shown(carry(text, specs, recorded)) for text in texts] for name, texts in methods.items()
        }
        print()
        raw[title] = {name: [asdict(found) for found in curve] for name, curve in family.items()}
        if options.pictures is not None:
            options.pictures.mkdir(parents=True, exist_ok=True)
            drawn = picture(family, f"{title}: error against bytes")
            (options.pictures / f"error-{title}.svg").write_text(drawn + "\n")
    if options.json is not None:
        options.json.write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
