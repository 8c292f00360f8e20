"""The demonstration's arithmetic, and its course with workers that are made up."""

import math

import pytest

from gradwire.lab.bench.measuring import Setting
from gradwire.lab.bench.process_set import Answers, SettingFailed
from gradwire.lab.bench.statistics import StepSample
from gradwire.lab.demo import findings
from gradwire.lab.demo.director import Director
from gradwire.lab.demo.plans import Plan, rate_for_ccr, text_plan
from gradwire.lab.demo.race import Course
from gradwire.lab.demo.terminal import exit_code, show
from gradwire.lab.emulate import Counters
from gradwire.lab.report.page import render


def course(name, seed, accuracy, length=100):
    return Course(name, seed, [1.0] * length, [0.1] * length, length, {"test_accuracy": accuracy}, True)


def test_the_rate_makes_communication_last():
    # 4 ranks send 2 * 3/4 of 8 MB = 96 Mbit each; at CCR 3 that may take 0.3 s of a 0.1 s backward pass
    assert rate_for_ccr(8e6, 4, 0.1, 3.0) == 3.2e8


def test_the_unshaped_steps_of_ddp_are_shown_beside():
    ddp = Course("ddp", 0, [1.0] * 4, [0.3, 0.3, 0.1, 0.1], shaped=2)
    wire = Course("gradwire", 0, [1.0] * 4, [0.125] * 4, shaped=4)
    check = findings.beside_free_ddp({"step_s": 0.125}, [ddp, wire])
    assert check.found == "80.0 %"
    assert findings.beside_free_ddp({"step_s": 0.125}, [wire]).found == "not measured"


def test_quality_holds_inside_the_spread_of_ddp():
    ddp = [course("ddp", seed, value) for seed, value in enumerate((0.80, 0.82, 0.84))]
    good = [course("gradwire", seed, value) for seed, value in enumerate((0.79, 0.81, 0.83))]
    bad = [course("gradwire", seed, value) for seed, value in enumerate((0.79, 0.79, 0.81))]
    assert findings.quality(ddp + good, 100).passed is True
    assert findings.quality(ddp + bad, 100).passed is False


def test_one_seed_has_no_spread_to_judge_by():
    assert findings.quality([course("ddp", 0, 0.8), course("gradwire", 0, 0.1)], 100).passed is None


def test_a_course_that_broke_off_does_not_count():
    short = [course("ddp", 0, 0.8), course("ddp", 1, 0.9), course("gradwire", 0, 0.1, length=50)]
    assert findings.quality(short, 100).passed is None


def test_a_loss_is_better_when_lower():
    losses = [
        Course(name, 0, evaluation={"test_loss": value}) for name, value in (("ddp", 2.0), ("gradwire", 1.0))
    ]
    at_same_time = {item.name: item.evaluation for item in losses}
    assert findings.same_time(at_same_time, losses).passed is True


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
        "name": "x",
        "wire_bytes_per_step": 1e6,
        "announced_bytes_per_step": None,
        "interface_bytes_per_step": counted,
    }
    row |= {"interface_packets_per_step": 100, "buffer_bytes_per_step": buffers}
    assert findings.counted_bytes(row).passed is passed


def test_packet_headers_are_shown_beside_the_excess_and_not_taken_off():
    row = {
        "name": "x",
        "wire_bytes_per_step": 1e6,
        "announced_bytes_per_step": None,
        "interface_bytes_per_step": 1.02e6,
    }
    row |= {"interface_packets_per_step": 100, "buffer_bytes_per_step": 0.0}
    assert findings.counted_bytes(row).found == "+2.0 %, of which 0.7 % packet headers"


