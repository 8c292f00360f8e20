"""`gradwire simulate`: how recipes should scale from two ranks to thousands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwire.cli.planner import (
    All,
    Backward,
    Codec,
    Delay,
    Every,
    HfConfig,
    Inside,
    InsideDelay,
    Json,
    Model,
    Overlap,
    Params,
    PerNode,
    Rate,
    Recipes,
    Shapes,
    Sharded,
    Step,
)
from gradwire.cli.prerequisites import check_extra, check_folder
from gradwire.cli.progress import waiting
from gradwire.quantities import time_s

if TYPE_CHECKING:  # torch takes seconds to load, which help and completion need not wait for
    from gradwire._api.simulate import Simulated, Simulation

MARKS = "o+x*#@%&"
WIDTH, HEIGHT = 64, 13


def simulate(
    rate: Rate,
    step: Step,
    model: Model = None,
    shapes: Shapes = None,
    params: Params = None,
    hf_config: HfConfig = None,
    workers: Annotated[
        str, typer.Option(help="Numbers of ranks: 2..4096 by doubling, or 8,32,128.")
    ] = "2..4096",
    per_node: PerNode = None,
    delay: Delay = "0s",
    inside: Inside = None,
    inside_delay: InsideDelay = "0s",
    backward: Backward = None,
    overlap: Overlap = True,
    every: Every = 1,
    sharded: Sharded = False,
    stragglers: Annotated[float, typer.Option(help="Spread of a rank's computing time, such as 0.1.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the stragglers' times.")] = 0,
    memory: Annotated[float, typer.Option(help="GiB that a rank has on top of what DDP takes.")] = 16.0,
    recipes: Recipes = None,
    everything: All = False,
    codec: Codec = "cached",
    picture: Annotated[Path | None, typer.Option(help="Draw the plot to a file: .svg, .png or .pdf.")] = None,
    json_path: Json = None,
) -> None:
    """Predict efficiency against the number of workers, by recipe. Nothing is run.

    Example: gradwire simulate --model resnet50 --rate 10gbit --delay 20us --step 180ms --stragglers 0.05
    """
    from gradwire._api import simulate as simulations
    from gradwire.cli import cluster_options as options

    if picture is not None:
        check_extra("matplotlib", "a picture")
    with options.named_as_options():
        check_folder(picture, json_path)
        texts = options.texts_of(recipes, simulations.fixed_recipes(), every, sharded=sharded)
        with waiting() as told:
            found = simulations.simulate(
                options.model_of(model, shapes, params, hf_config),
                workers=worlds(workers),
                per_node=per_node or 1,
                step_s=time_s(step),
                backward_s=None if backward is None else time_s(backward),
                candidates=texts,
                codecs={} if sharded else options.codecs_of(codec, texts),
                stragglers=stragglers,
                seed=seed,
                memory_bytes=memory * 2**30,
                overlap=overlap,
                every=every,
                sharded=sharded,
                told=told,
                **options.links(rate, delay, inside, inside_delay),
            )
        shown, more = found, ""
        if recipes is None and every == 1 and not (everything or sharded):
            shown = replace(found, outcomes=tuple(each for each in found.outcomes if each.tried))
            more = f"\n\n{options.hidden(len(texts) - len(shown.curves))}"
        if picture is not None:
            draw(shown, picture)
    text = f"{shown}{more}\n\n{text_plot(shown)}"
    options.show(text, {**found.as_dict(), "codec_source": codec}, json_path)


def worlds(text: str) -> list[int]:
    """`2..4096` by doubling, or numbers separated by commas.

    >>> worlds("4..32"), worlds("8,32,128")
    ([4, 8, 16, 32], [8, 32, 128])
    """
    try:
        first, dots, last = text.partition("..")
        if not dots:
            return [int(number) for number in text.split(",")]
        found = [int(first)]
        while 0 < 2 * found[-1] <= int(last):
            found.append(2 * found[-1])
    except ValueError:
        raise ValueError(f"workers={text!r}: expected 2..4096, or numbers such as 8,32,128") from None
    return found


def drawn(found: Simulation) -> dict[str, list[Simulated]]:
    """Curves to plot, one for each mark: dense, and the most efficient at the end."""
    curves = found.curves
    kept = list(curves)[: len(MARKS)]
    if "dense" in curves and "dense" not in kept:
        kept[-1] = "dense"
    return {recipe: curves[recipe] for recipe in kept}


def text_plot(found: Simulation, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Efficiency from 0 to 100 % against workers, whose axis is by the order of `found.workers`."""
    grid = [[" "] * width for _ in range(height)]
    places = max(1, len(found.workers) - 1)
    marked = list(zip(MARKS, drawn(found).values(), strict=False))
    for mark, outcomes in reversed(marked):  # the most efficient is on top
        for place, each in enumerate(outcomes):
            row = height - 1 - round(min(each.efficiency, 1.0) * (height - 1))
            grid[row][round(place * (width - 1) / places)] = mark
    labels = ["100 %", *[""] * (height - 2), "0 %"]
    lines = [f"{label:>6} |{''.join(row)}".rstrip() for label, row in zip(labels, grid, strict=True)]
    legend = "  ".join(f"{mark} {recipe}" for mark, recipe in zip(MARKS, drawn(found), strict=False))
    return "\n".join([*lines, f"{'':>8}{found.workers[0]} … {found.workers[-1]} workers;  {legend}"])


def draw(found: Simulation, path: Path) -> None:
    """Write a picture; the suffix decides (svg, png, pdf). Raises `ValueError` for an unknown one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    plane = figure.subplots()
    plane.semilogx(
        found.workers, [100 * each for each in found.alone], "k--", label="no communication", base=2
    )
    for recipe, outcomes in drawn(found).items():
        shares = [100 * each.efficiency for each in outcomes]
        plane.semilogx(found.workers, shares, "o-", markersize=3, label=recipe, base=2)
    plane.set(xlabel="workers", ylabel="efficiency, %", title=f"{found.model}, predicted", ylim=(0, 105))
    plane.grid(visible=True, which="major", alpha=0.3)
    plane.legend(fontsize="small")
    figure.savefig(path)
