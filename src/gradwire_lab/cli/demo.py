"""`gradwire demo`: plain DDP and gradwire side by side on a slow link, with a report."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from gradwire.cli.prerequisites import FORMAT, STDOUT, check_extra, check_folder, check_recipe, write_json
from gradwire_lab import emulate
from gradwire_lab.bench.process_set import prepare_workers
from gradwire_lab.cli.choices import Mode
from gradwire_lab.cli.report import write_page
from gradwire_lab.demo.plans import AUTO_RATE, DemoPlan, text_plan
from gradwire_lab.demo.terminal import exit_code, live_progress, show, show_failures


def demo(
    text: Annotated[bool, typer.Option("--text", help="Train a small transformer on Shakespeare.")] = False,
    steps: Annotated[int, typer.Option(help="Steps of each contestant.")] = DemoPlan.steps,
    workers: Annotated[int, typer.Option(help="Number of ranks.")] = DemoPlan.workers,
    rate: Annotated[
        str, typer.Option(help="Link per rank: 100mbit; auto makes it 4.25 times too slow for this machine.")
    ] = DemoPlan.rate,
    delay: Annotated[str, typer.Option(help="One-way delay between ranks: 5ms.")] = DemoPlan.delay,
    seeds: Annotated[
        int, typer.Option(help="Runs of each, for the spread of the final figure.")
    ] = DemoPlan.seeds,
    recipe_text: Annotated[str, typer.Option("--recipe", help="gradwire's recipe.")] = DemoPlan.recipe,
    data: Annotated[Path | None, typer.Option(help="Your own images or text.")] = None,
    budget: Annotated[
        float, typer.Option(help="Seconds. Runs that no longer fit after the main race are shortened.")
    ] = DemoPlan.budget_s,
    quick: Annotated[
        bool, typer.Option("--quick", help="60 steps and one seed, for a quick look. Not a benchmark.")
    ] = False,
    mode: Annotated[Mode, typer.Option(help="Kind of emulation: see gradwire net check.")] = Mode.AUTO,
    report: Annotated[Path, typer.Option(help="HTML report to write.")] = Path("gradwire-demo.html"),
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write all figures as JSON.")] = None,
) -> None:
    """Watch plain DDP crawl and gradwire keep up, training a real model over a slow link."""
    console = Console(stderr=str(json_path) == STDOUT)
    check_extra("jinja2", "the report")
    try:
        check_folder(report, json_path)
        plan = DemoPlan(
            workers=workers,
            steps=steps,
            seeds=seeds,
            rate=rate,
            delay=delay,
            recipe=recipe_text,
            data=None if data is None else str(data),
            budget_s=budget,
        )
        plan = text_plan(plan) if text else plan
        plan = plan.quick() if quick else plan
        check_recipe(recipe_text.partition("(")[0].strip())
        emulate.EmulatedLink(
            None if rate == AUTO_RATE else emulate.parse_rate(rate), emulate.parse_delay(delay)
        )
        entered = emulate.enter(mode.value)
        prepare_workers()
        from gradwire_lab.demo import director  # not before: what runs outside of the sandbox needs no torch

        director.check(plan)
        network = emulate.EmulatedNetwork(workers, emulate.EmulatedLink(), entered)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    try:
        with network, live_progress(console) as live:
            document = director.Director(plan, network, live).run()
    except KeyboardInterrupt:
        console.print("gradwire demo: interrupted; all workers have been ended")
        raise typer.Exit(130) from None
    console.print(show(document))
    show_failures(document, console)
    write_json({"format": FORMAT, **document}, json_path)
    write_page(document, report)
    raise typer.Exit(exit_code(document))
