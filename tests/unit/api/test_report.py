"""What a run says of itself."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from gradwire._api.report import Report
from gradwire.measure.clock import Span
from gradwire.measure.link import Change
from gradwire.planning.choice import ChoiceRow
from gradwire.planning.costs import Link
from gradwire.step.history import WINDOW, History
from gradwire.step.moods import Outcome
from gradwire.step.step import Step

REPORT = Report(
    recipe="topk(ratio=0.01)",
    why="as configured",
    step=120,
    world=4,
    skipped_steps=0,
    dropped_steps=0,
    late=None,
    wire_bytes_per_step=3 * 2.0**20,
    metered_bytes_per_step=3 * 2.0**20,
    dense_bytes_per_step=60 * 2.0**20,
    compress_s=0.002,
    backward_s=0.1,
    exposed_comm_s=0.0005,
    memory_bytes=80 * 2**20,
    units=9,
    facts={"ccr": 4.2},
    timeline=[{"what": "backward", "unit": "", "start_s": 0.0, "stop_s": 0.1}],
)


@pytest.fixture(autouse=True)
def _on_a_wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def _step(plan: str = "dense", committed: bool = True, metered_bytes: float = 8.0) -> Step:
    step = Step(0, plan, 10.0)
    step.outcome = Outcome.COMMITTED if committed else Outcome.NOT_FINITE
    step.sent.metered_bytes = step.sent.predicted_bytes = metered_bytes
    step.come.last_s = 10.5
    return step


def test_the_memory_of_graphs_is_printed_where_there_are_some() -> None:
    there = replace(REPORT, placement="stream")
    assert "stream: gradients stay on their device\n" in f"{there}\n"
    kept = replace(there, graph_bytes=3_000_000)
    assert "stream: gradients stay on their device, 3 MB kept by graphs" in str(kept)


def test_a_report_prints_what_runs_why_and_what_it_costs() -> None:
    assert str(REPORT) == (
        "gradwire: topk, step 120, 4 ranks\n"
        "  why          as asked; nothing was compared with it. `gradwire advise` tells whether it helps\n"
        "  on the wire  3.15 MB per rank and step, 5.0% of plain all-reduce (metered 3.15 MB)\n"
        "  per step     backward 100.0 ms, encode and decode 2.0 ms, exposed communication 0.5 ms\n"
        "  residual     83.9 MB in 9 units"
    )


def test_people_read_a_recipe_without_its_defaults_and_tools_read_all_of_it() -> None:
    text = "int4(block=128, feedback=True, collective='all_gather')"
    report = replace(REPORT, recipe=text)
    assert str(report).startswith("gradwire: int4(collective='all_gather'), step 120")
    assert "<caption>gradwire: int4(collective=&#x27;all_gather&#x27;), step" in report._repr_html_()
    assert report.as_dict()["recipe"] == text


@pytest.mark.parametrize("width", [40, 60, 80])
def test_long_explanations_are_wrapped_between_words(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    why = " ".join(f"word{number}" for number in range(60))
    told = str(replace(REPORT, why=why)).splitlines()
    assert max(map(len, told)) <= width
    assert [word for line in told for word in line.split() if word.startswith("word")] == why.split()
    assert [line for line in told if "word" in line][1].startswith(" " * 15 + "word")


def test_one_rank_and_one_unit_are_singular_and_no_memory_is_no_number() -> None:
    alone = replace(REPORT, world=1, units=1, skipped_steps=1, dropped_steps=1)
    told = str(alone)
    for said in ("step 120, 1 rank\n", " in 1 unit\n", " 1 step with NaN", " 1 step, without a trace"):
        assert said in told
    assert str(replace(REPORT, memory_bytes=0, units=0)).endswith("  residual     none")


def test_a_notebook_shows_tables_and_a_console_the_text() -> None:
    row = ChoiceRow("int4<x>", 0.1, 0.8, 1.05e6, None, None, "runs")
    report = replace(REPORT, why="a < b", choices=(row,), late=0.5)
    assert repr(report) == str(report)
    shown = report._repr_html_()
    assert shown.count("<table>") == shown.count("</table>") == 2
    assert "<tr><th>why</th><td>a &lt; b</td></tr>" in shown
    assert "<td>int4&lt;x&gt;</td><td>100.0 ms</td><td>-</td><td>80%</td><td>1.05 MB</td>" in shown
    assert "9 units; its norm is 0.5 of that of a step" in shown
    assert REPORT._repr_html_().count("<table>") == 1


def test_skipped_steps_are_said_aloud() -> None:
    assert str(replace(REPORT, skipped_steps=3)).endswith(
        "skipped      3 steps with NaN, Inf or gradients too large to remember"
    )


def test_compiling_within_steps_is_said_aloud() -> None:
    assert str(replace(REPORT, compile_s=12.04)).endswith("  kernels      compiled for 12.0 s within steps")


def test_the_slowest_rank_is_named_beside_the_median() -> None:
    by_rank = replace(REPORT, computing_by_rank_s=(0.02, 0.021, 0.034, 0.019))
    assert by_rank.slowest_rank == 2
    said = "  by rank      20.5 ms of computing per step in the median, 34.0 ms on rank 2"
    assert str(by_rank).splitlines()[4] == said
    assert by_rank.as_dict()["computing_by_rank_s"] == (0.02, 0.021, 0.034, 0.019)
    assert replace(REPORT, computing_by_rank_s=(0.02,)).slowest_rank is None


def test_one_slow_step_makes_no_slow_rank() -> None:
    history = History()
    for times_s in ((0.5, 0.25), (0.5, 60.0), (), (0.5, 0.25)):
        step = _step()
        step.computing_by_rank_s = times_s
        history.add(step)
    assert history.computing_by_rank_s() == (0.5, 0.25)
    assert History().computing_by_rank_s() == ()


def test_a_prediction_stands_beside_what_was_measured() -> None:
    predicted = replace(REPORT, predicted_step_s=0.125, step_s=0.13)
    assert str(predicted).endswith("  whole step   130.0 ms now; 125.0 ms were predicted at the choice")
    assert predicted.as_dict()["predicted_step_s"] == 0.125


def test_a_whole_step_begins_where_the_one_before_has_ended() -> None:
    history = History()
    assert history.median("step_s") == 0.0
    for before_s in (0.0, 0.25, 60.0):
        step = _step()
        step.before_s = before_s
        history.add(step)
        history.waited(10.5, 10.75)
    assert history.median("step_s") == 0.25 + 0.5 + 0.25


def test_who_has_led_is_said_where_somebody_does() -> None:
    assert str(replace(REPORT, times_led=[30, 90])).endswith("led          30, 90 times by rank")


def test_a_change_of_the_link_is_said_aloud_and_is_plain_json() -> None:
    change = Change("all_reduce", Link(1e-3, 4e-8), Link(2.5e-3, 2e-5))
    changed = replace(REPORT, link=change.after, link_changes=((3, change), (70, change)))
    said = "link         changed in step 70: 1 ms, 200 Mbit/s, then 2.5 ms, 0.4 Mbit/s"
    assert str(changed).endswith(said)
    assert json.loads(json.dumps(changed.as_dict()))["link_changes"][0][1]["before"]["alpha_s"] == 1e-3


def test_a_link_of_few_bytes_gets_no_numbers() -> None:
    change = Change("all_reduce", Link(4e-4, 3e-7), Link(1e-4, 2e-7), is_resolved=False)
    said = str(replace(REPORT, link_changes=((24, change),)))
    assert said.endswith("link         changed in step 24: messages are too small to tell how fast it is")


def test_what_was_asked_for_stands_before_what_runs() -> None:
    row = ChoiceRow("int4", 0.1, 0.8, 1.05e6, None, None, "runs")
    cut = "mergecomp(inner='int4', cuts=(1024,), elements=4096)"
    report = replace(REPORT, recipe=cut, asked="auto", choices=(row,))
    assert str(report).startswith("gradwire: auto runs int4, step 120, 4 ranks\n")
    asked = replace(REPORT, asked="topk(ratio=0.01, values='full')")
    assert str(asked).startswith("gradwire: topk, step 120")


def test_no_time_of_a_step_exceeds_that_of_the_whole() -> None:
    history = History()
    for waited_s in (0.25, 0.25, 60.0):
        history.add(_step())
        history.waited(10.5, 10.5 + waited_s)
    assert history.median("exposed_comm_s") == 0.25 < history.median("step_s")


def test_what_could_not_be_told_of_a_link_is_no_number() -> None:
    change = Change("all_reduce", Link(0.0, 4e-8), Link(2.5e-3, 0.0))
    said = "changed in step 9: latency not resolved, 200 Mbit/s, then 2.5 ms, bandwidth not resolved"
    assert str(replace(REPORT, link_changes=((9, change),))).endswith(said)


def test_a_report_is_plain_json() -> None:
    assert json.loads(json.dumps(REPORT.as_dict()))["ratio"] == pytest.approx(0.05)


def test_alone_nothing_is_sent_and_the_ratio_is_one() -> None:
    assert replace(REPORT, wire_bytes_per_step=0.0, dense_bytes_per_step=0.0).ratio == 1.0


def test_means_are_over_the_window_and_start_again_with_another_plan() -> None:
    history = History()
    assert history.mean("metered_bytes") == 0.0
    for size in (1000.0, *(WINDOW * [10.0])):
        history.add(_step(metered_bytes=size))
    assert history.mean("metered_bytes") == 10.0
    history.add(_step(plan="topk", metered_bytes=2.0))
    assert history.mean("metered_bytes") == 2.0
    assert history.mean("backward_s") == 0.5


def test_only_steps_without_an_error_count_as_skipped() -> None:
    history = History()
    failed = _step(committed=False)
    failed.outcome = Outcome.FAILED
    for step in (_step(), failed, _step(committed=False)):
        history.add(step)
        history.outcome_known(step)
    assert history.skipped == 1


def test_the_timeline_starts_with_the_backward_pass() -> None:
    history = History()
    step = _step()
    step.trace.spans += [Span("wire", "unit", 10.3, 10.6), Span("encode", "unit", 10.2, 10.3)]
    history.add(step)
    history.waited(10.5, 10.75)
    timeline = history.timeline()
    assert [span["what"] for span in timeline] == ["backward", "encode", "wire", "wait"]
    assert (timeline[0]["start_s"], timeline[0]["stop_s"]) == (0.0, 0.5)
    assert history.mean("exposed_comm_s") == 0.25
