"""`gradwire bench`: recipes beside torch's own hooks on an emulated network."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from gradwire.cli.prerequisites import FORMAT, STDOUT, check_extra, check_folder, check_recipe, write_json
from gradwire_lab import emulate
from gradwire_lab.bench.process_set import prepare_workers
from gradwire_lab.bench.settings import NetworkSetting, Repetitions, Settings, TrainingTask, parse_entries
from gradwire_lab.bench.table import exit_code, failures, tables
from gradwire_lab.cli.choices import Mode, Shards
from gradwire_lab.cli.report import write_page
from gradwire_lab.workloads.spec import read

Workload = Annotated[
    str | None, typer.Option(help="resnet18, which is the default, convnet, chargpt, emulated(gpt2), …")
]
Model = Annotated[
    str | None, typer.Option(help="Your own: package.module:make, which returns model, batches, loss.")
]
RECIPES, PEERS = "dense;fp16;covap", "ddp;fp16_hook;powersgd_hook(bucket_cap_mb=100)"
OF_FSDP, PEERS_OF_FSDP = "dense;int8+int8;int4+int8", "fsdp2;fsdp2(param_dtype=bfloat16)"
"""Of recipes and peers by default, with --sharded."""


def bench(
    workload: Workload = None,
    model: Model = None,
    sharded: Annotated[
        bool, typer.Option(help="Compare FSDP2's own gathers and scatters: recipes are like int4+int8.")
    ] = False,
    recipes: Annotated[
        str | None,
        typer.Option(help=f"Recipes, semicolons between them: {RECIPES}, or with --sharded {OF_FSDP}."),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(help=f"Peers, also bf16_hook: {PEERS}, or with --sharded {PEERS_OF_FSDP}."),
    ] = None,
    workers: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
    nodes: Annotated[int | None, typer.Option(help="Nodes of ranks; --rate is then a node's.")] = None,
    rate: Annotated[str, typer.Option(help="Per rank and direction: 200mbit, 1gbit, unlimited.")] = "200mbit",
    delay: Annotated[str, typer.Option(help="One-way delay between ranks: 5ms.")] = "0",
    steps: Annotated[int, typer.Option(help="Steps per setting and round.")] = 5,
    rounds: Annotated[int, typer.Option(help="Rounds; settings alternate within each.")] = 7,
    warmup: Annotated[
        int | None, typer.Option(help="First steps that do not count; by default 25, and until auto settles.")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="End a setting after this many seconds without a step.")
    ] = 60.0,
    overlap: Annotated[
        bool, typer.Option(help="Off: recipes exchange after backward, which shows what overlap gains.")
    ] = True,
    data: Annotated[Path | None, typer.Option(help="Your own images or text.")] = None,
    shards: Annotated[Shards, typer.Option(help="How samples are split; skewed: by class.")] = Shards.IID,
    batch_size: Annotated[int | None, typer.Option(help="Samples per rank and step.")] = None,
    bucket_cap_mb: Annotated[
        float | None, typer.Option(help="DDP's bucket size in all settings; DDP's own default is 25.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="For recipes: none, by_size(smallest=256), or pattern=recipe; pattern=recipe."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of models, batches and random choices.")] = 0,
    mode: Annotated[Mode, typer.Option(help="Kind of emulation: see gradwire net check.")] = Mode.AUTO,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page to this file.")] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the results as JSON.")] = None,
) -> None:
    """Compare recipes with torch's own hooks, and with the same step without communication.

    With --sharded the model is under FSDP2, and recipes and peers carry what FSDP2 itself sends.

    Example: gradwire bench --sharded --workload chargpt --workers 4 --recipes "int8+int8;int4+int8"
    """
    console = Console(stderr=True)
    try:
        _check_outputs(json_path, report)
        job = _checked(workload, model), _text(data), shards.value, batch_size, seed, overlap, bucket_cap_mb
        task = TrainingTask(*job, policy=policy, sharded=sharded)
        schedule = Repetitions(steps, rounds, warmup, timeout)
        if peers is None:
            peers = PEERS_OF_FSDP if sharded else PEERS
        if recipes is None:
            recipes = OF_FSDP if sharded else RECIPES
        entries = (*parse_entries(peers, "peer"), *parse_entries(recipes, "recipe"))
        for entry in entries:
            if entry.kind == "recipe" and model is None:  # whose file may register recipes
                check_recipe(entry.stem)
        link = emulate.EmulatedLink(emulate.parse_rate(rate), emulate.parse_delay(delay))
        entered = emulate.enter(mode.value)
        settings = Settings(task, schedule, NetworkSetting(workers, rate, delay, entered, nodes), entries)
        prepare_workers()
        from gradwire_lab.bench import runner  # not before: what runs outside of the sandbox needs no torch

        runner.check(settings)
        network = emulate.EmulatedNetwork(workers, link, entered, nodes)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    document = _measured(settings, network, console)
    _show(document, json_path, report, console)
    raise typer.Exit(exit_code(document))


def _checked(workload: str | None, model: str | None) -> str:
    """The workload's name. Raises `ValueError` for a name that there is not, without importing torch."""
    if model is None:
        named = workload or "resnet18"
        read(named)
        return named
    if workload is not None:
        raise ValueError("say either --workload or --model")
    if ":" not in model:
        raise ValueError(f"model={model!r}: expected package.module:make, or --workload 'emulated({model})'")
    return model


def _measured(settings: Settings, network: emulate.EmulatedNetwork, console: Console) -> dict[str, Any]:
    from gradwire_lab.bench import runner

    try:
        with network, console.status("starting") as status:
            return runner.run(settings, network, status.update)
    except KeyboardInterrupt:
        console.print("gradwire bench: interrupted; all workers have been ended")
        raise typer.Exit(130) from None
    except runner.TooLarge as error:
        console.print(f"gradwire bench: {error}")
        raise typer.Exit(2) from None


def _check_outputs(json_path: Path | None, report: Path | None) -> None:
    check_folder(json_path, report)
    if report is not None:
        check_extra("jinja2", "the report")


def _show(document: dict[str, Any], json_path: Path | None, report: Path | None, console: Console) -> None:
    if str(json_path) != STDOUT:
        Console().print(tables(document))
    for text in failures(document):
        console.print(text, style="red", markup=False)
    document = {"format": FORMAT, **document}
    write_json(document, json_path)
    if report is not None:
        write_page(document, report)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
