"""The demonstration's arithmetic, and its course with workers that are made up."""

import io
import math
import re

import pytest
from rich.console import Console

from gradwire_lab.bench.measurement import Setting
from gradwire_lab.bench.process_set import Answers, SettingFailed
from gradwire_lab.bench.statistics import StepSample
from gradwire_lab.demo import director, findings
from gradwire_lab.demo.director import Director
from gradwire_lab.demo.findings import Both
from gradwire_lab.demo.plans import DemoPlan, rate_for_ccr, text_plan
from gradwire_lab.demo.race import Course
from gradwire_lab.demo.terminal import exit_code, live_progress, show
from gradwire_lab.emulate import Counters
from gradwire_lab.report.page import render


def course(name, seed, accuracy, length=100, *, loss=1.0, step_s=0.1, shaped=None, settled_after=0):
    shaped = length if shaped is None else shaped
    figures = {"test_accuracy": accuracy}
    course = Course(name, seed, [loss] * length, [step_s] * length, shaped, figures, True)
    course.settled_after = settled_after
    return course


def both(*courses, steps=100):
    return Both.of(courses, steps, 10)


ACCURACY = findings.metric_of([course("ddp", 0, 0.5)])


def test_the_rate_makes_communication_last():
    # 4 ranks send 2 * 3/4 of 8 MB = 96 Mbit each; at CCR 3 that may take 0.3 s of a 0.1 s backward pass
    assert rate_for_ccr(8e6, 4, 0.1, 3.0) == 3.2e8


def test_quality_holds_inside_the_spread_of_ddp():
    ddp = [course("ddp", seed, value) for seed, value in enumerate((0.80, 0.82, 0.84))]
    good = [course("gradwire", seed, value) for seed, value in enumerate((0.79, 0.81, 0.83))]
    bad = [course("gradwire", seed, value) for seed, value in enumerate((0.79, 0.79, 0.81))]
    held = findings.quality(both(*ddp, *good), ACCURACY)
    assert (held.passed, held.wanted) == (True, "not below plain DDP's worst seed, 80.00 %")
    missed = findings.quality(both(*ddp, *bad), ACCURACY)
    assert missed.passed is False
    assert missed.worse == "worse by 2.33 points in test accuracy after 100 steps"


def test_one_seed_has_no_spread_to_judge_by():
    alone = both(course("ddp", 0, 0.8), course("gradwire", 0, 0.1))
    assert findings.quality(alone, ACCURACY).passed is None
    assert findings.time_to_loss(alone).passed is None
    assert findings.time_to_metric(alone, ACCURACY).passed is None


def test_a_course_that_broke_off_does_not_count():
    short = both(course("ddp", 0, 0.8), course("ddp", 1, 0.9), course("gradwire", 0, 0.1, length=50))
    assert findings.quality(short, ACCURACY).passed is None
    assert findings.time_to_loss(short).found == "not measured"


def test_a_loss_is_better_when_lower():
    loss = findings.LOSS
    assert loss.apart(0.48, 0.34) == "worse by 0.140"
    assert loss.apart(0.34, 0.48) == "better by 0.140"
    assert loss.apart(0.3401, 0.34) == "equal"
    assert ACCURACY.apart(0.8, 0.9) == "worse by 10.00 points"


def falling(name, seed, step_s, *, low=0.5, shaped=100):
    """Its loss falls from 2.5 to `low` over 100 steps."""
    found = course(name, seed, 0.8, step_s=step_s, shaped=shaped)
    found.losses = [2.5 + (low - 2.5) * step / 99 for step in range(100)]
    return found


def test_the_time_to_ddps_final_loss_is_a_matter_of_the_slow_link():
    # The other seeds of DDP ran on a fast link: they get the times of seed 0.
    ddp = [falling("ddp", 0, 0.2), falling("ddp", 1, 0.05, shaped=0)]
    wire = [falling("gradwire", seed, 0.1) for seed in (0, 1)]
    check = findings.time_to_loss(both(*ddp, *wire))
    assert (check.found, check.wanted) == ("10.0 s", "below plain DDP's 20.0 s")
    assert check.passed
    slower = [falling("gradwire", seed, 0.25) for seed in (0, 1)]
    check = findings.time_to_loss(both(*ddp, *slower))
    assert check.passed is False
    assert check.worse == "worse by 5.0 s to plain DDP's final loss"


