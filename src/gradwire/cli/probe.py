"""`gradwire probe`: what the links are like, and what codecs cost on this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from gradwire.cli.plot import Axes, Curve, draw, text_plot
from gradwire.cli.prerequisites import FORMAT, STDOUT, check_extra, check_folder, write_json
from gradwire.environment import CONNECTIONS, connections_asked

if TYPE_CHECKING:  # torch takes seconds to load, which help and completion need not wait for
    from gradwire.measure.codec import CodecCurves
    from gradwire.measure.connections import Tried
    from gradwire.measure.probe import Probed

_ALONE = (
    "a link needs ranks: gradwire probe --nproc 2 starts two here. Or start the command on each rank, with\n"
    "torchrun --nproc-per-node 2 --no-python gradwire probe, or\n"
    "gradwire net run --workers 2 --rate 200mbit -- gradwire probe.\n"
    "With --codecs it needs none."
)


def probe(
    verbs: Annotated[
        str | None, typer.Option(help="Collectives to try, separated by commas; by default the usual ones.")
    ] = None,
    budget: Annotated[float, typer.Option(help="Seconds for each verb, or each recipe.")] = 2.0,
    codecs: Annotated[
        str | None, typer.Option(help="Measure codecs instead: recipes, separated by semicolons.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the fit to a file: .svg, .png or .pdf.")] = None,
    nproc: Annotated[int | None, typer.Option(help="Start this many ranks on this machine.", min=1)] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write JSON; - prints nothing else.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare verbs and recipes on the ranks' GPUs with gloo's.")
    ] = False,
) -> None:
    """Fit latency and bandwidth of every collective, on the ranks that torchrun or `gradwire net` started.

    With --check nothing is measured: every verb and recipe runs on the ranks' devices and, over gloo, on the
    CPU. The exit code is 0 if results agree on all ranks, also where there is no GPU to check, and 1 if not.

    Example: gradwire probe --nproc 2

    Example: gradwire net run --workers 4 --rate 200mbit -- gradwire probe
    """
    from gradwire.measure.probe import VERBS

    if picture is not None:
        check_extra("matplotlib", "a picture")
    try:
        if check:
            if nproc is not None:
                _start(nproc, ["--check"])
            raise typer.Exit(_checked())
        check_folder(picture, json_path)
        if codecs is not None:
            if verbs is not None or nproc is not None:
                raise ValueError("--codecs measures codecs, not links: leave --verbs and --nproc out")
            _tell_codecs(_measured(codecs, budget), picture, json_path)
            return
        known = _known(",".join(VERBS) if verbs is None else verbs)
        if nproc is not None:
            words = ["--verbs", ",".join(known), "--budget", str(budget)]
            for option, path in (("--picture", picture), ("--json", json_path)):
                words += [] if path is None else [option, str(path)]
            _start(nproc, words)
        _tell_links(*_probed(known, budget), picture, json_path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _checked() -> int:
    if "RANK" not in os.environ:
        raise typer.BadParameter(_ALONE)
    from gradwire.cli.gpu_check import check

    return check()


def _known(text: str) -> list[str]:
    from gradwire.measure.probe import OWN, VERBS

    names = [name.strip() for name in text.split(",")]
    known = (*VERBS, *OWN)
    if any(name not in known for name in names):
        raise ValueError(f"verbs={text!r}: choose from {', '.join(known)}")
    return [name for name in known if name in names]


def _start(nproc: int, words: list[str]) -> NoReturn:
    """Become torchrun, which starts this command with `words` on every rank."""
    if "RANK" in os.environ:
        raise ValueError("--nproc: this process is already a rank")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(nproc)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # or torchrun says that it sets it
    os.execv(sys.executable, [sys.executable, *launcher, "-m", "gradwire", "probe", *words])


def _probed(verbs: list[str], budget_s: float) -> tuple[tuple[Probed, ...], Tried | None, int, int]:
    """The fits, over how many connections, this rank's number and the world."""
    import torch
    import torch.distributed as dist

    from gradwire._api.connections import connect_more
    from gradwire.agreement.agree import require_agreement
    from gradwire.comm import ProcessGroupComm
    from gradwire.measure.probe import probe as probe_links

    if "RANK" not in os.environ:
        raise ValueError(_ALONE)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        assert dist.group.WORLD is not None
        comm = ProcessGroupComm(dist.group.WORLD)
        require_agreement({CONNECTIONS: str(connections_asked())}, comm)
        found = connect_more(comm, comm)
        return probe_links(comm, verbs, budget_s=budget_s), found, comm.rank, comm.world
    finally:
        dist.destroy_process_group()


