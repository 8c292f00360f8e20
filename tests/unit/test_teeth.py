"""The gate of planted faults: what is drawn, how it is judged, and what is kept of it."""

from __future__ import annotations

import ast
import builtins
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.looped import looped
from tests.support.source import ROOT
from tests.teeth import __main__ as gate
from tests.teeth import copies, judging, mutants, recording, report, seams
from tests.teeth.mutants import Fault
from tests.teeth.planted import planted
from tests.teeth.recording import Item

PATHS = ("src/gradwire/memory.py", "src/gradwire/step/status_vote.py", "src/gradwire/kernels/cpu/blocks.py")
MEMORY = PATHS[0]
MIXES = "tests/unit/test_memory.py::test_low_pass_mixes_the_old_memory_with_what_is_left"


def _in(body: str) -> list[str]:
    source = f"def f(x, y: int = 1) -> int:\n    {body}\n"
    return [place.new for place in mutants.places("src/gradwire/f.py", source.encode())]


@looped(
    ("body", "wrong"),
    [
        ("return x", ["return None"]),
        ("x < y", ["(x <= y)"]),
        ("x - y", ["(x + y)"]),
        ("x += y", ["x -= y", "pass"]),
        ("x and not y", ["(x or not y)", "(y)"]),
        ("g(1, 2.0)", ["pass", "(g(2.0, 1))", "(2)", "(4.0)"]),
        ("x.a = True", ["pass", "(False)"]),
        ("x if y else 0", ["(not y)", "(1)"]),
        ("[e for e in x if e]", ["(not e)"]),
        ("raise ValueError(x + 1)", ["pass"]),
        ("warnings.warn(f'{x + 1}', stacklevel=2)", ["pass"]),
        ("a: tuple[int, 3] = x", []),
        ("'text' + x", []),
        ("zip(x, strict=True)", ["pass"]),
        ("min(x, y) + torch.minimum(y, x)", ["(min(x, y) - torch.minimum(y, x))"]),
    ],
)
def test_each_part_of_a_body_has_its_ways_to_be_wrong(body: str, wrong: list[str]) -> None:
    assert _in(body) == wrong


def test_a_seed_draws_the_same_faults_and_another_seed_draws_others() -> None:
    def names(seed: str) -> list[str]:
        return [fault.name for fault in islice(mutants.drawn(seed, 15, PATHS), 20)]

    assert names("one") == names("one")
    assert set(names("one")) != set(names("two"))


def test_few_faults_are_drawn_in_kernels_that_are_compiled() -> None:
    rooms = [fault.room for fault in mutants.drawn("one", 3, PATHS)]
    assert rooms.count(mutants.COMPILED) == 3


def test_a_fault_changes_one_body_and_no_signature() -> None:
    def signatures(text: str) -> list[str]:
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
        return [ast.dump(ast.Tuple([*node.args.defaults, *node.decorator_list])) for node in nodes]

    for fault in islice(mutants.drawn("one", 15, PATHS), 40):
        before = (ROOT / fault.path).read_text(encoding="utf-8")
        outer = {name for name in mutants.changed(before, fault.text) if fault.function.endswith(f":{name}")}
        assert outer, fault
        assert signatures(before) == signatures(fault.text), fault


def test_a_fault_keeps_its_name_when_lines_move() -> None:
    source = (ROOT / MEMORY).read_bytes()
    moved = source.replace(b"\nclass Residual", b"\n\n# More.\n\nclass Residual")
    assert moved != source
    now, then = (mutants.places(MEMORY, each) for each in (source, moved))
    assert [(each.function, each.change, each.number) for each in now] == [
        (each.function, each.change, each.number) for each in then
    ]


def test_sixty_faults_are_planted_by_hand() -> None:
    faults = seams.faults()
    assert len({fault.name for fault in faults}) == 60
    for fault in faults:
        before, after = ((ROOT / fault.path).read_text(encoding="utf-8"), fault.text)
        assert before != after
        assert _names(after) - _names(before) <= set(dir(builtins)), fault.change  # fails for what it says


def _names(source: str) -> set[str]:
    """Variables and attributes."""
    nodes = ast.walk(ast.parse(source))
    return {
        each.id if isinstance(each, ast.Name) else each.attr
        for each in nodes
        if isinstance(each, ast.Name | ast.Attribute)
    }


@looped(
    ("where", "old"),
    [
        ("Reducer.no_such_method", "except …:"),
        ("Reducer._start", "no such statement"),
        ("Reducer._start", "except …:"),  # two of them
        ("__init__", "self.…"),  # of many classes
    ],
)
def test_a_row_that_does_not_name_one_statement_is_refused(where: str, old: str) -> None:
    with pytest.raises(ValueError, match="mend the row"):
        planted(where, old, "pass")