def test_a_mean_that_never_reaches_the_loss_is_said():
    ddp = [falling("ddp", seed, 0.2) for seed in (0, 1)]
    wire = [falling("gradwire", 0, 0.1), falling("gradwire", 1, 0.1, low=0.7)]
    check = findings.time_to_loss(both(*ddp, *wire))
    assert check.passed is False
    assert check.found == "not reached in 100 steps"
    # Means of the last 15 of 100 steps: 7/99 of the way back from 0.5 and 0.6 to 2.5.
    assert check.worse == "plain DDP's final loss not reached, worse by 0.093"


def test_one_seed_that_never_reaches_the_loss_is_said_and_decides_nothing():
    ddp = [falling("ddp", 0, 0.2), falling("ddp", 1, 0.2, low=0.9)]
    wire = [falling("gradwire", 0, 0.1), falling("gradwire", 1, 0.1, low=0.95)]
    check = findings.time_to_loss(both(*ddp, *wire))
    assert check.passed
    assert check.found == "9.1 s; not by 1 of 2 seeds"
    assert check.wanted == "below plain DDP's 18.0 (16.4 to 20.0) s"


def test_the_time_to_ddps_final_accuracy_is_that_of_the_training_that_reaches_it():
    ddp = [course("ddp", seed, value, step_s=0.2) for seed, value in enumerate((0.80, 0.84))]
    good = [course("gradwire", seed, 0.81) for seed in (0, 1)]
    bad = [course("gradwire", seed, 0.79) for seed in (0, 1)]
    check = findings.time_to_metric(both(*ddp, *good), ACCURACY)
    assert (check.found, check.wanted, check.passed) == ("10.0 s", "below plain DDP's 20.0 s", True)
    check = findings.time_to_metric(both(*ddp, *bad), ACCURACY)
    assert (check.found, check.passed) == ("not reached in 100 steps: worse by 1.00 points", False)


def curve_of(ddp, wire):
    return findings.behind_curve(both(*ddp, *wire), [*ddp, *wire])


def test_gradwire_may_be_behind_while_it_measures_by_what_that_costs():
    ddp = [falling("ddp", seed, 0.1) for seed in (0, 1)]
    wire = [falling("gradwire", seed, 0.05) for seed in (0, 1)]
    for each in wire:
        each.step_s[:20], each.settled_after = [0.1] * 18 + [0.2, 0.2], 20  # 0.2 s more than plain DDP
    check = curve_of(ddp, wire)
    assert check.found == "0.2 s at most, in step 20; after the choice below it for 96 %"
    assert check.wanted.startswith("at most the 0.2 s that choosing takes, and a step")
    assert (check.passed, check.worse) == (True, "")


def test_steps_that_are_slower_after_the_choice_are_more_than_choosing_takes():
    ddp = [falling("ddp", seed, 0.1) for seed in (0, 1)]
    wire = [falling("gradwire", seed, 0.05) for seed in (0, 1)]
    for each in wire:
        each.settled_after, each.step_s[20:30] = 20, [0.3] * 10  # 2 s more, of which 1 s had been gained
    check = curve_of(ddp, wire)
    assert check.passed is False
    assert check.worse == "behind by 1.0 s in step 30, where choosing takes 0.0 s"
    assert check.headline == "it falls behind by more than choosing takes"
    for each in wire:
        each.step_s[20:30] = [0.205] * 10  # 0.05 s behind, which is less than a step
    assert curve_of(ddp, wire).passed


def test_who_is_ahead_at_equal_time_is_asked_from_the_choice_on():
    ddp = [falling("ddp", seed, 0.1) for seed in (0, 1)]
    wire = [falling("gradwire", seed, 0.05) for seed in (0, 1)]
    for each in wire:
        each.losses[:50] = [9.0] * 50  # far behind, while it tries things out
        each.settled_after = 70
    assert curve_of(ddp, wire).passed
    for each in wire:
        each.settled_after = 50
    behind = curve_of(ddp, wire)
    assert behind.passed is False
    assert behind.worse.startswith("behind at equal time for")
    assert behind.headline == "it is behind at equal time after its choice"


