"""Process sets whose workers misbehave: they end alone and say why."""

import gc
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from gradwire_lab.bench.measurement import Setting
from gradwire_lab.bench.process_set import ProcessSet, SettingFailed
from gradwire_lab.bench.runner import run
from gradwire_lab.bench.settings import NetworkSetting as LinkSettings
from gradwire_lab.bench.settings import Repetitions, Settings, TrainingTask, parse_entry
from gradwire_lab.emulate import Counters

pytestmark = [pytest.mark.process, pytest.mark.rest]


# Speaks the worker's protocol without torch. `{behave}` runs before every step.
FAKE = """
import json, os, signal, sys, time
commands, answers, rank = (int(word) for word in sys.argv[1:])
def send(**message):
    os.write(answers, (json.dumps(message) + "\\n").encode())
for line in os.fdopen(commands):
    command = json.loads(line)
    if command["op"] == "steps":
        for index in range(command["count"]):
{behave}
            send(step={{"step_s": 0.5, "loss": 1.0}})
    send(done=command["op"], report=None, peak_bytes=1, fingerprint="f", evaluation={{}}, parameters=10)
"""


class OpenNetwork:
    """No namespaces: every rank behaves as told, and a made-up hundred bytes are counted a look."""

    def __init__(self, behave, processes=None):
        lines = textwrap.indent(textwrap.dedent(behave), " " * 12)
        self.program, self.looks = FAKE.format(behave=lines), 0
        self.processes = [] if processes is None else processes

    def fork(self, rank, target, descriptors, *, output, master_port):
        words = [sys.executable, "-c", self.program, *(str(each) for each in (*descriptors, rank))]
        process = subprocess.Popen(words, stdout=output, stderr=output, pass_fds=descriptors)
        self.processes.append(process)
        return process

    def counters(self):
        self.looks += 1
        return [Counters(0, 100 * self.looks)] * 2


MISBEHAVIOUR = {
    "hangs": ("if rank == 1 and index == 1: time.sleep(60)\nif index == 1: time.sleep(60)", 0.5),
    "is killed": ("if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntime.sleep(0.2)", 5.0),
    "raises": ("if rank == 0: raise RuntimeError('no such luck')\ntime.sleep(0.2)", 5.0),
    "reports": ("if rank == 1: send(error='ValueError: x', traceback='Traceback: line 3')", 5.0),
}


@pytest.fixture(scope="module")
def failures():
    """What is said of each, side by side: a set that fails waits a second for last words."""
    with ThreadPoolExecutor(len(MISBEHAVIOUR)) as pool:
        return {name: pool.submit(failing_set, *each) for name, each in MISBEHAVIOUR.items()}


def failing_set(behave, timeout_s):
    network, start = OpenNetwork(behave), time.monotonic()
    with ProcessSet("fake", network, 2, timeout_s) as workers:
        with pytest.raises(SettingFailed) as caught:
            workers.ask({"op": "steps", "count": 3})
        assert all(process.poll() is not None for process in network.processes)
    assert time.monotonic() - start < 10
    return caught.value


def test_a_rank_that_hangs_is_ended_after_the_time_limit(failures):
    failure = failures["hangs"].result()
    assert "taken to hang" in failure.reason


def test_a_rank_that_is_killed_is_named(failures):
    failure = failures["is killed"].result()
    assert failure.reason == "rank 1 was ended by signal 9"


def test_the_last_words_of_a_dying_rank_are_kept(failures):
    failure = failures["raises"].result()
    assert failure.reason == "rank 0 ended with exit code 1"
    assert "RuntimeError: no such luck" in failure.detail


def test_an_error_that_a_worker_reports_carries_its_traceback(failures):
    failure = failures["reports"].result()
    assert failure.reason == "rank 1: ValueError: x"
    assert "Traceback: line 3" in failure.detail


def test_slow_is_not_hung():
    with ProcessSet("fake", OpenNetwork("time.sleep(0.2)"), 2, 2.0) as workers:
        answers = workers.ask({"op": "steps", "count": 4})
    assert [len(steps) for steps in answers.steps] == [4, 4]


def test_no_descriptor_is_left_open():
    gc.collect()  # what other tests have left behind must not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    with ProcessSet("fake", OpenNetwork("pass"), 2, 2.0) as workers:
        workers.ask({"op": "steps", "count": 1})
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_others_go_on_when_a_peer_hangs_and_one_dies():
    behaviour = {
        "ddp": "if index == 1: time.sleep(60)",
        "fp16_hook": "sys.exit(3)",
        "covap": "pass",
        "bound": "pass",
    }
    network = OpenNetwork("pass")

    def make(entry):
        misled = OpenNetwork(behaviour[entry.stem], network.processes)
        return Setting(entry, TrainingTask("none"), misled, 2, 1.0)

    entries = tuple(parse_entry(name, "peer") for name in ("ddp", "fp16_hook"))
    settings = Settings(
        TrainingTask("none"),
        Repetitions(2, 2, 0, 1.0),
        LinkSettings(2, "1gbit", "0", "root"),
        (*entries, parse_entry("covap", "recipe")),
    )
    said = []
    rows = {row["name"]: row for row in run(settings, network, said.append, make)["rows"]}
    assert "hang" in rows["ddp"]["failed"]
    assert "exit code 3" in rows["fp16_hook"]["failed"]
    assert rows["covap"]["failed"] is None
    assert len(rows["covap"]["step_s_all"]) == 4
    assert rows["covap"]["interface_bytes_per_step"] == 50.0
    assert rows["covap"]["replicas_identical"] is True
    assert any("round 2/2" in text for text in said)
    assert all(process.poll() is not None for process in network.processes)