def test_only_the_statement_changes() -> None:
    path, text = planted("Reducer._start", "except BaseException as …:", "except Exception as …:")
    lines = (ast.unparse(ast.parse(each)).splitlines() for each in (path.read_text(encoding="utf-8"), text))
    both = [(old.strip(), new.strip()) for old, new in zip(*lines, strict=True)]
    changed = [(old, new) for old, new in both if old != new]
    assert changed == [("except BaseException as error:", "except Exception as error:")]


def _item(test: str = MIXES, tier: str = "test") -> Item:
    return Item(test, tier, 0.01, frozenset())


def _with(old: str, new: str) -> Fault:
    text = (ROOT / MEMORY).read_text(encoding="utf-8")
    assert text.count(old) == 1
    return Fault(MEMORY, f"{MEMORY}:LowPass.update", f"{old} → {new}", text.replace(old, new))


@pytest.mark.rest
def test_a_fault_is_killed_by_the_test_that_fails() -> None:
    verdict = judging.judged(_with("if self.beta < 1.0:", "if self.beta > 1.0:"), [_item()])
    assert (verdict.state, verdict.tier, verdict.by) == ("killed", "test", MIXES)


@pytest.mark.rest
def test_a_hang_is_a_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "HANGS_S", 2.0)
    fault = _with("if self.beta < 1.0:", "while self.beta < 1.0:")
    verdict = judging.judged(fault, [_item()])
    assert (verdict.state, verdict.by) == ("killed", MIXES)


@pytest.mark.rest
def test_what_no_test_notices_survives() -> None:
    verdict = judging.judged(_with("if self.beta < 1.0:", "if self.beta != 1.0:"), [_item()], smoke=True)
    assert (verdict.state, verdict.ran) == ("survived", 1)


@pytest.mark.rest
def test_the_process_that_starts_others_ends_with_this_one_and_leaves_nothing_open(tmp_path: Path) -> None:
    asks = "Copy(Path(sys.argv[1]), {'PYTHONPATH': ''}).run(['this'], 60.0)"
    code = f"import sys; from pathlib import Path; from tests.teeth.copies import Copy; print({asks})"
    root = tmp_path / "tree"
    root.mkdir()
    ended = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", code, root],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == ("0\n", "")
    assert "Zen" in (tmp_path / "output").read_text(encoding="utf-8")