def test_impossible_plans_are_refused():
    for wrong in ({"workers": 1}, {"steps": 10}, {"seeds": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Plan(**wrong)
    assert text_plan(Plan()).workload == "chargpt"


STEP_S = {"bound": 1.0, "ddp": 4.0, "auto": 1.1}
BYTES = {"bound": 0, "ddp": 4_000_000, "auto": 250}
MEASURING = 26  # steps of auto that send everything


class FakeSet:
    """Two ranks that answer at once: a step takes a second without communication, more with it."""

    def __init__(self, stem, network, fail_at=math.inf):
        self.stem, self.network, self.done, self.total, self.fail_at = stem, network, 0, 0, fail_at
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
            steps = [[self._sample()] * command["count"] for _ in range(ranks)]
            for sample in steps[0]:
                on_step(0, sample) if on_step else None
        return Answers([answer] * ranks, steps)

    def end(self):
        self.ended = True

    def _sample(self):
        step_s = STEP_S[self.stem]
        return StepSample(step_s, 0.0, 0.3, 0.6, step_s - 1.0, 0.1, 0.9, 2.0 / (1 + self.done), None)

    def _hello(self, command):
        return {}

    def _setup(self, command):
        self.done, self.announced = 0, 0
        return {"parameters": 1_000_000, "workload": {"data": "none"}}

    def _steps(self, command):
        first = self.done - command["count"]
        full = max(MEASURING - first, 0) if self.stem == "auto" else 0
        full = min(full, command["count"])
        sent = BYTES["ddp"] * full + BYTES[self.stem] * (command["count"] - full)
        self.network.sent += sent
        self.announced += sent
        report = {"recipe": "topk(ratio=0.1)", "why": "w", "settled": True, "wire_bytes_per_step": 250.0}
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

    def follow(self, name, seed, total, done):
        return lambda rank, sample: None


def direct(fail_at=math.inf, **plan):
    network, sets = FakeNetwork(), []

    def make(entry):
        def start(*_):
            sets.append(FakeSet(entry.stem, network, fail_at if entry.stem == "ddp" else math.inf))
            return sets[-1]

        return Setting(entry, Plan().task, network, 2, 1.0, start=start)

    document = Director(Plan(**plan), network, Quiet()).run(make)
    assert all(item.ended for item in sets if item.total <= item.fail_at)
    return document, network


def test_ddp_gets_the_same_time_then_finishes_its_steps():
    document, network = direct(budget_s=1e5)
    first = document["courses"][:2]
    assert [len(item["step_s"]) for item in first] == [400, 400]
    assert [item["shaped"] for item in first] == [400, 400]
    assert len(document["courses"]) == 6
    wanted = [check["passed"] for check in document["checks"] if check["wanted"] != "for comparison"]
    assert len(wanted) == 7
    assert all(wanted)
    assert exit_code(document) == 0
    # 4 MB of gradients for 0.6 s of backward, at the default CCR
    assert network.links[0] == rate_for_ccr(4e6, 2, 0.6)
    assert network.links[-1] == network.links[0]


def test_where_ddp_keeps_up_it_has_a_final_figure(monkeypatch):
    monkeypatch.setitem(STEP_S, "ddp", 1.0)
    document, _ = direct(budget_s=1e5, seeds=1)
    assert document["courses"][0]["evaluation"] == {"test_accuracy": 1 - 1 / 402}
    assert document["at_same_time"]["ddp"] == document["courses"][0]["evaluation"]


def test_who_fails_does_not_show_what_was_found_before():
    document, _ = direct(fail_at=500, budget_s=1e5)
    first, second = (item for item in document["courses"] if item["name"] == "ddp")
    assert first["replicas_identical"]
    assert second["replicas_identical"] is None
    assert not second["evaluation"]


def test_nothing_is_said_of_the_same_time_when_the_race_broke_off():
    document, _ = direct(fail_at=50)
    assert document["at_same_time"] == {}
    assert findings.replicas([Course("gradwire", 0)]).passed is None


def test_what_does_not_fit_is_shortened_and_said():
    document, _ = direct(budget_s=5.0)
    ddp = document["courses"][0]
    assert 10 < ddp["shaped"] < 400
    assert len(ddp["step_s"]) == 400
    assert any("unshaped link" in note for note in document["notes"])
    assert any("ended before seed 1 of ddp" in note for note in document["notes"])


def test_a_contestant_that_hangs_ends_the_demonstration_with_a_report():
    document, _ = direct(fail_at=50)
    assert document["failures"][0]["reason"] == "taken to hang"
    assert exit_code(document) == 1
    assert "a traceback" in render(document)
    show(document)
