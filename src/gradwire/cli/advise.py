"""`gradwire advise`: what bounds a run as it is, and what would help."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from gradwire._api.plan import CANDIDATES
from gradwire.advise import answer, traces
from gradwire.advise.observed import Observed
from gradwire.advise.script import Stopped, run
from gradwire.cli.cluster_options import codecs_of, show
from gradwire.cli.prerequisites import check_folder
from gradwire.cli.progress import waiting
from gradwire.planning.costs import CodecCost
from gradwire.quantities import rate_bit_per_s, time_s

TRACES = (".json", ".json.gz")
"""How the names of traces end; any other file is a script."""


def advise(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACES | SCRIPT [-- ITS ARGUMENTS]",  # shown with the refusal of an unknown option
            help="Traces of one run, *.json or *.json.gz, or a script, then -- and its arguments.",
        ),
    ],
    steps: Annotated[int, typer.Option(help="Of a script: steps that are watched.", min=5)] = 20,
    stop: Annotated[bool, typer.Option("--stop", help="End the script when they have been watched.")] = False,
    rate: Annotated[str | None, typer.Option(help="Rate that the link should have: 10gbit.")] = None,
    delay: Annotated[
        str | None, typer.Option(help="One-way delay between ranks, which a trace seldom tells: 0.2ms.")
    ] = None,
    codec: Annotated[
        str,
        typer.Option(help="Codec costs: cached or measured on this machine, free, or probe's JSON file."),
    ] = "cached",
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Also write JSON; - prints nothing else.")
    ] = None,
) -> None:
    """Say what bounds the steps of a run as it is, what would help, by how much, and the line to write.

    A script is run unchanged, and its ranks are watched for some steps after ten in which they warm up. It
    goes on afterwards. Traces are those of torch.profiler, of one or all ranks.

    Example: torchrun --nproc-per-node 2 -m gradwire advise train.py --steps 20 -- --lr 0.1

    Example: gradwire advise rank0.json.gz rank1.json.gz --rate 10gbit
    """
    try:
        check_folder(json_path)
        say = partial(
            _say,
            None if rate is None else rate_bit_per_s(rate),
            None if delay is None else time_s(delay),
            codecs_of(codec, CANDIDATES),
            json_path,
        )
        recorded = [name for name in files if name.lower().endswith(TRACES)]
        if recorded == files:
            say(traces.read([Path(name) for name in files]))
            return
        if files[0] in recorded:
            other = next(name for name in files if name not in recorded)
            raise ValueError(f"{other}: it is no trace, whose name ends in {' or '.join(TRACES)}")
        if not Path(files[0]).is_file():
            raise ValueError(f"{files[0]}: there is no such script, and traces end in {' or '.join(TRACES)}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _watched(files, steps, say, stop=stop)


def _watched(words: list[str], steps: int, say: Callable[[Observed], None], *, stop: bool) -> None:
    from gradwire.advise.watch import Watch  # traces are read without a line of torch.distributed

    def finished(observed: Observed | None) -> None:
        if observed is not None:
            try:
                say(observed)
            except Exception as error:  # which must not end the training that is watched
                print(f"gradwire advise: no advice, by an error of its own: {error!r}", file=sys.stderr)
        if stop:
            raise Stopped(0)

    with Watch(steps, finished) as watch:
        code = run(Path(words[0]), words[1:])
        if code in (None, 0):
            watch.conclude()
    if not watch.is_over and os.environ.get("RANK", "0") == "0":
        why = watch.seen or "the script ended by an error before its steps had been watched"
        print(f"gradwire advise: {why}", file=sys.stderr)
    raise SystemExit(code)


def _say(
    rate: float | None,
    delay_s: float | None,
    codecs: dict[str, CodecCost],
    json_path: Path | None,
    observed: Observed,
) -> None:
    if delay_s is not None:
        observed = replace(observed, latency_s=delay_s)
    with waiting() as told:
        found = answer.advise(observed, rate_bit_per_s=rate, codecs=codecs, told=told)
    show(str(found), found.as_dict(), json_path)
