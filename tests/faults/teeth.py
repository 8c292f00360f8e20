"""Does each test of faults fail where the code is wrong? `python -m tests.faults.teeth` makes it so.

Every row is a change of the source in a copy of the tree, and a test that has to fail with it. Each fault of
the table in docs/engineering/reliability.md has one at least. With words as arguments only rows that contain
one of them are tried, such as `fault=12`. Takes about ten seconds a row.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import NamedTuple

from tests.support.ranks import ROOT
from tests.support.source import MODULES, Module

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def definitions() -> tuple[tuple[str, Module, Definition], ...]:
    """Every class and function of the package, as `module:Class.method`, its file and its syntax."""

    def within(module: Module, node: ast.AST, prefix: str) -> Iterator[tuple[str, Module, Definition]]:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, Definition):
                yield f"{prefix}{each.name}", module, each
                yield from within(module, each, f"{prefix}{each.name}.")
            else:
                yield from within(module, each, prefix)

    return tuple(found for module in MODULES for found in within(module, module.tree, f"{module.name}:"))


def planted(where: str, old: str, new: str) -> tuple[Path, str]:
    """A file of the package, and its text with one statement made another.

    `where` is the function, or the end of `module:Class.method`; the file does not matter. `old` is the
    statement as `ast.unparse` spells it, of a compound one the first line, with "…" for any part. In `new`
    each "…" stands for what it stood for in `old`. Raises `ValueError` where not just one statement in the
    package reads so.
    """
    pattern = re.compile("( *)" + "(.*)".join(map(re.escape, old.split("…"))))
    found = [
        (module, node, number, match)
        for name, module, node in definitions()
        if name.endswith((f".{where}", f":{where}"))
        for number, line in enumerate(ast.unparse(node).splitlines())
        if (match := pattern.fullmatch(line))
    ]
    if len(found) != 1:
        raise ValueError(f"mend the row: {where} has {old!r} in {[str(module) for module, *_ in found]}")
    ((module, node, number, match),) = found
    margin, *parts = match.groups()
    for part in parts:
        new = new.replace("…", part, 1)
    lines = ast.unparse(node).splitlines()
    lines[number] = indent(new, margin)
    text = module.path.read_text(encoding="utf-8").splitlines()
    start = min(each.lineno for each in (node, *node.decorator_list)) - 1
    text[start : node.end_lineno] = indent("\n".join(lines), " " * node.col_offset).splitlines()
    return module.path, "\n".join(text) + "\n"


@cache
def tests() -> tuple[tuple[str, frozenset[str]], ...]:
    """Each file of tests, from the root of the tree, and what it defines."""
    return tuple(
        (path.relative_to(ROOT).as_posix(), frozenset(re.findall(r"(?m)^def (\w+)", path.read_text("utf-8"))))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
    )


class Change(NamedTuple):
    """One statement made wrong, as `planted` takes it, and the test that has to fail then.

    `fault` is the number of a fault in docs/engineering/reliability.md, whose promise the change breaks. Of
    the test its name will do, or the end of `path::name` where two are called so.
    """

    fault: int
    what: str
    where: str
    old: str
    new: str
    test: str

    @property
    def path(self) -> str:
        """The file of the test. Raises `ValueError` where none or several have it."""
        *ends, name = self.test.partition("[")[0].split("::")
        found = [path for path, names in tests() if path.endswith(tuple(ends) or "") and name in names]
        if len(found) != 1:
            raise ValueError(f"mend the row: {self.test} is in {found}")
        return found[0]

    @property
    def row(self) -> str:
        """As docs/engineering/reliability.md has it."""
        return f"| {self.fault} | {self.what} | `{self.path}`: `{self.test.rpartition('::')[2]}` |"


CHANGES = (
    Change(
        1,
        "The error of a lost peer does not say where it was.",
        "_progress",
        "raise self.runner.broken",
        "raise TransportError('lost')",
        "test_survivors_of_a_killed_rank_raise_long_before_the_timeout",
    ),
    Change(
        2,
        "gradwire's own group has torch's timeout, not the model's.",
        "_terms",
        "timeout = …_timeout",
        "timeout = None",
        "test_a_stopped_rank_is_noticed_after_the_timeout_and_hears_of_it_when_it_goes_on",
    ),
    Change(
        2,
        "The wait for a verdict never wakes up, and another thread gets the signal.",
        "wait_for",
        "while …:",
        "getattr(__import__('signal'), 'pthread_sigmask')(0, {2})\nwhile not event.wait():",
        "test_ctrl_c_ends_a_rank_that_waits_for_a_stopped_one",
    ),
    Change(
        2,
        "Every rank says its own time for all.",
        "_judge",
        "…row.computing_s…",
        "…step.computing_s…",
        "test_every_rank_hears_how_long_each_of_them_computed",
    ),
    Change(
        3,
        "A rank that fails pays no rounds.",
        "ExchangeRunner._start",
        "owe_zeros(…)",
        "pass",
        "test_an_exception_on_one_rank_is_raised_on_all_and_leaves_no_trace",
    ),
    Change(
        3,
        "A failure is not told to the others.",
        "Verdict.error",
        "failed = …if row.failed]",
        "failed = …if False]",
        "test_backward_raises_on_the_other_ranks_and_names_the_one",
    ),
    Change(
        3,
        "`SystemExit` ends the engine's thread.",
        "ExchangeRunner._start",
        "except BaseException…",
        "except Exception…",
        "test_backward_raises_the_accident_itself_where_it_happened",
    ),
    Change(
        4,
        "A checksum is computed, and not compared.",
        "Sealed.open",
        "sound = …if …]",
        "sound = …if checksum(copy) is not None]",
        "test_a_flipped_bit_is_noticed_on_all_ranks_in_its_step_or_put_right",
    ),
    Change(
        5,
        "Ranks compare only what a message shows.",
        "_pack",
        "digest = …",
        "digest = bytes(_HASH_BYTES)",
        "test_a_difference_beyond_what_is_shown_is_found",
    ),
    Change(
        6,
        "What a file of state says of its own bytes is not compared.",
        "_read",
        "if damaged…:",
        "if False:",
        "test_damage_is_refused_by_type_or_does_no_harm[files]",
    ),
    Change(
        7,
        "A damaged table of exponents ends in an error of no type of ours.",
        "CodeTable.__post_init__",
        "raise WireError(…is {what}…)",
        "raise ValueError(…is {what}…)",
        "test_damage_is_refused_by_type_or_does_no_harm[frames]",
    ),
    Change(
        8,
        "A length that a peer announces is believed.",
        "_length",
        "if not 0 <= length…:",
        "if False:",
        "test_a_length_beyond_the_bound_is_not_believed",
    ),
    Change(
        9,
        "A message does not say to which round and rank it belongs.",
        "Watchman._mark",
        "return …",
        "return 0",
        "test_a_message_of_another_round_or_rank_is_not_taken_for_this_one",
    ),
    Change(
        10,
        "A rank in a call does not look at what others do.",
        "Calls.begin",
        "if board.count(…:",
        "if False:",
        "test_different_calls_are_named_on_all_ranks_and_training_goes_on",
    ),
    Change(
        10,
        "A rank in a step does not look at calls.",
        "Calls.look",
        "self._compare(…)",
        "pass",
        "test_a_call_on_one_rank_while_another_trains_is_named_on_both",
    ),
    Change(
        10,
        "A rank that waits in a call reads what every other wrote.",
        "Calls.begin",
        "if board.count(…:",
        "if True:",
        "test_however_many_ranks_wait_for_one_no_entry_is_read",
    ),
    Change(
        10,
        "A rank that fails between a call's collectives is not told of.",
        "on_all_ranks",
        "require_success(…)",
        "if failure is not None:\n    raise failure",
        "test_a_rank_without_memory_for_what_is_switched_to_is_named_on_all",
    ),
    Change(
        10,
        "What is unsent is forgotten while a rank cannot add it to its gradients.",
        "conclude",
        "prepared = on_all_ranks(…)",
        "prepared = ready()",
        "test_a_call_that_fails_on_one_rank_fails_on_all_and_changes_nothing",
    ),
    Change(
        11,
        "Memory is committed in steps that do not count.",
        "_outcome",
        "if finite:",
        "if True:",
        "test_a_nan_on_one_rank_makes_every_gradient_nan_and_is_forgotten",
    ),
    Change(
        11,
        "After a NaN the mean stays as it is.",
        "_judge",
        "elif …is_plain:",
        "elif False:",
        "laws/test_step.py::test_what_is_not_finite_on_one_rank_reaches_all_and_leaves_no_trace",
    ),
    Change(
        12,
        "A memory takes every gradient that is finite.",
        "judged",
        "bounds = …",
        "bounds = (np.inf, np.inf)",
        "test_finite_gradients_however_large_leave_a_finite_memory",
    ),
    Change(
        13,
        "A part of the memory is lost in every step.",
        "Residual.fold",
        "weights = (…)",
        "weights = (0.99 * …)",
        "test_what_was_delivered_and_what_is_left_add_up_to_what_came",
    ),
    Change(
        14,
        "The guard hears, and says nothing.",
        "Guard.error",
        "if …(_NOT_DUE,) in rows:",
        "if rows:",
        "test_one_bit_on_one_rank_is_noticed_on_all_when_it_is_due",
    ),
    Change(
        15,
        "A rank alone compresses what it sends to nobody.",
        "layout_to_run",
        "if …only_compresses(…):",
        "if False:",
        "test_gradients_are_what_they_are",
    ),
    Change(
        16,
        "Buffers are exchanged as they arrive.",
        "next_turns",
        "while …:",
        "while self._waiting:\n    self._turn = next(iter(self._waiting))",
        "test_the_order_of_arrival_changes_neither_collectives_nor_numbers",
    ),
    Change(
        17,
        "Chosen values of a model in 16 bits travel in 32.",
        "narrow_for",
        "return …",
        "return None",
        "test_no_recipe_sends_more_than_plain_ddp",
    ),
    Change(
        18,
        "A parameter that nothing used is sent like the others.",
        "judged",
        "idle = …",
        "idle = self.gradients < 0",
        "test_an_idle_parameter_keeps_its_memory_and_sends_nothing",
    ),
    Change(
        19,
        "A step counts without the gradients of parameters that were frozen later.",
        "require_all_units",
        "if …:",
        "if False:",
        "test_a_buffer_that_never_comes_fails_the_step",
    ),
    Change(
        19,
        "A parameter that was added after attach is none of gradwire's concern.",
        "_changes",
        "changes.append(…was added…)",
        "pass",
        "test_parameters_that_changed_are_named_on_all_ranks_before_the_next_exchange",
    ),
    Change(
        19,
        "A parameter that is gone counts as carried.",
        "_changes",
        "if id(parameter) not in present:",
        "if False:",
        "test_parameters_that_changed_are_named_on_all_ranks_before_the_next_exchange",
    ),
    Change(
        19,
        "A rank that refuses its changed parameters tells nobody.",
        "refuse_changed",
        "backward.calls.leave(…)",
        "pass",
        "test_a_change_on_one_rank_is_named_on_the_ranks_that_wait",
    ),
    Change(
        20,
        "The module inside Lightning Fabric's wrapper is not looked for.",
        "inside",
        "name = next(… in _INSIDE …)",
        "name = next(… in _INSIDE[:1] …)",
        "test_ddp_is_found_inside_the_wrappers",
    ),
    Change(
        21,
        "A damaged state is refused by its own rank alone.",
        "load",
        "require_agreement(facts | mine, …)",
        "require_agreement(mine if refusal is None else absent, …)",
        "test_a_damaged_state_on_one_rank_is_refused_on_all",
    ),
    Change(
        21,
        "NaN in a loaded memory is taken.",
        "_check_memory",
        "raise ValueError(…NaN…)",
        "return",
        "test_a_damaged_state_is_refused_by_a_rank_alone_and_in_a_list",
    ),
    Change(
        21,
        "Another number of ranks starts with the sum of what was unsent, not the mean.",
        "_mean",
        "…torch.stack([m[name] for m…mean(0)…",
        "…torch.stack([m[name] for m…sum(0)…",
        "test_another_world_starts_with_the_mean_and_leaves_its_own_set_alone",
    ),
    Change(
        22,
        "A rank does not wait until all have written their files.",
        "save",
        "require_success(…)",
        "pass",
        "test_a_rank_that_dies_at_any_act_leaves_the_old_set_or_the_new_one",
    ),
    Change(
        22,
        "A file of state gets its last name before all ranks have written theirs.",
        "save",
        "prepared = ….path(…, _PREPARED)",
        "prepared = ….path(…, _COMMITTED)",
        "test_a_first_save_that_was_cut_off_is_none_and_the_next_one_goes_through",
    ),
    Change(
        23,
        "Places among more than 2^31 elements are counted in 32 bits.",
        "index_type",
        "return …",
        "return torch.int32",
        "test_bits_beyond_31_bits",
    ),
    Change(
        24,
        "The history of steps has no end.",
        "History.__init__",
        "…deque(maxlen=…)",
        "…deque()",
        "test_what_a_process_holds_stays_as_it_is",
    ),
    Change(
        25,
        "A resumed run forgets what was unsent.",
        "_made",
        "…copy_(memory.detach())",
        "pass",
        "test_a_run_with_faults_ends_as_one_without",
    ),
    Change(
        25,
        "What was not sent is forgotten.",
        "_outcome",
        "lane.commit(…)",
        "pass",
        "test_a_run_with_faults_ends_as_one_without",
    ),
)


def fails(change: Change) -> bool:
    """Whether the test fails in a copy of the tree with the change. Raises `ValueError` for an old row."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:  # a late rank may still write
        copy = Path(name)
        for part in ("src", "tests", "examples", "docs"):
            shutil.copytree(ROOT / part, copy / part)
        for path in (ROOT / "pyproject.toml", *ROOT.glob("*.md")):
            shutil.copy2(path, copy)
        path, text = planted(change.where, change.old, change.new)
        (copy / path.relative_to(ROOT)).write_text(text, encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            f"{change.path}::{change.test.rpartition('::')[2]}",
        ]
        environment = {**os.environ, "PYTHONPATH": f"{copy}:{copy / 'src'}"}
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise ValueError(f"{change.test} cannot be run: {done.stdout[-500:]}")
        return done.returncode == 1


def main(words: list[str]) -> int:
    """A table; 1 if a test passes that must fail."""
    toothless = 0
    print("| # | made wrong | test that fails |\n|---|---|---|", flush=True)
    for change in CHANGES:
        if words and not any(word in repr(change) for word in words):
            continue
        bites = fails(change)
        toothless += not bites
        print(change.row if bites else f"**passes**: {change.row}", flush=True)
    return bool(toothless)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
