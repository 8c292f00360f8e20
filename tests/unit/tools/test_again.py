"""Which figures of a report are computed again, and what counts as the same."""

from __future__ import annotations

from benchmarks.again import cells, commands, compared

REPORT = """
`python benchmarks/same_loss.py --recipes "" "topk(ratio=0.1)"
--seeds 2`, `benchmarks/near_linear.py`, `benchmarks/same_loss.py [--steps N]`.

| model | interval | loss | step, ms | accuracy |
|---|---|---|---|---|
| convnet | 2 | 0.340 ± 0.003 | 7.5 | 86 % |
| convnet | 4 | 0.389 ± 0.002 | 7.9 | 85 % |
"""


def test_commands_that_follow_from_seeds_are_found_across_lines() -> None:
    assert commands(REPORT) == [["same_loss.py", "--recipes", "", "topk(ratio=0.1)", "--seeds", "2"]]


def test_rows_are_told_apart_by_what_stands_before_the_first_figure() -> None:
    assert [cell.row for cell in cells(REPORT) if cell.column == "loss"] == ["convnet, 2", "convnet, 4"]


def test_times_are_not_compared_and_other_figures_are() -> None:
    again = (
        REPORT.replace("7.5", "9.1").replace("0.389", "0.391").replace("| convnet | 2 |", "| convnet | 8 |")
    )
    differ, same, unknown = compared(REPORT, again)
    assert differ == ["convnet, 4, loss: 0.389 ± 0.002 in the report, 0.391 ± 0.002 now"]
    assert (same, unknown) == (1, 2)