def test_a_course_that_never_ran_beside_the_other_has_no_lag():
    assert findings.Choosing.of([course("gradwire", 0, 0.8)], 10) is None
    assert findings.Choosing.of([course("gradwire", 0, 0.8), course("ddp", 1, 0.8)], 10) is None


def test_the_step_from_which_on_it_is_ahead_is_known():
    ddp, wire = course("ddp", 0, 0.8), course("gradwire", 0, 0.8, step_s=0.05, settled_after=10)
    wire.step_s[9] = 0.98  # behind by 0.43 s, and then ahead by 0.05 s more in each step
    cost = findings.Choosing.of([ddp, wire], 10)
    assert (cost.step, cost.ahead_from) == (10, 19)
    assert (cost.cost_s, cost.lag_s) == pytest.approx((0.88, 0.43))


def test_replicas_that_differ_are_missed():
    assert findings.replicas([course("gradwire", 0, 0.8)]).passed
    other = course("gradwire", 1, 0.8)
    other.replicas_identical = False
    check = findings.replicas([course("gradwire", 0, 0.8), other])
    assert (check.passed, check.headline) == (False, "its replicas differ")


def headline_of(missed, *, ratio=0.5):
    """The headline of a run in which gradwire takes `ratio` of plain DDP's time, with `missed` claims."""
    courses = [
        falling(name, seed, step_s).as_dict()
        for seed in (0, 1)
        for name, step_s in (("ddp", 0.2), ("gradwire", 0.2 * ratio))
    ]
    settings = {"workload": "resnet_demo", "steps": 100, "warmup": 10}
    return findings.headline({"settings": settings, "courses": courses, "checks": missed})


def test_the_headline_is_one_sentence_with_one_number():
    assert headline_of([]) == "gradwire reached plain DDP's final loss in 0.50 of the time"
    assert headline_of([], ratio=1.25) == "gradwire reached plain DDP's final loss in 1.25 of the time"


def test_what_a_user_misses_stands_in_the_headline_and_what_none_cares_about_does_not():
    accuracy = {"passed": False, "worse": "worse by 2.33 points", "headline": "its test accuracy is worse"}
    sent = {"passed": False, "worse": "bytes of gradwire off by +50.0 %", "headline": ""}
    held = accuracy | {"passed": True}
    unknown = accuracy | {"passed": None}
    assert headline_of([accuracy, sent]) == f"{headline_of([])}, but its test accuracy is worse"
    assert headline_of([sent, held, unknown]) == headline_of([])
    two = [accuracy, accuracy | {"headline": "its replicas differ"}]
    assert headline_of(two).endswith(", but its test accuracy is worse and its replicas differ")


def test_a_seed_that_does_not_reach_the_loss_stands_in_the_headline():
    courses = [
        falling(name, seed, step_s, low=low).as_dict()
        for seed, low in ((0, 0.05), (1, 0.25))
        for name, step_s, low in (("ddp", 0.2, 0.2), ("gradwire", 0.1, low))
    ]
    settings = {"workload": "resnet_demo", "steps": 100, "warmup": 10}
    told = findings.headline({"settings": settings, "courses": courses, "checks": []})
    assert re.fullmatch(
        r"gradwire reached .* in 0\.\d\d of the time, but 1 of 2 seeds did not reach it", told
    )


def test_a_loss_that_is_not_reached_is_the_headline():
    courses = [falling("ddp", 0, 0.2).as_dict(), falling("gradwire", 0, 0.1, low=0.9).as_dict()]
    settings = {"workload": "resnet_demo", "steps": 100, "warmup": 10}
    document = {"settings": settings, "courses": courses, "checks": []}
    assert findings.headline(document) == "gradwire did not reach plain DDP's final loss in 100 steps"


def test_bytes_that_are_off_come_first_in_the_table_and_are_no_headline():
    document, _ = direct(budget_s=1e5, seeds=2, ratio=1.5)
    assert [check["passed"] for check in document["checks"][:2]] == [False, True]
    assert document["checks"][0]["worse"] == "bytes of gradwire off by +50.0 %"
    assert re.fullmatch(
        r"gradwire reached plain DDP's final loss in 0.\d\d of the time", findings.headline(document)
    )
    assert "missed: bytes of gradwire off by +50.0 %" in render(document)