def _tell_links(
    probed: tuple[Probed, ...],
    tried: Tried | None,
    rank: int,
    world: int,
    picture: Path | None,
    json_path: Path | None,
) -> None:
    """Print and write the fits on rank 0; they are the same on all ranks."""
    if rank != 0:
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for heading in ("collective", "latency", "bandwidth", "off by", "at worst", "sizes"):
        table.add_column(heading, justify="left" if heading == "collective" else "right")
    for each in probed:
        table.add_row(each.verb, _micro(each.link.alpha_s), _rate(each.link.beta_s), *_quality(each))
    console = Console(highlight=False, soft_wrap=True, quiet=str(json_path) == STDOUT)
    console.print(f"{world} ranks; latency is that of one hop")
    console.print(table)
    if tried is not None:
        console.print(str(tried))
    curves = [Curve(each.verb, each.fit) for each in probed]
    axes = Axes("bytes one after the other", "ms")
    console.print(text_plot(curves, axes), markup=False)
    found = {each.verb: _as_dict(each) for each in probed}
    title = f"collectives on {world} ranks"
    document = {"world": world, "verbs": found, "connections": None if tried is None else asdict(tried)}
    _write(curves, axes, title, document, picture, json_path)


def _quality(each: Probed) -> tuple[str, str, str]:
    worst = max(abs(deviation) for deviation in each.fit.deviations)
    return f"{each.fit.residual:.1%}", f"{worst:.1%}", str(len(each.fit.points))


def _as_dict(each: Probed) -> dict[str, Any]:
    return {
        "alpha_s": each.link.alpha_s,
        "beta_s_per_byte": each.link.beta_s,
        "residual": each.fit.residual,
        "deviations": each.fit.deviations,
        "points": each.fit.points,
    }


def _micro(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs"


def _rate(beta_s: float) -> str:
    return f"{8e-6 / beta_s:.1f} Mbit/s" if beta_s > 0.0 else "beyond measure"


def _measured(texts: str, budget_s: float) -> dict[str, CodecCurves]:
    import torch

    from gradwire.measure.codec import measure_codec
    from gradwire.recipes import recipe

    chosen = [recipe(text) for text in texts.split(";")]
    torch.set_num_threads(1)
    found = {}
    for each in chosen:
        built = each.build()
        if built.next is not None:
            raise ValueError(f"{each} decides only after measuring: name recipes that it may choose")
        found[str(each)] = measure_codec(built.exchange, budget_s=budget_s)
    return found


def _tell_codecs(found: dict[str, CodecCurves], picture: Path | None, json_path: Path | None) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("recipe")
    for heading in ("encode B", "γ per element", "off by", "decode B", "γ per element", "off by"):
        table.add_column(heading, justify="right")
    for name, curves in found.items():
        cells = []
        for fit in (curves.encode, curves.decode):
            cells += [f"{fit.line.base_s * 1e6:.1f} µs", f"{fit.line.slope_s * 1e9:.2f} ns"]
            cells.append(f"{fit.residual:.0%}")
        table.add_row(name, *cells)
    console = Console(highlight=False, soft_wrap=True, quiet=str(json_path) == STDOUT)
    console.print("seconds of a unit of x elements: B + γ·x; decoding is that of one rank's payload")
    console.print(table)
    curves_of = [
        Curve(f"{name}, {what}", fit)
        for name, curves in found.items()
        for what, fit in (("encode", curves.encode), ("decode", curves.decode))
    ]
    axes = Axes("elements", "ms")
    console.print(text_plot(curves_of, axes), markup=False)
    document = {
        name: {
            what: {"base_s": fit.line.base_s, "slope_s": fit.line.slope_s, "points": fit.points}
            for what, fit in (("encode", curves.encode), ("decode", curves.decode))
        }
        for name, curves in found.items()
    }
    _write(curves_of, axes, "codecs on one core", {"codecs": document}, picture, json_path)


def _write(
    curves: list[Curve],
    axes: Axes,
    title: str,
    document: dict[str, Any],
    picture: Path | None,
    json_path: Path | None,
) -> None:
    if picture is not None:
        draw(curves, axes, title, picture)
    write_json({"format": FORMAT, **document}, json_path)
