"""`make gpu` where there is no GPU, and the parts of it that can be seen to work without one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.gpu import faults, processes, ranks, worlds
from tests.gpu.outcomes import Outcome, Skip, Status, each, outcome_of
from tests.gpu.run import CALLS, PARTS, ROOT, Done, Part, as_text, main, perform
from tests.support.looped import looped


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables, "CUDA_VISIBLE_DEVICES": ""}
    for name in ("PYTEST_XDIST_WORKER", "MAKEFLAGS", "MAKELEVEL", "ARGS"):  # `make test` has started this
        environment.pop(name, None)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_without_a_gpu_it_says_what_it_would_do_and_ends_well() -> None:
    done = run(["make", "-s", "gpu", f"PYTHON={sys.executable}"])
    assert done.returncode == 0, done.stderr
    first, *listed = done.stdout.splitlines()
    assert "finds no CUDA device: nothing is run" in first
    assert [line.split()[0] for line in listed if line.startswith("  ")] == [part.name for part in PARTS]
    calls = [re.findall(r'"--only (.*)"', line) for line in listed if not line.startswith("  ")]
    assert calls == [[",".join(part.name for part in call)] for call in CALLS]


@looped("call", CALLS)
def test_what_is_run_in_one_call_takes_less_than_ten_minutes(call: tuple[Part, ...]) -> None:
    assert sum(part.budget_s for part in call) < 600


def test_without_numba_only_what_compares_with_the_cpus_kernels_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tests.gpu.run._missing_device", lambda: None)
    monkeypatch.setattr("tests.gpu.run.find_spec", lambda _name: None)
    ran = []

    def performed(part: Part, device: str, match: str | None) -> Done:
        ran.append(part.name)
        return Done(part, 1.0, [Outcome("bits", "passed")])

    monkeypatch.setattr("tests.gpu.run.perform", performed)
    assert main([]) == 0
    assert set(ran) >= {"versions", "nccl", "benchmarks", "kernels"}
    left_out = {part.name for part in PARTS} - set(ran)
    assert left_out == {part.name for part in PARTS if part.needs_numba}
    assert capsys.readouterr().out.count("which need numba") == len(left_out) > 0


@looped("part", PARTS)
def test_every_part_can_be_imported(part: Part) -> None:
    assert callable(import_module(f"tests.gpu.{part.name}").run)


def test_a_part_that_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--only", "kernels,kernel"])
    assert "--only='kernel': choose from graphs, ranks, gpt2, versions, kernels" in capsys.readouterr().err


@pytest.mark.rest
def test_kernel_tests_run_interpreted_and_one_wrong_bit_fails_one_of_them() -> None:
    pytest.importorskip("triton", reason="kernels for devices need Triton")
    command = [sys.executable, "-m", "tests.gpu.run", "--interpret", "--only", "kernels"]
    command += ["--match", "tie_beyond or more_than_one_of_a_chunk"]
    done = run(command, PYTHONPATH="src", PYTEST_PLUGINS="tests.device.wrong_bit")
    assert done.returncode == 1
    assert "of 720 | 1 | 1 | 0 |" in done.stdout
    assert "::test_a_tie_beyond_the_first_tile_of_a_chunk_stays_on_the_left: " in done.stdout


@pytest.mark.rest
def test_ranks_that_share_a_gpu_run_over_gloo_and_write_a_dated_report(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    command = [sys.executable, "-m", "tests.gpu.run", "--interpret", "--only", "ranks", "--out", str(report)]
    done = run([*command, "--match", "killed rank"], PYTHONPATH="src")
    assert done.returncode == 0, done.stdout + done.stderr
    said = report.read_text(encoding="utf-8")
    assert re.match(r"# What does `make gpu` show\? \d{4}-\d\d-\d\d\n\nthe CPU, over gloo", said)
    assert len(re.findall(r"- ranks: a killed rank, \w+: TransportError after [\d.]+ s: ", said)) == 2
    assert "of 1200 | 2 | 0 | 0 |" in said


@pytest.mark.rest
def test_a_check_that_breaks_its_ranks_has_failed_and_the_others_get_new_ones() -> None:
    told: list[Outcome] = []
    scenes = ["before", "breaks", "after"]
    worlds.told_by_worlds(told.append, "tests.device.scenes_worlds", 2, scenes, ranks.judged, 1e9)
    assert [(each.name, each.status) for each in told] == [
        ("before", "passed"),
        ("breaks", "failed"),
        ("after", "passed"),
    ]
    assert told[1].detail.startswith("rank 1: ValueError: out of luck")


def test_checks_that_do_not_fit_into_the_time_are_skipped_by_their_names() -> None:
    told: list[Outcome] = []
    worlds.told_by_worlds(told.append, "tests.device.scenes_worlds", 2, ["a", "b"], ranks.judged, 0.0)
    assert told == [Outcome(name, "skipped", "did not fit into the time") for name in "ab"]


@looped(
    ("wrong", "prints", "said"),
    [
        (("", ""), "xx", ""),
        (("", ""), "xy", "ranks have other parameters than each other"),
        (("", "no gain"), "xx", "rank 1: no gain"),
    ],
)
def test_ranks_with_other_parameters_or_a_fault_have_failed(
    wrong: tuple[str, ...], prints: str, said: str
) -> None:
    found = ranks.judged(
        [{"wrong": each, "digest": mark, "says": ""} for each, mark in zip(wrong, prints, strict=True)]
    )
    assert (found.status, found.detail) == ("failed" if said else "passed", said)


@pytest.mark.parametrize(("status", "code"), [("passed", 0), ("skipped", 0), ("failed", 1)])
def test_the_exit_code_and_the_file_say_whether_something_failed(
    status: Status, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def performed(part: Part, device: str, match: str | None) -> Done:
        return Done(part, 1.0, [Outcome("bits", status, "a reason")])

    monkeypatch.setattr("tests.gpu.run.perform", performed)
    assert main(["--interpret", "--out", str(tmp_path / "table")]) == code
    assert "- kernels: bits: a reason" in (tmp_path / "table").read_text(encoding="utf-8")


def test_a_part_that_crashes_or_does_not_end_has_failed() -> None:
    [crashed] = perform(Part("outcomes", 100.0, "a module without a part in it"), "cpu").outcomes
    assert crashed.status == "failed"
    assert "has no attribute 'run'" in crashed.detail
    [late] = perform(Part("kernels", 0.05, "more than that takes"), "cpu").outcomes
    assert late == Outcome("the part itself", "failed", "had not ended after 0 s")


def test_outcomes_pass_between_processes_and_one_failure_leaves_the_others() -> None:
    def absent() -> None:
        raise Skip("there is none")

    def broken() -> None:
        raise ValueError("two\nlines")

    told: list[Outcome] = []
    each(told.append, {"a": broken, "b": absent, "c": lambda: "4.3 TB/s", "d": lambda: None})
    assert told == [
        Outcome("a", "failed", "ValueError: two\nlines"),
        Outcome("b", "skipped", "there is none"),
        Outcome("c", "passed", "4.3 TB/s"),
        Outcome("d", "passed"),
    ]
    assert [outcome_of(outcome.line() + "\n") for outcome in told] == told
    assert outcome_of("anything else") is None
    text = as_text([Done(Part("versions", 35.0, "versions"), 2.0, told)])
    for line in (
        "- versions: c: 4.3 TB/s",
        "- versions: b: there is none",
        "| versions | 2 of 35 | 2 | 1 | 1 |",
    ):
        assert line in text.splitlines()
    assert text.endswith("1 failed, 1 skipped")


def rank(
    there: str = "x", here: str = "x", skipped: int = 1, comparable: bool = True, device: str | None = "z"
) -> dict[str, Any]:
    return {
        "there": {"digest": there, "skipped": skipped, "placement": "host"},
        "here": {"digest": here, "skipped": 1, "placement": "host"},
        "device": None if device is None else {"digest": device, "skipped": 1, "placement": "device"},
        "comparable": comparable,
    }


@looped(
    ("ranks", "said"),
    [
        ((rank(), rank()), ""),
        ((rank(), rank(there="y")), "than each other"),
        ((rank(), rank(device="y")), "device: ranks have other parameters"),
        ((rank(device=None), rank(device=None)), ""),
        ((rank(here="y"), rank(here="y")), "from the CPU's"),
        ((rank(here="y", comparable=False),), ""),
        ((rank(skipped=0), rank(skipped=0)), "not the one with NaN"),
    ],
)
def test_what_is_wrong_with_a_training_is_said(ranks: tuple[dict[str, Any], ...], said: str) -> None:
    found = processes.difference(ranks)
    assert found == said if not said else said in found


@looped(
    ("code", "said", "status"),
    [
        (0, "1 passed\n========= ERROR SUMMARY: 0 errors", "passed"),
        (faults.FOUND, "========= Invalid __global__ write\n========= ERROR SUMMARY: 1 error", "failed"),
        (1, "1 failed\n========= ERROR SUMMARY: 0 errors", "failed"),
        (1, "========= Error: Device not supported", "skipped"),
        (127, "compute-sanitizer: cannot execute", "skipped"),
    ],
)
def test_what_a_sanitizer_says_is_understood(code: int, said: str, status: str) -> None:
    assert faults.verdict("memcheck", code, said).status == status
