"""`gradwire plan`: which recipe should be worth using on a cluster, before anything runs there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gradwire.cli.completion import model_names
from gradwire.cli.prerequisites import check_folder
from gradwire.cli.progress import waiting
from gradwire.quantities import rate_bit_per_s, time_s

if TYPE_CHECKING:  # torch takes seconds to load, which help and completion need not wait for
    from gradwire._api.plan_store import StorePlan

Model = Annotated[
    str | None,
    typer.Option(
        help="A published network, such as resnet50, or package.module:function.", autocompletion=model_names
    ),
]
Shapes = Annotated[Path | None, typer.Option(help="Instead of --model: a JSON file of parameter shapes.")]
Params = Annotated[
    str | None,
    typer.Option(help="Instead of --model: a transformer of about so many parameters, 350M or 7B."),
]
HfConfig = Annotated[
    Path | None,
    typer.Option(help="Instead of --model: the config.json of a language model, by Hugging Face."),
]
Rate = Annotated[str, typer.Option(help="Rate of a rank's link, or with nodes of a node's: 1gbit.")]
Delay = Annotated[str, typer.Option(help="One-way delay between ranks, or nodes: 1ms.")]
PerNode = Annotated[int | None, typer.Option(help="Ranks on each node.")]
Inside = Annotated[str | None, typer.Option(help="Rate of a rank's link inside its node.")]
InsideDelay = Annotated[str, typer.Option(help="One-way delay inside a node.")]
Step = Annotated[str, typer.Option(help="Time of a step on one rank without communication: 180ms.")]
Backward = Annotated[
    str | None, typer.Option(help="Time of the backward pass; by default two thirds of --step.")
]
Overlap = Annotated[bool, typer.Option(help="Whether gradients travel during the backward pass.")]
Every = Annotated[int, typer.Option(help="Local steps from one exchange to the next, as in DiLoCo.")]
Sharded = Annotated[
    bool, typer.Option(help="Compress FSDP2's own gathers and scatters: recipes are like int4+int8.")
]
Store = Annotated[
    bool,
    typer.Option(
        help="Rounds of local steps over an object store, between sites: --workers of them, and after 30 "
        "steps without --every."
    ),
]
Prices_ = Annotated[
    str | None,
    typer.Option(
        "--prices",
        help="With --store: price of a GB read, of 1000 writes or lists, of 1000 reads: 0.09,0.005,0.0004.",
    ),
]
Recipes = Annotated[
    str | None, typer.Option(help="Recipes instead of the usual ones, separated by semicolons.")
]
All = Annotated[
    bool, typer.Option("--all", help="Also show recipes that auto does not try by default: more is late.")
]
Codec = Annotated[
    str, typer.Option(help="Codec costs: cached or measured on this machine, free, or probe's JSON file.")
]
Gpu = Annotated[bool, typer.Option("--gpu", help="Ranks compute on GPUs: larger units, and FSDP2 over NCCL.")]
Json = Annotated[Path | None, typer.Option("--json", help="Also write JSON; - prints nothing else.")]


OVER_A_STORE = {
    *("rate", "delay", "step", "model", "shapes", "params", "hf_config", "workers", "every", "store"),
    *("prices", "recipes", "json_path"),
}
"""Arguments of `plan` that say something about rounds over a store."""


def plan(
    context: typer.Context,
    rate: Rate,
    step: Step,
    model: Model = None,
    shapes: Shapes = None,
    params: Params = None,
    hf_config: HfConfig = None,
    workers: Annotated[int | None, typer.Option(help="Number of ranks.")] = None,
    nodes: Annotated[int | None, typer.Option(help="Number of nodes.")] = None,
    per_node: PerNode = None,
    delay: Delay = "0s",
    inside: Inside = None,
    inside_delay: InsideDelay = "0s",
    backward: Backward = None,
    overlap: Overlap = True,
    target: Annotated[float, typer.Option(help="Share of linear that auto aims at.")] = 0.95,
    every: Every = 1,
    sharded: Sharded = False,
    store: Store = False,
    prices: Prices_ = None,
    recipes: Recipes = None,
    everything: All = False,
    codec: Codec = "cached",
    gpu: Gpu = False,
    json_path: Json = None,
) -> None:
    """Predict what recipes would gain on a cluster, and whether any is worth using. Nothing is run.

    Example: gradwire plan --model resnet50 --rate 1gbit --delay 1ms --workers 32 --step 180ms
    """
    from gradwire._api import plan as plans
    from gradwire.cli import cluster_options as options

    if prices is not None and not store:
        raise typer.BadParameter("--prices is for --store")
    with options.named_as_options():
        check_folder(json_path)
        of = options.model_of(model, shapes, params, hf_config)
        if store:
            rounds = _over_a_store(of, _given(context), workers, rate, delay, step, every, prices, recipes)
            options.show(str(rounds), rounds.as_dict(), json_path)
            return
        texts = options.texts_of(recipes, plans.CANDIDATES, every, sharded=sharded)
        ranks, per_node = options.places(workers, nodes, per_node)
        with waiting() as told:
            found = plans.plan(
                of,
                workers=ranks,
                per_node=per_node,
                step_s=time_s(step),
                backward_s=None if backward is None else time_s(backward),
                overlap=overlap,
                target=target,
                every=every,
                sharded=sharded,
                candidates=texts,
                codecs={} if sharded else options.codecs_of(codec, texts),
                gpu=gpu,
                told=told,
                **options.links(rate, delay, inside, inside_delay),
            )
    text = str(found)
    if recipes is None and every == 1 and not (everything or sharded):
        tried = tuple(each for each in found.candidates if each.tried)
        left_out = len(texts) - len({row.recipe for row in tried})
        text = f"{replace(found, candidates=tried)}\n\n{options.hidden(left_out)}"
    options.show(text, {**found.as_dict(), "codec_source": codec}, json_path)


def _given(context: typer.Context) -> dict[str, str]:
    """Arguments that the command line names, with the options as they are written."""
    return {
        str(each.name): each.opts[0]
        for each in context.command.params
        if getattr(context.get_parameter_source(str(each.name)), "name", "") == "COMMANDLINE"
    }


def _over_a_store(
    model: Any,
    given: dict[str, str],
    sites: int | None,
    rate: str,
    delay: str,
    step: str,
    every: int,
    prices: str | None,
    recipes: str | None,
) -> StorePlan:
    from gradwire._api.plan_store import CANDIDATES, Prices, plan_store
    from gradwire.cli.cluster_options import texts_of

    if strange := [said for name, said in given.items() if name not in OVER_A_STORE]:
        raise ValueError(f"{', '.join(strange)}: not for --store, whose plan does not go by that")
    if sites is None:
        raise ValueError("sites: say --workers, the number of sites")
    try:
        stated = None if prices is None else Prices(*map(float, prices.split(",")))
    except (TypeError, ValueError):
        raise ValueError(
            f"--prices {prices!r} are not three numbers of at least 0, such as 0.09,0.005,0.0004"
        ) from None
    return plan_store(
        model,
        sites=sites,
        rate_bit_per_s=rate_bit_per_s(rate),
        delay_s=time_s(delay),
        step_s=time_s(step),
        candidates=texts_of(recipes, CANDIDATES),
        prices=stated,
        **({"every": every} if "every" in given else {}),
    )
