"""What two pages predict of GPUs is what `gradwire.plan` says of the numbers that they state."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

import gradwire
from gradwire.planning.costs import CodecCost, Line
from gradwire.planning.shapes import load

pytestmark = pytest.mark.rest

DOCS = Path(__file__).parents[3] / "docs"
ONE, SEVERAL = DOCS / "engineering/devices.md", DOCS / "gpus.md"
"""The pages with the tables of machines with one GPU, and with eight."""
MODELS = {"gpt2": "124 M", "gpt2-xl": "1.6 B", "llama-7b": "6.7 B"}
RATES = (1, 10, 25, 100)
"""Gbit/s of each rank's link."""
TOKENS, FLOPS = 65_536, 100e12
"""Of a rank in a step, and in a second: six operations for each parameter and token."""
BUS_BYTES_PER_S = 25e9
"""Assumed."""
ON_HOST = {"int8": (3.2e-9, 1.0e-9), "topk(ratio=0.01)": (2.4e-9, 0.1e-9)}
"""Seconds for an element on one core: compensate, encode and add up a shard; and decode the payload of one
rank."""
ON_DEVICE = {"int8": (23 / 3e12, 5 / 3e12), "topk(ratio=0.01)": (17 / 3e12, 0.3 / 3e12)}
"""The same on the GPU: bytes of memory traffic, at 70 % of 4.3 TB/s. Assumed, like the next."""
LAUNCHES_S = 150e-6
"""Assumed: of a unit."""


def costs(seconds: Mapping[str, tuple[float, float]], base_s: float, copied_s: float) -> dict[str, CodecCost]:
    """For `plan`; what is copied out and back counts as encoding."""
    return {
        text: CodecCost(Line(base_s, encode + copied_s), Line(0.0, decode))
        for text, (encode, decode) in seconds.items()
    }


def line(model: str, rate_gbit_per_s: int) -> str:
    """One line of the table: the step alone, and what share of its speed is left."""
    step_s = 6 * load(model).parameters * TOKENS / FLOPS
    shares = []
    host_costs, device_costs = costs(ON_HOST, 0.0, 2 * 4 / BUS_BYTES_PER_S), costs(ON_DEVICE, LAUNCHES_S, 0.0)
    for known, gpu in ((host_costs, False), (device_costs, True)):
        plan = gradwire.plan(
            model, workers=8, rate_bit_per_s=rate_gbit_per_s * 1e9, delay_s=20e-6, step_s=step_s,
            candidates=["dense", *known], codecs=known, gpu=gpu,
        )  # fmt: skip
        shares.append({each.recipe: f"{each.share_of_linear:.0%}" for each in plan.candidates})
    host, device = shares
    cells = [host["dense"], *(side[text] for text in ON_HOST for side in (host, device))]
    about = f"| {MODELS[model]}, {step_s:.2g} s | {rate_gbit_per_s} Gbit/s |"
    return f"{about} {' | '.join(cells)} |"


SHARED = {"gpt2": "124 M", "gpt2-xl": "1.6 B"}
COLUMNS = (("dense", False), ("bf16", False), ("int8", False), ("int8", True), ("topk(ratio=0.01)", True))
INSIDE_BIT_PER_S = 1.6e12
"""Of a GPU's link to the others of its machine. Assumed."""


def shared_lines(model: str, rate_gbit_per_s: int) -> list[str]:
    """A line of the table of machines with eight GPUs, and the bytes over a machine's link per parameter."""
    step_s = 6 * load(model).parameters * TOKENS / FLOPS
    known = costs(ON_DEVICE, LAUNCHES_S, 0.0)
    plan = gradwire.plan(
        model, workers=64, per_node=8, inside_bit_per_s=INSIDE_BIT_PER_S, inside_delay_s=20e-6,
        rate_bit_per_s=rate_gbit_per_s * 1e9, delay_s=20e-6, step_s=step_s,
        candidates=["dense", "bf16", *known], codecs=known, gpu=True,
    )  # fmt: skip
    found = {(each.recipe, each.two_levels): each for each in plan.candidates}
    shares = " | ".join(f"{found[column].share_of_linear:.0%}" for column in COLUMNS)
    sent = " | ".join(f"{found[column].node_bytes / plan.parameters:.1f}" for column in COLUMNS)
    return [
        f"| 8 machines of 8, {SHARED[model]} | {rate_gbit_per_s} Gbit/s | {shares} |",
        f"| bytes over a machine's link, per parameter | | {sent} |",
    ]


ROUNDS = {"diloco": "dense", "int8": "int8", "int4": "int4", "sparseloco": "sparseloco"}


def rounds(model: str, rate_bit_per_s: float) -> list[str]:
    """The cells of a line of the table of local steps."""
    plan = gradwire.plan(
        model, workers=8, rate_bit_per_s=rate_bit_per_s, delay_s=20e-6, every=30,
        step_s=6 * load(model).parameters * TOKENS / FLOPS, candidates=list(ROUNDS.values()),
    )  # fmt: skip
    shares = {each.recipe.partition("(")[0]: each.share_of_linear for each in plan.candidates}
    return [f"{shares[recipe]:.0%}" for recipe in ROUNDS.values()]


FEW = os.environ.get("GRADWIRE_LAWS") != "full"


@pytest.mark.parametrize("model", ["gpt2"] if FEW else list(MODELS))
def test_the_table_is_what_is_predicted(model: str) -> None:
    lines = ONE.read_text(encoding="utf-8").splitlines()
    written = [each for each in lines if re.match(r".* s \| \d+ Gbit/s \|", each)]
    assert len(written) == len(MODELS) * len(RATES)
    of_model = [each for each in written if each.startswith(f"| {MODELS[model]}, ")]
    assert of_model == [line(model, rate) for rate in RATES]


@pytest.mark.parametrize("model", ["gpt2"] if FEW else list(SHARED))
def test_the_table_of_machines_with_eight_is_what_is_predicted(model: str) -> None:
    written = SEVERAL.read_text(encoding="utf-8").splitlines()
    of_model = [each for each in written if each.startswith(f"| 8 machines of 8, {SHARED[model]}")]
    expected = [shared_lines(model, rate) for rate in RATES]
    assert of_model == [line for line, _sent in expected]
    assert {sent for _line, sent in expected} <= set(written)


@pytest.mark.parametrize("model", ["gpt2"] if FEW else list(SHARED))
def test_the_table_of_rounds_is_what_is_predicted(model: str) -> None:
    written = SEVERAL.read_text(encoding="utf-8").splitlines()
    head = written.index(f"| link | {' | '.join(f'`{each}`' for each in ROUNDS)} |")
    assert written[head + 2 : head + 4] == [
        f"| {link} | {' | '.join(rounds(model, rate))} |"
        for link, rate in (("100 Mbit/s", 1e8), ("1 Gbit/s", 1e9))
    ]
