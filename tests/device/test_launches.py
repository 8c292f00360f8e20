"""How many launches, operators, copies and waits a unit takes on a device, by recipe.

`TRITON_INTERPRET=1 python -m tests.device.test_launches` writes the table, in both places. A line of it
changes together with the behaviour, in a commit that says why.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.tiers import rest
from tests.support.where import WHERE

pytest.importorskip("triton", reason="kernels for devices need Triton")

from tests.support.counted import SIDE, Count, count, count_unit

pytestmark = pytest.mark.skipif(WHERE.type != "cpu", reason="kernels are counted where they are interpreted")

TABLE = Path(__file__).with_name("launches.md")
PAGE = Path(__file__).parents[2] / "docs" / "engineering" / "devices.md"
HEAD = (
    "| recipe, gradients | kernels | operators | copies | waits | collectives "
    "| kernels, once | operators, once | copies, once | waits, once |",
    "|---|---|---|---|---|---|---|---|---|---|",
)
SHORT = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
TYPED = ("int8", "int4", "fp8")
"""Recipes that are counted with gradients of all types."""
OTHERS = (
    "dense",
    "fp16",
    "bf16",
    "topk(ratio=0.01)",
    "leader_topk(ratio=0.01)",
    "scalecom(rate=100, warmup_steps=0)",
    "powersgd(warmup_steps=0)",
    "covap(interval=2)",
    "efsignsgd",
    "qsgd",
)
ROWS = {
    f"`{recipe}`, {SHORT[dtype]}": (recipe, dtype)
    for recipe, types in (
        *((each, tuple(SHORT)) for each in TYPED),
        *((each, (torch.float32,)) for each in OTHERS),
    )
    for dtype in types
}


def line(row: str) -> str:
    """A line of the table: what each unit takes, then what a step takes once."""
    found: Count = count(*ROWS[row])
    unit = [found.unit[kind] for kind in ("launch", "operator", "copy", "wait", "collective")]
    step = [found.step[kind] for kind in ("launch", "operator", "copy", "wait")]
    return f"| {row} | {' | '.join(map(str, (*unit, *step)))} |"


@pytest.mark.parametrize("row", rest(ROWS, but=("`int8`, float32", "`dense`, float32")))
def test_a_unit_takes_what_the_table_says(row: str) -> None:
    assert line(row) in TABLE.read_text(encoding="utf-8").splitlines()


def test_the_page_prints_the_table() -> None:
    assert TABLE.read_text(encoding="utf-8") in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("rank", [1, 3])
def test_low_rank_takes_as_many_for_any_number_of_matrices_and_groups_of_shapes(rank: int) -> None:
    recipe = f"powersgd(rank={rank})"
    square, tall, wide = (SIDE, SIDE), (SIDE, 2 * SIDE), (SIDE // 2, SIDE + 1)
    one = count_unit(recipe, [square])
    assert one == count_unit(recipe, 6 * [square])
    assert one == count_unit(recipe, 2 * [square, tall, wide])


@pytest.mark.parametrize("rank", [1, 3])
def test_matrices_that_would_not_become_smaller_take_four_operators_together(rank: int) -> None:
    small, other, raw = (SIDE, SIDE), (SIDE, 2 * SIDE), (rank, 64 * SIDE)
    none, one, four = (
        count_unit(f"powersgd(rank={rank})", [small, other, *number * [raw]]) for number in (0, 1, 4)
    )
    assert one == four == {**none, "operator": none["operator"] + 4}


def main() -> None:
    """Write the table anew."""
    before = TABLE.read_text(encoding="utf-8")
    TABLE.write_text("\n".join([*HEAD, *map(line, ROWS)]) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(page.replace(before, TABLE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
