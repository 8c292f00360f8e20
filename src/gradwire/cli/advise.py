"""`gradwire advise`: what bounds a run as it is, and what would help."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from gradwire.advise.script import Stopped, run
from gradwire.cli.prerequisites import check_folder
from gradwire.cli.progress import waiting
from gradwire.quantities import rate_bit_per_s, time_s

if TYPE_CHECKING:  # torch takes seconds to load, which help and completion need not wait for
    from gradwire.advise.observed import Observed
    from gradwire.planning.costs import CodecCost

TRACES = (".json", ".json.gz")
"""How the names of traces end; any other file is a script."""


class _EndsAtScript(TyperCommand):
    """A command whose options end at the name of a script: all that follows is the script's own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Options may stand after the names of traces, which are no script."""
        ctx.allow_interspersed_args = False
        words, _, _ = self.make_parser(ctx).parse_args(list(args))
        ctx.allow_interspersed_args = any(map(_is_trace, (words.get("files") or ())[:1]))
        return super().parse_args(ctx, args)


def _is_trace(name: str) -> bool:
    return name.lower().endswith(TRACES)


advise = typer.Typer(add_completion=False, rich_markup_mode=None)


@advise.command("advise", cls=_EndsAtScript)
def answer_of(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="TRACES | SCRIPT [ITS ARGUMENTS]",
            help="Traces of one run, *.json or *.json.gz, or a script and its arguments.",
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
    goes on afterwards. What stands after its name is given to it, so options of this command come before.
    Traces are those of torch.profiler, of one or all ranks.

    Example: torchrun --nproc-per-node 2 -m gradwire advise --steps 20 train.py --lr 0.1

    Example: gradwire advise rank0.json.gz rank1.json.gz --rate 10gbit
    """
    from gradwire._api.plan import CANDIDATES
    from gradwire.advise import traces
    from gradwire.cli.cluster_options import codecs_of

    try:
        check_folder(json_path)
        say = partial(
            _say,
            None if rate is None else rate_bit_per_s(rate),
            None if delay is None else time_s(delay),
            codecs_of(codec, CANDIDATES),
            json_path,
        )
        if _is_trace(files[0]):
            for name in files:
                if not _is_trace(name):
                    raise ValueError(f"{name}: it is no trace, whose name ends in {' or '.join(TRACES)}")
            say(traces.read([Path(name) for name in files]))
            return
        if not Path(files[0]).is_file():
            raise ValueError(f"{files[0]}: there is no such script, and traces end in {' or '.join(TRACES)}")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    _watched(files, steps, say, stop=stop)


def _watched(words: list[str], steps: int, say: Callable[[Observed], None], *, stop: bool) -> None:
    from gradwire.advise.watch import DDPWatch  # traces are read without a line of torch.distributed

    def finished(observed: Observed | None) -> None:
        if observed is not None:
            try:
                say(observed)
            except Exception as error:  # which must not end the training that is watched
                print(f"gradwire advise: no advice, by an error of its own: {error!r}", file=sys.stderr)
        if stop:
            raise Stopped(0)

    with DDPWatch(steps, finished) as watch:
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
    from gradwire.advise import answer
    from gradwire.cli.cluster_options import show

    if delay_s is not None:
        observed = replace(observed, latency_s=delay_s)
    with waiting() as told:
        found = answer.advise(observed, rate_bit_per_s=rate, codecs=codecs, told=told)
    show(str(found), found.as_dict(), json_path)
