"""Does each test of faults fail where the code is wrong? `python -m tests.faults.teeth` makes it so.

Every row is a change of the source in a copy of the tree, and a test that has to fail with it. Each fault of
the table in docs/reliability.md has one at least. With words as arguments only rows that contain one of them
are tried, such as `fault=12`. Takes about ten seconds a row.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.support.ranks import ROOT


class Change(NamedTuple):
    """What is made wrong: `old` becomes `new` in `path`, and `test` has to fail.

    `fault` is the number of a fault in docs/reliability.md, whose promise the change breaks.
    """

    fault: int
    what: str
    path: str
    old: str
    new: str
    test: str

    @property
    def row(self) -> str:
        """As docs/reliability.md has it."""
        return f"| {self.fault} | {self.what} | `{self.test.replace('::', '`: `')}` |"


RANKS, VERDICT, CALLS, MODULES = (
    f"tests/faults/test_{name}.py::test_" for name in ("ranks", "verdict", "calls", "modules")
)
SAVING, AGREE, DAMAGED, SWITCHING = (
    f"tests/unit/{path}.py::test_"
    for path in (
        "checkpoint/test_file_set",
        "agreement/test_agree",
        "checkpoint/test_damaged_states",
        "api/test_switch",
    )
)
STEP, ACCIDENT = "tests/laws/test_step.py::test_", "tests/laws/test_step_faults.py::test_"
SOAK, ORDER = "tests/soak/test_soak.py::test_", "tests/laws/test_order.py::test_"
FUZZ = "tests/golden/test_fuzz.py::test_damage_is_refused_by_type_or_does_no_harm"

CHANGES = (
    Change(
        1,
        "The error of a lost peer does not say where it was.",
        "src/gradwire/step/engine.py",
        "raise self.runner.broken",
        'raise TransportError("lost")',
        RANKS + "survivors_of_a_killed_rank_raise_long_before_the_timeout",
    ),
    Change(
        2,
        "gradwire's own group has torch's timeout, not the model's.",
        "src/gradwire/comm/groups.py",
        "timeout = native._get_backend(where).options._timeout",
        "timeout = None",
        RANKS + "a_stopped_rank_is_noticed_after_the_timeout_and_hears_of_it_when_it_goes_on",
    ),
    Change(
        2,
        "The wait for a verdict never wakes up, and another thread gets the signal.",
        "src/gradwire/step/worker.py",
        "    while not event.wait(_AWAKE_S):",
        "    __import__('signal').pthread_sigmask(0, {2})\n    while not event.wait():",
        RANKS + "ctrl_c_ends_a_rank_that_waits_for_a_stopped_one",
    ),
    Change(
        2,
        "Every rank says its own time for all.",
        "src/gradwire/step/engine.py",
        "tuple(row.computing_s for row in verdict.rows)",
        "tuple(step.computing_s for row in verdict.rows)",
        "tests/unit/step/test_step.py::test_every_rank_hears_how_long_each_of_them_computed",
    ),
    Change(
        3,
        "A rank that fails pays no rounds.",
        "src/gradwire/step/runner.py",
        "owe_zeros(task.comm, task.agreed[len(task.comm.rounds) :], task.x.device)",
        "pass",
        ACCIDENT + "an_exception_on_one_rank_is_raised_on_all_and_leaves_no_trace",
    ),
    Change(
        3,
        "A failure is not told to the others.",
        "src/gradwire/step/verdict.py",
        "if row.failed]",
        "if False]",
        VERDICT + "backward_raises_on_the_other_ranks_and_names_the_one",
    ),
    Change(
        3,
        "`SystemExit` ends the engine's thread.",
        "src/gradwire/step/runner.py",
        """        except BaseException as error:
            step.fail(error, f"encode of {task.label}", self._rank)""",
        """        except Exception as error:
            step.fail(error, f"encode of {task.label}", self._rank)""",
        VERDICT + "backward_raises_the_accident_itself_where_it_happened",
    ),
    Change(
        4,
        "A checksum is computed, and not compared.",
        "src/gradwire/comm/checksums.py",
        "_CHECK.unpack(check)[0] == checksum(copy) ^ mark]",
        "checksum(copy) is not None]",
        "tests/laws/test_damage.py::test_a_flipped_bit_is_noticed_on_all_ranks_in_its_step_or_put_right",
    ),
    Change(
        5,
        "Ranks compare only what a message shows.",
        "src/gradwire/agreement/agree.py",
        "digest = hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()",
        "digest = bytes(_HASH_BYTES)",
        AGREE + "a_difference_beyond_what_is_shown_is_found",
    ),
    Change(
        6,
        "What a file of state says of its own bytes is not compared.",
        "src/gradwire/checkpoint/file_set.py",
        "    if damaged is not None:",
        "    if False:",
        FUZZ + "[files]",
    ),
    Change(
        7,
        "A damaged table of exponents ends in an error of no type of ours.",
        "src/gradwire/codec/gcomp/table.py",
        """            raise WireError(
                f"a table of exponents is""",
        """            raise ValueError(
                f"a table of exponents is""",
        FUZZ + "[frames]",
    ),
    Change(
        8,
        "A length that a peer announces is believed.",
        "src/gradwire/exchange/ring.py",
        "if not 0 <= length <= self._bound or length % 8:",
        "if False:",
        "tests/unit/exchange/test_ring.py::test_a_length_beyond_the_bound_is_not_believed",
    ),
    Change(
        9,
        "A message does not say to which round and rank it belongs.",
        "src/gradwire/comm/checksums.py",
        "return ((self.number << 20) + sender) * _SPREAD % 2**64",
        "return 0",
        "tests/unit/comm/test_checksums.py::test_a_message_of_another_round_or_rank_is_not_taken_for_this_one",
    ),
    Change(
        10,
        "A rank in a call does not look at what others do.",
        "src/gradwire/agreement/calls.py",
        "if board.count(page, 0) > board.count(mark, 0):",
        "if False:",
        CALLS + "different_calls_are_named_on_all_ranks_and_training_goes_on",
    ),
    Change(
        10,
        "A rank in a step does not look at calls.",
        "src/gradwire/agreement/calls.py",
        "        self._compare(mine, entries, self._board.rank)",
        "        pass",
        CALLS + "a_call_on_one_rank_while_another_trains_is_named_on_both",
    ),
    Change(
        10,
        "A rank that waits in a call reads what every other wrote.",
        "src/gradwire/agreement/calls.py",
        "if board.count(page, 0) > board.count(mark, 0):",
        "if True:",
        "tests/unit/agreement/test_calls.py::test_however_many_ranks_wait_for_one_no_entry_is_read",
    ),
    Change(
        10,
        "A rank that fails between a call's collectives is not told of.",
        "src/gradwire/agreement/agree.py",
        "    require_success(failure, what, comm)\n    return found",
        "    if failure is not None:\n        raise failure\n    return found",
        SWITCHING + "a_rank_without_memory_for_what_is_switched_to_is_named_on_all",
    ),
    Change(
        10,
        "What is unsent is forgotten while a rank cannot add it to its gradients.",
        "src/gradwire/_api/wire.py",
        'prepared = on_all_ranks(ready, "add what is unsent to its gradients", engine.env.control)',
        "prepared = ready()",
        CALLS + "a_call_that_fails_on_one_rank_fails_on_all_and_changes_nothing",
    ),
    Change(
        11,
        "Memory is committed in steps that do not count.",
        "src/gradwire/step/engine.py",
        """        if finite:
            for lane in self.layout.lanes:""",
        """        if True:
            for lane in self.layout.lanes:""",
        VERDICT + "a_nan_on_one_rank_makes_every_gradient_nan_and_is_forgotten",
    ),
    Change(
        11,
        "After a NaN the mean stays as it is.",
        "src/gradwire/step/engine.py",
        "elif self.env.sharded or not self.layout.is_plain:",
        "elif False:",
        STEP + "what_is_not_finite_on_one_rank_reaches_all_and_leaves_no_trace",
    ),
    Change(
        12,
        "A memory takes every gradient that is finite.",
        "src/gradwire/kernels/cpu/folding.py",
        "bounds = (LARGEST_GRADIENT, LARGEST_SUM) if remembers else (np.inf, np.inf)",
        "bounds = (np.inf, np.inf)",
        STEP + "finite_gradients_however_large_leave_a_finite_memory",
    ),
    Change(
        13,
        "A part of the memory is lost in every step.",
        "src/gradwire/memory.py",
        "weights = self.coefficient(step), grads.scale",
        "weights = 0.99 * self.coefficient(step), grads.scale",
        "tests/laws/test_memory.py::test_what_was_delivered_and_what_is_left_add_up_to_what_came",
    ),
    Change(
        14,
        "The guard hears, and says nothing.",
        "src/gradwire/agreement/guard.py",
        "if len(told) == 1 or (_NOT_DUE,) in told:",
        "if told:",
        "tests/unit/agreement/test_guard.py::test_one_bit_on_one_rank_is_noticed_on_all_when_it_is_due",
    ),
    Change(
        15,
        "A rank alone compresses what it sends to nobody.",
        "src/gradwire/step/engine.py",
        "if self.env.alone and only_compresses(aim):",
        "if False:",
        "tests/unit/step/test_alone.py::test_gradients_are_what_they_are",
    ),
    Change(
        16,
        "Buffers are exchanged as they arrive.",
        "src/gradwire/step/step.py",
        """        while self._turn in self._waiting:
            arrival = self._waiting.pop(self._turn)""",
        """        while self._waiting:
            arrival = self._waiting.popitem()[1]""",
        ORDER + "the_order_of_arrival_changes_neither_collectives_nor_numbers",
    ),
    Change(
        17,
        "Chosen values of a model in 16 bits travel in 32.",
        "src/gradwire/step/arena.py",
        "return self.dtype if is_shorter and not memory.whole else None",
        "return None",
        "tests/laws/test_sixteen_bits.py::test_no_recipe_sends_more_than_plain_ddp",
    ),
    Change(
        18,
        "A parameter that nothing used is sent like the others.",
        "src/gradwire/kernels/cpu/folding.py",
        "idle = self.gradients == 0",
        "idle = self.gradients < 0",
        STEP + "an_idle_parameter_keeps_its_memory_and_sends_nothing",
    ),
    Change(
        19,
        "A step counts without the gradients of parameters that were frozen later.",
        "src/gradwire/step/step.py",
        "if self._waiting or complete != sum(len(lane.units) for lane in lanes):",
        "if False:",
        ORDER + "a_buffer_that_never_comes_fails_the_step",
    ),
    Change(
        19,
        "A parameter that was added after attach is none of gradwire's concern.",
        "src/gradwire/sources/same_parameters.py",
        '                changes.append(f"{name!r} was added")',
        "                pass",
        MODULES + "parameters_that_changed_are_named_on_all_ranks_before_the_next_exchange",
    ),
    Change(
        19,
        "A parameter that is gone counts as carried.",
        "src/gradwire/sources/same_parameters.py",
        "            if id(parameter) not in present:\n",
        "            if False:\n",
        MODULES + "parameters_that_changed_are_named_on_all_ranks_before_the_next_exchange",
    ),
    Change(
        19,
        "A rank that refuses its changed parameters tells nobody.",
        "src/gradwire/sources/observe.py",
        '        backward.calls.leave(f"a forward pass that it refuses ({error})")',
        "        pass",
        MODULES + "a_change_on_one_rank_is_named_on_the_ranks_that_wait",
    ),
    Change(
        20,
        "The module inside Lightning Fabric's wrapper is not looked for.",
        "src/gradwire/_api/unwrap.py",
        '_INSIDE = ("_orig_mod", "_forward_module")',
        '_INSIDE = ("_orig_mod",)',
        "tests/unit/api/test_unwrap.py::test_ddp_is_found_inside_the_wrappers",
    ),
    Change(
        21,
        "A damaged state is refused by its own rank alone.",
        "src/gradwire/checkpoint/state.py",
        "        require_agreement(facts | mine, engine.env.control)",
        "        require_agreement(mine if refusal is None else absent, engine.env.control)",
        DAMAGED + "a_damaged_state_on_one_rank_is_refused_on_all",
    ),
    Change(
        21,
        "NaN in a loaded memory is taken.",
        "src/gradwire/checkpoint/validate.py",
        'raise ValueError(f"{what} has NaN, Inf or numbers that are too large to be remembered")',
        "return",
        DAMAGED + "a_damaged_state_is_refused_by_a_rank_alone_and_in_a_list",
    ),
    Change(
        21,
        "Another number of ranks starts with the sum of what was unsent, not the mean.",
        "src/gradwire/checkpoint/state.py",
        "torch.stack([m[name] for m in memories]).mean(0)",
        "torch.stack([m[name] for m in memories]).sum(0)",
        SAVING + "another_world_starts_with_the_mean_and_leaves_its_own_set_alone",
    ),
    Change(
        22,
        "A rank does not wait until all have written their files.",
        "src/gradwire/checkpoint/file_set.py",
        'require_success(failure, "save its state, and what was saved before is still there", control)',
        "pass",
        SAVING + "a_rank_that_dies_at_any_act_leaves_the_old_set_or_the_new_one",
    ),
    Change(
        22,
        "A file of state gets its last name before all ranks have written theirs.",
        "src/gradwire/checkpoint/file_set.py",
        "prepared = fresh.path(folder, rank, _PREPARED)",
        "prepared = fresh.path(folder, rank, _COMMITTED)",
        SAVING + "a_first_save_that_was_cut_off_is_none_and_the_next_one_goes_through",
    ),
    Change(
        23,
        "Places among more than 2^31 elements are counted in 32 bits.",
        "src/gradwire/kernels/reference/places.py",
        "return torch.int32 if numel <= 2**31 else torch.int64",
        "return torch.int32",
        "tests/unit/kernels/test_large.py::test_bits_beyond_31_bits",
    ),
    Change(
        24,
        "The history of steps has no end.",
        "src/gradwire/telemetry/history.py",
        "deque(maxlen=WINDOW)",
        "deque()",
        SOAK + "what_a_process_holds_stays_as_it_is",
    ),
    Change(
        25,
        "A resumed run forgets what was unsent.",
        "src/gradwire/checkpoint/state.py",
        "spec.shaped(layout.memory(name, plane)).copy_(memory.detach())",
        "pass",
        SOAK + "a_run_with_faults_ends_as_one_without",
    ),
    Change(
        25,
        "What was not sent is forgotten.",
        "src/gradwire/step/engine.py",
        "lane.commit(slot for owner, slots in step.idle if owner is lane for slot in slots())",
        "pass",
        SOAK + "a_run_with_faults_ends_as_one_without",
    ),
)


def fails(change: Change) -> bool:
    """Whether the test fails in a copy of the tree with the change. Raises `ValueError` for an old row."""
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for part in ("src", "tests", "examples", "docs"):
            shutil.copytree(ROOT / part, copy / part)
        for path in (ROOT / "pyproject.toml", *ROOT.glob("*.md")):
            shutil.copy2(path, copy)
        target = copy / change.path
        text = target.read_text(encoding="utf-8")
        if text.count(change.old) != 1:
            raise ValueError(f"{change.path} has {text.count(change.old)} times {change.old!r}: mend the row")
        target.write_text(text.replace(change.old, change.new), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", change.test]
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