@pytest.mark.parametrize(
    ("counted", "buffers", "passed"),
    [
        (1.02e6, 0, True),
        (1.2e6, 0, False),
        (0.9e6, 0, False),
        (1.12e6, 1e5, True),
        (1.02e6, 1e5, False),
        (None, 0, None),
    ],
)
def test_counted_bytes_are_held_against_the_prediction(counted, buffers, passed):
    row = {
        "kind": "recipe",
        "wire_bytes_per_step": 1e6,
        "announced_bytes_per_step": None,
        "interface_bytes_per_step": counted,
    }
    row |= {"interface_packets_per_step": 100, "buffer_bytes_per_step": buffers}
    assert findings.counted_bytes(row).passed is passed


def test_headers_of_all_packets_are_predicted():
    row = {
        "kind": "recipe",
        "wire_bytes_per_step": 1e6,
        "announced_bytes_per_step": None,
        "interface_bytes_per_step": 1.07e6,
    }
    row |= {"interface_packets_per_step": 1000, "buffer_bytes_per_step": 0.0}
    check = findings.counted_bytes(row)
    assert check.passed
    assert check.found == "1.07 MB: +0.4 %"
    assert check.wanted == "within 2 % of 1.07 MB: 1 MB, and headers of 1000 packets"
    # As many bytes in fewer packets have fewer headers to explain them.
    assert findings.counted_bytes(row | {"interface_packets_per_step": 100}).passed is False


