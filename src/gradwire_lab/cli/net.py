"""`gradwire net`: run a command on an emulated network, or say which kinds are possible here."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire.cli.prerequisites import FORMAT, check_folder, write_json
from gradwire_lab import emulate
from gradwire_lab.cli.choices import Mode
from gradwire_lab.emulate.network import RunOutcome, run_on_all

net = typer.Typer(
    help="A slow network on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@net.command("check")
def check() -> None:
    """Say which modes are possible on this machine, and why the others are not."""
    for mode, verdict in modes().items():
        print(f"{mode:8}{verdict}")


def modes() -> dict[str, str]:
    """Whether each mode is possible on this machine, in words, best first."""
    reasons = {mode: emulate.why_not(mode) for mode in emulate.MODES}
    best = next(mode for mode, reason in reasons.items() if reason is None)
    verdicts = {
        mode: "possible" if reason is None else f"not possible: {reason}" for mode, reason in reasons.items()
    }
    return verdicts | {best: f"{verdicts[best]} (used by --mode auto)"}


@net.command("run", context_settings={"ignore_unknown_options": True})
def run(
    command: Annotated[list[str], typer.Argument(help="Command to run on every rank, after --.")],
    workers: Annotated[int, typer.Option(help="Number of ranks.")] = 2,
    nodes: Annotated[
        int | None, typer.Option(help="Nodes that the ranks share; --rate is then a node's.")
    ] = None,
    rate: Annotated[
        str, typer.Option(help="Link per rank and direction: 200mbit, 1gbit, unlimited.")
    ] = "unlimited",
    delay: Annotated[str, typer.Option(help="One-way delay between ranks: 5ms.")] = "0",
    mode: Annotated[
        Mode, typer.Option(help="How the network is emulated; see gradwire net check.")
    ] = Mode.AUTO,
    grace: Annotated[
        float, typer.Option(help="Seconds that other ranks get to end after one has failed.")
    ] = 5.0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the results to this file, as JSON.")
    ] = None,
) -> None:
    """Run a command on every rank of an emulated network, with torchrun's environment.

    Example: gradwire net run --workers 4 --rate 200mbit --delay 5ms -- python train.py
    """
    try:
        check_folder(json_path)
        link = emulate.EmulatedLink(emulate.parse_rate(rate), emulate.parse_delay(delay))
        entered = emulate.enter(mode.value)
        network = emulate.EmulatedNetwork(workers, link, entered, nodes)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(str(error)) from None
    try:
        with network:
            before = network.counters()
            outcome = run_on_all(network, command, grace)
            account = _account(network, outcome, before, network.counters())
    except KeyboardInterrupt:
        print("gradwire net: interrupted; all ranks have been ended", file=sys.stderr)
        raise typer.Exit(130) from None
    except (OSError, ValueError) as error:
        unknown = isinstance(error, FileNotFoundError) and error.filename == command[0]
        print(f"gradwire net: {f'command not found: {command[0]}' if unknown else error}", file=sys.stderr)
        raise typer.Exit(127) from None
    _tell(account, outcome)
    write_json({"format": FORMAT, **account}, json_path)
    raise typer.Exit(outcome.exit_code)


def _account(
    network: emulate.EmulatedNetwork,
    outcome: RunOutcome,
    before: list[emulate.Counters] | None,
    after: list[emulate.Counters] | None,
) -> dict[str, Any]:
    ranks: list[dict[str, Any]] = [
        {"rank": rank, "exit_code": code} for rank, code in enumerate(outcome.exit_codes)
    ]
    links = ranks if network.per_node == 1 else [{"node": node} for node in range(network.nodes)]
    for row, first, last in zip(links, before or [], after or [], strict=False):
        moved = last - first
        row["before"] = {"rx_bytes": first.rx_bytes, "tx_bytes": first.tx_bytes}
        row["after"] = {"rx_bytes": last.rx_bytes, "tx_bytes": last.tx_bytes}
        row["rx_bytes"], row["tx_bytes"] = moved.rx_bytes, moved.tx_bytes
    return {
        "mode": network.mode,
        "workers": network.workers,
        "nodes": network.nodes,
        "rate_bit_per_s": network.link.rate_bit_per_s,
        "delay_s": network.link.delay_s,
        "seconds_s": outcome.seconds_s,
        "failed_rank": outcome.failed_rank,
        "exit_code": outcome.exit_code,
        "ranks": ranks,
        "links": links,
    }


def _tell(account: dict[str, Any], outcome: RunOutcome) -> None:
    """Print the account to stderr, so that the command's own output stays clean."""
    seconds = account["seconds_s"]
    print(
        f"gradwire net: {account['workers']} ranks, mode {account['mode']}, {seconds:.2f} s", file=sys.stderr
    )
    for row in account["links"]:
        if "before" in row:
            told = [
                f"{verb} {row[key]:,} bytes ({row['before'][key]:,} → {row['after'][key]:,})"
                for verb, key in (("received", "rx_bytes"), ("sent", "tx_bytes"))
            ]
            whose = f"rank {row['rank']}" if "rank" in row else f"node {row['node']}"
            print(f"  {whose}: {', '.join(told)}", file=sys.stderr)
    if outcome.failed_rank is not None:
        print(
            f"gradwire net: rank {outcome.failed_rank} failed with exit code {outcome.exit_code}; "
            "the others have been ended",
            file=sys.stderr,
        )