@looped(
    ("said", "runs"),
    [
        ("b", [["a", "b", "c"], ["b"], ["a", "c"]]),
        ("b (hangs)", [["a", "b", "c"], ["b"], ["a", "c"]]),
        ("collection (hangs)", [["a", "b", "c"], ["a", "b", "c"]]),
    ],
)
def test_a_test_that_fails_or_hangs_once_has_done_so_for_another_reason(
    said: str, runs: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = list[list[str]]()

    def failed(_copy: Any, tests: list[Item], _left_s: float) -> tuple[str, bool]:
        ran.append([each.test for each in tests])
        return (said if len(ran) == 1 else ""), True

    monkeypatch.setattr(judging, "_failed", failed)
    items = [_item("a"), _item("b"), _item("c")]
    assert judging.judged(_with("if self.beta < 1.0:", "if True:"), items).state == "survived"
    assert ran == runs


def test_each_tier_tries_as_many_rows_as_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = list[tuple[str, str]]()

    def failed(copy: copies.Copy, tests: list[Item], _left_s: float) -> tuple[str, bool]:
        ran.extend((each.test, copy.environment["GRADWIRE_LAWS"]) for each in tests)
        return "", True

    monkeypatch.setattr(judging, "_failed", failed)
    judging.judged(
        _with("if self.beta < 1.0:", "if True:"), [_item("b", "all"), _item("a"), _item("a", "all")]
    )
    assert ran == [("a", "few"), ("b", "sample"), ("a", "sample")]
    rows = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"TABLES := {' '.join(recording.TABLES)}\n" in rows


@looped(
    ("tier", "file", "words"),
    [
        ("test", "tests/laws/test_step.py", ["-m", "not rest"]),
        ("all", "tests/laws/test_step.py", []),
        ("all", "tests/process/test_train.py", ["-m", "rest"]),
    ],
)
def test_each_tier_runs_the_tests_of_its_command(tier: str, file: str, words: list[str]) -> None:
    assert recording.words(tier, file) == words


@pytest.mark.rest
def test_a_recording_says_which_tests_enter_a_function(tmp_path: Path) -> None:
    file, beside = MIXES.partition("::")[0], "tests/unit/test_tiers.py"
    (_, tests, passed), (_, _, others) = recording.record([file, beside], "test", tmp_path)
    assert tests == passed > 10
    assert others > 0
    assert recording.is_recorded(file, "test", tmp_path)
    assert not recording.is_recorded(file, "all", tmp_path)
    items = recording.recorded(tmp_path)
    entering = [each.test for each in recording.covering(f"{MEMORY}:LowPass.update", items)]
    assert MIXES in entering
    assert len(entering) < passed
    recording.keep_fastest(tmp_path, tmp_path / "fastest.json")
    few = recording.fastest(tmp_path / "fastest.json")
    assert entering[0] in [each.test for each in recording.covering(f"{MEMORY}:LowPass.update", few)]


def test_of_the_fastest_tests_those_that_are_gone_take_no_part(tmp_path: Path) -> None:
    written = tmp_path / "fastest.json"
    name = test_of_the_fastest_tests_those_that_are_gone_take_no_part.__name__
    here, gone = "tests/unit/test_teeth.py", "tests/unit/test_gone.py"
    tests = {here: {f"{name}[a-1]": 0.1, f"{name}_too": 0.1}, gone: {name: 0.1}}
    written.write_text(json.dumps({"tests": tests, "functions": {MEMORY: {"f": [0, 1], "g": [2]}}}))
    expected = Item(f"{here}::{name}[a-1]", "test", 0.1, frozenset({f"{MEMORY}:f"}))
    assert recording.fastest(written) == [expected]


def test_a_sample_tries_the_other_tests_of_a_file_after_those_that_enter_a_function() -> None:
    items = [
        recording.Item(f"tests/{name}", "test", seconds, frozenset(enters))
        for name, seconds, enters in (
            ("a.py::test_slow", 2.0, ()),
            ("a.py::test_enters", 0.1, ("src/gradwire/planning/ratio.py:_part",)),
            ("b.py::test_elsewhere", 0.1, ()),
            ("a.py::test_near", 1.0, ("src/gradwire/planning/ratio.py:gains",)),
        )
    ]
    first = recording.covering("src/gradwire/planning/ratio.py:_part", items)
    assert [each.test for each in first] == ["tests/a.py::test_enters"]
    assert [each.test for each in recording.beside(first, items)] == [
        "tests/a.py::test_near",
        "tests/a.py::test_slow",
    ]


def test_files_that_are_not_recorded_keep_their_fastest_tests(tmp_path: Path) -> None:
    name = test_files_that_are_not_recorded_keep_their_fastest_tests.__name__
    here, other = "tests/unit/test_teeth.py", MIXES.partition("::")[0]
    mixes, update = MIXES.partition("::")[2], f"{MEMORY}:LowPass.update"
    written = tmp_path / "fastest.json"
    tests = {here: {"test_sixty_faults_are_planted_by_hand": 0.1}, other: {mixes: 0.2}}
    written.write_text(
        json.dumps({"tests": tests, "functions": {MEMORY: {"LowPass.update": [0, 1], "f": [1]}}})
    )
    path = tmp_path / "recorded" / "test" / "tests" / "unit" / "test_teeth.json"
    path.parent.mkdir(parents=True)
    item = {"test": f"{here}::{name}", "seconds": 0.3, "passed": True, "set": 0}
    found = {"digest": "", "items": [item], "functions": [update], "sets": [[0]], "collected": []}
    path.write_text(json.dumps(found), encoding="utf-8")
    recording.keep_fastest(tmp_path / "recorded", written)
    assert recording.fastest(written) == [
        Item(MIXES, "test", 0.2, frozenset({update})),  # `f` is gone
        Item(f"{here}::{name}", "test", 0.3, frozenset({update})),
    ]


def test_a_file_of_tests_none_of_which_is_among_the_fastest_is_known_once_it_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, slow = "tests/unit/test_teeth.py", "tests/unit/test_tiers.py"
    written = tmp_path / "fastest.json"
    written.write_text(json.dumps({"tests": {}, "functions": {}}))
    monkeypatch.setattr(recording, "FASTEST", written)
    assert recording.new([here, slow]) == [here, slow]
    path = tmp_path / "recorded" / "test" / "tests" / "unit" / "test_tiers.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"digest": "", "items": [], "functions": [], "sets": [], "collected": []}))
    recording.keep_fastest(tmp_path / "recorded", written)
    assert recording.new([here, slow]) == [here]
    path.unlink()
    recording.keep_fastest(tmp_path / "recorded", written)
    assert recording.new([here, slow]) == [here]


def test_the_list_of_fastest_tests_is_not_out_of_date() -> None:
    files = json.loads(recording.FASTEST.read_text(encoding="utf-8"))["tests"]
    again = "write it anew: make teeth ARGS='--tier test --record --keep-fastest'"
    assert len(recording.fastest()) > 0.75 * sum(map(len, files.values())), again


def test_compiled_functions_are_entered_with_those_that_use_them() -> None:
    cpu = "src/gradwire/kernels/cpu"
    item = Item("t", "test", 1.0, frozenset({f"{cpu}/blocks.py:encode_blocks"}))
    assert recording.covering(f"{cpu}/blocks.py:_largest_bits", [item]) == [item]
    assert recording.covering(f"{cpu}/topk.py:topk_indices", [item]) == []
    # All functions of `frames`, which uses this one, are compiled: the file that calls them stands for it.
    item = Item("t", "test", 1.0, frozenset({"src/gradwire/kernels/frames.py:encode_chunks"}))
    assert recording.covering(f"{cpu}/huffman.py:encode_stream", [item]) == [item]


def test_a_run_goes_on_where_it_was_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()

    def judged(fault: Fault, *_: Any, **__: Any) -> judging.Verdict:
        asked.append(fault.name)
        state = ["smoke", "killed", "survived"][len(asked) % 3]
        return judging.Verdict(state, "test" if state == "killed" else "all", ran=3)

    def drawn(seed: str, compiled: int) -> Iterator[Fault]:
        return mutants.drawn(seed, compiled, PATHS)

    everything = frozenset(each.function for path in PATHS for each in _places(path))
    monkeypatch.setattr(recording, "recorded", lambda: [Item("t", "test", 1.0, everything)])
    monkeypatch.setattr(judging, "judged", judged)
    monkeypatch.setattr(gate, "drawn", drawn)
    results, table = tmp_path / "results.jsonl", tmp_path / "table.md"
    words = ["--as-recorded", "--seed", "x", "--results", str(results), "--report", str(table)]
    assert gate.main([*words, "--count", "2"]) == 1
    begun = len(asked)
    assert gate.main([*words, "--count", "4"]) == 1
    assert len(set(asked)) == len(asked) > begun
    assert gate.main([*words, "--count", "4"]) == 1
    rows = report.read(results)
    assert list(rows) == asked
    assert len([row for row in rows.values() if row["state"] != "smoke"]) == 4
    assert "| **all** | 4 | 2 | 0 | 2 | 0 |" in table.read_text(encoding="utf-8")


def test_a_fault_that_the_fastest_tests_do_not_notice_is_undecided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = list[list[str]]()

    def judged(_fault: Fault, covering: list[Item], *_: Any, **__: Any) -> judging.Verdict:
        asked.append([each.test for each in covering])
        return judging.Verdict("survived", "test", ran=2)

    everything = frozenset(each.function for path in PATHS for each in _places(path))
    items = [Item("a.py::enters", "test", 1.0, everything), Item("a.py::near", "test", 0.1, frozenset())]
    monkeypatch.setattr(gate, "drawn", lambda seed, compiled: mutants.drawn(seed, compiled, PATHS))
    monkeypatch.setattr(recording, "fastest", lambda: items)
    monkeypatch.setattr(judging, "judged", judged)
    results = tmp_path / "results.jsonl"
    words = ["--fastest", "--seed", "x", "--count", "1", "--results", str(results)]
    assert gate.main([*words, "--report", str(tmp_path / "table.md")]) == 0
    assert asked == [["a.py::enters", "a.py::near"]]
    assert [row["state"] for row in report.read(results).values()] == ["undecided"]


@looped(
    ("states", "code"),
    [
        (["survived", "survived"], 1),
        (["survived", "killed"], 0),
        (["survived", "undecided"], 0),
        (["survived"], 0),  # there was no time for another one
    ],
)
def test_a_sample_fails_only_where_tests_do_not_test(
    states: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list(states)

    def judged(*_: Any, **__: Any) -> judging.Verdict:
        return judging.Verdict(left.pop(0))

    def drawn(seed: str, compiled: int) -> Iterator[Fault]:
        return mutants.drawn(seed, compiled, PATHS)

    everything = frozenset(each.function for path in PATHS for each in _places(path))
    clock = SimpleNamespace(monotonic=lambda: 0.0 if left else 1e9)
    monkeypatch.setattr(gate, "time", clock)
    monkeypatch.setattr(recording, "fastest", lambda: [Item("t", "test", 1.0, everything)])
    monkeypatch.setattr(judging, "judged", judged)
    monkeypatch.setattr(gate, "drawn", drawn)
    assert gate.main(["--count", "2", "--seed", "x", "--minutes", "6"]) == code


def _places(path: str) -> tuple[mutants.Place, ...]:
    return mutants.places(path, (ROOT / path).read_bytes())