def test_impossible_plans_are_refused():
    for wrong in ({"workers": 1}, {"steps": 10}, {"seeds": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            DemoPlan(**wrong)
    assert text_plan(DemoPlan()).workload == "chargpt"


STEP_S = {"bound": 1.0, "ddp": 4.0, "auto": 1.1}
BYTES = {"bound": 0, "ddp": 4_000_000, "auto": 250}
MEASURING = 26  # steps of auto that send everything


class FakeSet:
    """Two ranks that answer at once: a step takes a second without communication, more with it."""

    def __init__(self, stem, network, fail_at=math.inf, ratio=1.0):
        self.stem, self.network, self.done, self.total, self.fail_at = stem, network, 0, 0, fail_at
        self.ratio = ratio  # of what the interface sees to what is announced
        self.ended = False

    def ask(self, command, *, on_step=None, timeout_s=None, only=None):
        answer = getattr(self, f"_{command['op']}")(command)
        ranks = 2 if only is None else 1
        steps = [[] for _ in range(ranks)]
        if command["op"] == "steps":
            self.done += command["count"]
            self.total += command["count"]
            if self.total > self.fail_at:
                raise SettingFailed("taken to hang", "a traceback")
            first = self.done - command["count"]
            steps = [[self._sample(first + k) for k in range(command["count"])] for _ in range(ranks)]
            for sample in steps[0]:
                on_step(0, sample) if on_step else None
        return Answers([answer] * ranks, steps)

    def end(self):
        self.ended = True

    def _sample(self, step):
        measures = self.stem == "auto" and step < MEASURING
        step_s = STEP_S["ddp" if measures else self.stem]
        loss = 2.0 / (1 + step)
        return StepSample(step_s, 0.0, 0.3, 0.6, step_s - 1.0, 0.1, 0.9, loss, None, settled=not measures)

    def _hello(self, command):
        return {}

    def _setup(self, command):
        self.done, self.announced = 0, 0
        return {"parameters": 1_000_000, "workload": {"data": "none"}, "compile_s": 38.0}

    def _steps(self, command):
        full = max(MEASURING - self.done, 0) if self.stem == "auto" else 0
        full = min(full, command["count"])
        sent = BYTES["ddp"] * full + BYTES[self.stem] * (command["count"] - full)
        self.network.sent += sent * (self.ratio if self.stem == "auto" else 1.0)
        self.announced += sent
        report = {"recipe": "topk(ratio=0.1)", "why": "w", "wire_bytes_per_step": 250.0}
        report["settled"] = self.done + command["count"] > MEASURING
        report["wire_bytes"] = self.announced
        return {"peak_bytes": 1, "report": report if self.stem == "auto" else None}

    def _check(self, command):
        return {"fingerprint": "f"}

    def _evaluate(self, command):
        return {"evaluation": {"test_accuracy": 1 - 1 / (2 + self.done)}}

    def _trace(self, command):
        return {"spans": [{"what": "backward", "unit": "", "start_s": 0.0, "stop_s": 0.5}]}


class FakeNetwork:
    """Remembers how it was shaped."""

    mode = "root"

    def __init__(self):
        self.sent, self.links = 0, []

    def counters(self):
        return [Counters(0, self.sent)] * 2

    def reshape(self, link):
        self.links.append(link.rate_bit_per_s)


class Quiet:
    def say(self, text):
        pass

    def follow(self, name, seed, total, *, shaped):
        return lambda rank, sample: None


def direct(fail_at=math.inf, ratio=1.0, **plan):
    network, sets = FakeNetwork(), []

    def make(entry):
        def start(*_):
            sets.append(FakeSet(entry.stem, network, fail_at if entry.stem == "ddp" else math.inf, ratio))
            return sets[-1]

        return Setting(entry, DemoPlan().task, network, 2, 1.0, start=start)

    document = Director(DemoPlan(**plan), network, Quiet()).run(make)
    assert all(item.ended for item in sets if item.total <= item.fail_at)
    return document, network


def test_ddp_gets_the_same_time_then_finishes_its_steps():
    document, network = direct(budget_s=1e5)
    first = document["courses"][:2]
    assert [len(item["step_s"]) for item in first] == [240, 240]
    assert [item["shaped"] for item in first] == [240, 240]
    assert len(document["courses"]) == 6
    assert [check["passed"] for check in document["checks"]] == [True] * 7
    assert exit_code(document) == 0
    assert document["compile_s"] == 38.0
    # 4 MB of gradients for 0.6 s of backward, at the default CCR
    assert network.links[0] == rate_for_ccr(4e6, 2, 0.6)
    assert network.links[-1] == network.links[0]


def test_both_have_as_many_seeds_and_only_ddps_run_on_a_fast_link():
    document, _ = direct(budget_s=1e5)
    seeds = [(item["name"], item["seed"], item["shaped"]) for item in document["courses"]]
    assert seeds[2:] == [("ddp", 1, 0), ("gradwire", 1, 240), ("ddp", 2, 0), ("gradwire", 2, 240)]


def test_what_is_sent_before_the_choice_is_in_no_figure_per_step():
    document, _ = direct(budget_s=1e5, seeds=1)
    row = findings.row_of(document, "recipe")
    wire = document["courses"][1]
    assert (wire["settled_after"], wire["uncounted"]) == (MEASURING, 30)
    assert (row["step_s"], row["announced_bytes_per_step"], row["interface_bytes_per_step"]) == (
        1.1,
        250,
        250,
    )
    figures = [found for found, _, _ in findings.tiles(document)] + [*findings.table_lines(document)[2]]
    assert figures.count("250 B") == 3
    [said] = [
        check["found"]
        for check in document["checks"]
        if "gradwire" in check["claim"] and "byte" in check["claim"]
    ]
    assert said.startswith("250 B")
    assert render(document).count("250 B counted") == 1


def test_seeds_that_choose_differently_are_said(monkeypatch):
    choices = iter(["int8(block=256)", "int8(block=128)", "int4"])
    report = {"settled": True, "wire_bytes": 1.0, "wire_bytes_per_step": 250.0, "why": "w"}

    def steps(self, command):
        if self.done + command["count"] == 240 and self.stem == "auto":
            return {"peak_bytes": 1, "report": report | {"recipe": next(choices)}}
        return {"peak_bytes": 1, "report": report | {"recipe": "dense"} if self.stem == "auto" else None}

    monkeypatch.setattr(FakeSet, "_steps", steps)
    document, _ = direct(budget_s=1e5)
    assert (
        "Not all seeds ended with the same recipe: int8 with seed 0; int8 with seed 1; int4 with seed 2."
        in (document["notes"])
    )


def test_where_ddp_keeps_up_it_has_a_final_figure(monkeypatch):
    monkeypatch.setitem(STEP_S, "ddp", 1.0)
    document, _ = direct(budget_s=1e5, seeds=1)
    assert document["courses"][0]["evaluation"] == {"test_accuracy": 1 - 1 / 242}


def test_who_fails_does_not_show_what_was_found_before():
    document, _ = direct(fail_at=300, budget_s=1e5)
    first, second = (item for item in document["courses"] if item["name"] == "ddp")
    assert first["replicas_identical"]
    assert second["replicas_identical"] is None
    assert not second["evaluation"]


def test_a_race_that_broke_off_claims_nothing():
    document, _ = direct(fail_at=50)
    assert findings.replicas([Course("gradwire", 0)]).passed is None
    assert {check["found"] for check in document["checks"][:4]} == {"not measured"}


def test_a_course_has_the_mean_loss_of_all_ranks_and_the_time_of_the_slowest():
    found = Course("ddp", 0)
    ranks = [[StepSample(1.0, *[0.0] * 6, 1.0)], [StepSample(2.0, *[0.0] * 6, 3.0)]]
    found.add(ranks, shaped=True)
    assert (found.losses, found.step_s, found.shaped) == ([2.0], [2.0], 1)


def test_what_does_not_fit_is_shortened_and_said():
    document, _ = direct(budget_s=5.0)
    ddp = document["courses"][0]
    assert 10 < ddp["shaped"] < 240
    assert len(ddp["step_s"]) == 240
    assert any("unshaped link" in note for note in document["notes"])
    said = f"Plain DDP's time is projected: {ddp['shaped']} of its 240 steps ran on the slow link"
    assert findings.projected(document).startswith(said)
    assert findings.tiles(document)[0][2].endswith(" s, projected")
    assert render(document).index(said.replace("'", "&#39;")) < render(document).index('class="tiles"')
    assert " ".join(printed(document).split()).count(said) == 1
    assert findings.projected(direct(budget_s=1e5, seeds=1)[0]) == ""
    seeds = "Plain DDP ran on the slow link with seed 0 alone; its other seeds have those times."
    assert findings.projected(direct(budget_s=1e5, seeds=2)[0]) == seeds
    assert any("ended before seed 1" in note for note in document["notes"])
    assert len(document["courses"]) == 2


def printed(document):
    """What a terminal of 80 columns shows."""
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(show(document))
    return console.export_text()


def test_the_tables_of_the_terminal_have_heads_of_one_line():
    lines = printed(direct(budget_s=1e5)[0]).splitlines()
    for heads in ("per step step wait scaling sent counted CPU", "figure seed plain DDP gradwire difference"):
        [place] = [index for index, line in enumerate(lines) if " ".join(line.split()) == heads]
        assert set(lines[place + 1]) <= set("─ "), "a rule"


def test_steps_on_an_unshaped_link_say_so_while_they_run():
    console = Console(width=80, record=True, force_terminal=True, file=io.StringIO())
    with live_progress(console) as live:
        for seed, shaped in enumerate((True, False)):
            live.follow("ddp", seed, 240, shaped=shaped)(0, StepSample(0.0885, *[0.0] * 6, 0.3451))
    shown = console.export_text()
    assert "88.5 ms/step, loss 0.345" in shown
    assert "88.5 ms/step, unshaped link, loss 0.345" in shown


@pytest.mark.parametrize(("load", "said"), [(0.6, False), (1.9, False), (2.7, True)])
def test_a_load_that_installing_causes_is_no_busy_machine(monkeypatch, load, said):
    monkeypatch.setattr(director, "cores", lambda: 2)
    monkeypatch.setattr(director.os, "getloadavg", lambda: (load, 0.0, 0.0))
    document, _ = direct(budget_s=1e5, seeds=1)
    assert any("Other programs used the machine" in note for note in document["notes"]) is said


def test_a_contestant_that_hangs_ends_the_demonstration_with_a_report():
    document, _ = direct(fail_at=50)
    assert document["failures"][0]["reason"] == "taken to hang"
    assert exit_code(document) == 1
    assert "a traceback" in render(document)
    show(document)


def test_a_recipe_that_is_never_decided_counts_from_half_of_the_steps(monkeypatch):
    monkeypatch.setitem(globals(), "MEASURING", 1000)
    document, _ = direct(budget_s=1e5, seeds=1)
    row = findings.row_of(document, "recipe")
    assert len(row["step_s_all"]) == 110
    assert row["announced_bytes_per_step"] == BYTES["ddp"]
    [said] = [check for check in document["checks"] if "behind" in check["claim"]]
    assert (said["found"], said["passed"]) == ("not measured", None)
