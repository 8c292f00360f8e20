"""`make test` touches each recipe and each capability: what a page lists has tests there.

A row that is added to one of these tables fails here until it has a test, chosen to fail when the row is no
longer true. A test counts if it is neither left out nor skipped, even if only on some machines.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module

import pytest
import torch

from gradwire import recipes
from gradwire.unit.context import ExchangeContext
from tests.laws import test_step as steps
from tests.process import test_train as training
from tests.support.recipes import EVERY_RECIPE, TRAINS
from tests.support.source import ROOT
from tests.support.tiers import in_make_test

PLAIN_DDP = (
    "process.test_train:test_dense_equals_plain_ddp_bit_for_bit",
    "process.test_hazards:test_dense_gives_the_values_of_plain_ddp",
)
SHARDED = (
    "process.test_sharded:test_dense_is_native_hsdp",
    "process.test_sharded:test_recipes_learn_and_replicas_stay_identical",
)
IN_FEW_BITS = (
    "process.test_fsdp_gathers:test_all_ranks_compute_with_the_same_rounded_weights_and_masters_stay_exact",
    "process.test_fsdp_scatters:test_all_that_is_given_arrives_or_is_unsent",
)
ADVISED = (
    "process.test_advise:test_a_run_is_bit_for_bit_the_one_that_is_not_watched",
    "process.test_advise:test_a_slow_input_pipeline_is_named_first_and_a_script_can_be_stopped",
)
TRACED = (
    "process.test_advise:test_a_trace_of_torch_says_all_that_is_needed",
    "unit.cli.test_advise:test_files_are_traces_by_their_names",
)
UNWRAPPED = (
    "unit.sources.test_unwrap:test_ddp_is_found_inside_the_wrappers",
    "unit.sources.test_unwrap:test_optimizers_are_found_inside_the_wrappers",
)
DILOCO = ("process.test_outer:test_diloco_is_the_paper_s",)
INSIDE = (
    "process.test_outer_sites:test_machines_of_two_ranks_train_as_two_replicas_and_send_the_model_once",
    "process.test_outer_sites:test_machines_compress_between_each_other",
)
KILLED = ("faults.test_members:test_a_killed_member_is_left_out_and_comes_back_healed",)
SCRIPTED = (
    "unit.members.test_round:test_members_that_die_sleep_and_come_back_keep_the_invariant",
    "unit.members.test_round:test_faults_come_in_every_call_of_a_round",
)
BEHIND = ("unit.members.test_round:test_the_ones_behind_and_the_new_ones_are_healed",)
APART = (
    "unit.members.test_round:"
    "test_of_runs_that_have_begun_apart_the_one_that_counts_fewer_steps_is_healed_and_nobody_ends",
    "unit.members.test_round:test_of_rounds_apart_the_one_of_more_steps_counts_and_not_the_later_one",
)
NOT_FINITE = ("faults.test_members:test_a_member_whose_parameters_stay_not_finite_ends_alone",)
SCATTERED = (
    "process.test_fsdp_scatters:test_a_scatter_is_off_by_its_rounding",
    "unit.sources.test_fsdp_coding:test_bytes_per_element_are_those_that_the_page_says",
)
GATHERED_IN_16_BITS = (
    "process.test_fsdp_gathers:test_a_gather_in_bf16_rounds_to_the_nearest_and_leaves_16_bits_as_they_are",
)
LIKE_STOCK = ("process.test_fsdp:test_it_trains_like_stock_fsdp2",)
TOLD = ("process.test_steps:test_a_fixed_recipe_tells_all_that_it_knows",)
METRICS = ("unit.telemetry.test_wire:test_metrics_are_flat_floats_that_agree_with_the_report_and_the_memory",)

TABLES: dict[tuple[str, str], dict[str, tuple[str, ...]]] = {
    ("README.md", "Which line do I write"): {
        "DDP, one rank per machine": PLAIN_DDP,
        "DDP, several GPUs per machine, a slow network between machines": (
            "process.test_nodes:test_dense_on_two_levels_is_dense",
            "process.test_nodes:test_a_recipe_learns_and_its_replicas_are_identical",
        ),
        "DDP, one machine with several GPUs and no NVLink": (
            PLAIN_DDP[0],
            "device.test_streaming:test_whole_steps_never_make_the_host_wait",
        ),
        "FSDP2, a slow network between machines": SHARDED,
        "FSDP2, slow links between all ranks, as in one machine without NVLink": IN_FEW_BITS,
        "sites far apart": DILOCO,
        "sites that come and go": (
            "process.test_members:test_members_that_stay_take_the_rounds_of_replicas_bit_for_bit",
            "unit.members.test_round:test_without_faults_all_is_counted_once_and_nothing_is_lost",
            *KILLED,
        ),
        "sites that reach a bucket, and not each other": (
            "process.test_store:test_rounds_over_a_folder_are_those_of_replicas_bit_for_bit",
            "unit.members.test_bucket:test_members_that_die_at_any_request_keep_the_invariant",
        ),
        "Accelerate, the Hugging Face Trainer, Lightning, Ray Train": UNWRAPPED,
    },
    ("README.md", "Would it help me"): {
        "a run with DDP": ADVISED,
        "traces of `torch.profiler`": TRACED,
        "numbers of a cluster": ("unit.cli.test_planner:test_text_and_file",),
    },
    ("docs/where-it-runs.md", "What can be attached"): {
        "`DistributedDataParallel`": PLAIN_DDP,
        "a module without a wrapper": (
            "process.test_plain:test_parameters_and_buffers_are_those_of_ddp_bit_for_bit",
        ),
        "a module under `fully_shard` (FSDP2)": SHARDED,
        "the same, all of whose links are slow": IN_FEW_BITS,
    },
    # With stand-ins for the frameworks; `make test-integrations` runs the frameworks themselves.
    ("docs/frameworks.md", "In Accelerate, the Hugging Face Trainer, Lightning and Ray Train"): {
        "Accelerate": (
            *UNWRAPPED,
            "unit.sources.test_unwrap:test_the_scaler_comes_along_with_accelerates_optimizer",
            "unit.integrations.test_adapters:test_two_wires_of_one_accelerator_need_a_name_each",
        ),
        "Hugging Face Trainer": (
            "unit.integrations.test_callbacks:test_the_trainer_s_reporters_get_the_metrics_with_the_loss",
            "unit.integrations.test_callbacks:test_the_trainer_s_callback_saves_and_resumes",
        ),
        "Lightning Trainer": (
            "unit.integrations.test_callbacks:test_lightning_s_loggers_get_the_metrics_when_it_logs",
            "unit.integrations.test_callbacks:test_lightning_s_callback_saves_and_resumes",
        ),
        "Lightning Fabric": (
            *UNWRAPPED,
            "process.test_checkpoints:test_rank_0_holds_all_states_and_every_rank_takes_up_its_own",
        ),
        "Ray Train": (
            *UNWRAPPED,
            "process.test_checkpoints:test_every_rank_writes_a_file_and_takes_up_its_own",
        ),
        "`torch.compile`": (
            "process.test_hazards:test_a_compiled_module_trains_as_the_eager_one",
            "unit.sources.test_compiled_steps:test_a_compiled_step_counts_and_has_no_frame_of_ours",
        ),
    },
    ("docs/reference.md", "Commands"): {
        "`gradwire doctor`": ("unit.cli.test_main:test_the_doctor_says_what_is_there",),
        "`gradwire recipes`": (
            "unit.cli.test_recipes:test_the_command_lists_every_recipe_by_its_whole_name",
            "unit.cli.test_recipes:test_a_recipe_is_told_with_its_options_paper_and_use",
            "unit.cli.test_recipes:test_a_group_lists_its_own_recipes_only",
        ),
        "`gradwire advise`": ADVISED + TRACED,
        "`gradwire plan`, `gradwire simulate`": (
            "unit.cli.test_planner:test_text_and_file",
            "unit.cli.test_simulator:test_keys_of_the_document",
        ),
        "`gradwire probe`": (
            "process.test_probe_command:test_two_ranks_probe_their_link_and_the_first_tells",
            "unit.cli.test_probe:test_ranks_that_it_starts_do_what_was_asked",
            "unit.cli.test_probe:test_a_codec_is_measured_printed_and_written",
        ),
        "`gradwire lighthouse`": ("unit.cli.test_main:test_a_lighthouse_says_the_address_that_members_pass",),
        "`gradwire members`": ("unit.cli.test_members:test_a_run_is_shown_in_lines_and_as_a_page",),
        "`gradwire warmup`": (
            "unit.cli.test_warmup:test_all_kernels_by_default",
            "unit.cli.test_warmup:test_those_of_one_recipe",
        ),
        "`gradwire net run`, `gradwire net check`": (
            "process.test_net_run:test_check_says_which_modes_are_possible",
            "process.test_net_run:test_ranks_see_each_other_and_their_bytes_are_counted",
        ),
        "`gradwire bench`": (
            "process.test_bench_command:test_a_recipe_of_one_s_own_is_compared_with_ddp_and_with_no_communication",
            "unit.lab.test_report:test_a_bench_makes_a_page_too",
            "unit.lab.test_settings:test_a_pair_is_a_scatter_and_the_bits_of_gathers",
        ),
        # By contestants that train in no time; `.ci/run` runs the command.
        "`gradwire demo`": (
            "unit.lab.test_demo:test_ddp_gets_the_same_time_then_finishes_its_steps",
            "unit.lab.test_demo:test_the_time_to_ddps_final_loss_is_a_matter_of_the_slow_link",
            "unit.lab.test_report:test_the_page_shows_what_was_chosen_and_among_what",
        ),
        "`gradwire report`": ("unit.lab.test_report:test_the_command_makes_a_page_beside_the_document",),
    },
    ("docs/local-steps.md", "A round"): {
        '`"diloco"`': DILOCO,
        '`"sparseloco"`': ("unit.recipes.test_sparseloco:test_five_steps_are_those_of_the_paper",),
        "any other": (
            "process.test_outer:test_what_came_is_applied_or_left",
            "process.test_outer:test_another_recipe_has_the_outer_optimizer_of_diloco",
        ),
        "any, with `outer=`": (
            "process.test_outer:test_rounds_after_each_step_at_rate_one_are_gradients_averaged_step_by_step",
        ),
    },
    ("docs/local-steps.md", "Who sends"): {
        "a plain module": DILOCO,
        "`DistributedDataParallel` inside a machine": INSIDE,
        "`fully_shard` (FSDP2) inside a machine": INSIDE,
    },
    # Without torchrun, which starts workers again in tests/faults/test_elastic.py.
    ("docs/training.md", "Restarts, and other numbers of workers"): {
        "as many ranks as before, each sees its own file": (
            "process.test_checkpoints:test_every_rank_writes_a_file_and_takes_up_its_own",
            "process.test_state:test_a_resumed_run_ends_where_the_uninterrupted_one_does",
        ),
        "more or fewer ranks, all see all files": (
            "process.test_checkpoints:test_fewer_ranks_start_with_the_mean_and_leave_no_old_files",
            "unit.checkpoint.test_file_set:test_another_world_starts_with_the_mean_and_leaves_its_own_set_alone",
        ),
        "files are lost with a machine": (
            "process.test_checkpoints:test_a_broken_or_missing_file_is_refused_on_all_ranks",
        ),
        'the same, and `wire.load(folder, missing="drop")`': (
            "unit.checkpoint.test_file_set"
            ":test_a_set_that_has_lost_a_file_is_refused_on_all_ranks_unless_that_is_asked_for",
        ),
        "the same, but each node has a folder of its own": (
            "unit.checkpoint.test_file_set"
            ":test_what_is_left_in_folders_of_nodes_is_dropped_to_only_where_all_ranks_see_it",
        ),
    },
    ("docs/elastic.md", "Losses"): {
        "a replica dies": SCRIPTED + KILLED,
        "it dies between the vote and its landing": SCRIPTED,
        "a link is cut during the vote": SCRIPTED,
        "a replica asks too late for the roster": SCRIPTED + BEHIND,
        "members had separate rounds, or separate runs": SCRIPTED + APART,
        "a replica fails by itself, or was not finite in three rounds in a row": SCRIPTED + NOT_FINITE,
        "a replica comes back from a save, behind the others": SCRIPTED + BEHIND,
        "a round fails, and nobody has landed": SCRIPTED,
    },
    ("docs/fsdp2.md", "What is sent"): {
        "the recipe: scatters, `dense`": (
            "process.test_fsdp:test_dense_is_stock_fsdp2_bit_for_bit",
            "process.test_fsdp:test_dense_counts_the_bytes_that_gloo_sends",
        ),
        "the recipe: scatters, `bf16`": SCATTERED,
        "the recipe: scatters, `int8`, `fp8`": SCATTERED,
        "the recipe: scatters, `int4`": (*SCATTERED, *IN_FEW_BITS[1:]),
        "`gather=`, `None`": GATHERED_IN_16_BITS,
        '`gather=`, `"bf16"`': GATHERED_IN_16_BITS,
        '`gather=`, `"int8"`': IN_FEW_BITS[:1],
        '`gather=`, `"exact"`': (
            "process.test_exact:test_every_bit_is_stock_fsdp2s",
            "unit.sources.test_held:test_numbers_come_as_they_are_once_then_changes_or_nothing",
        ),
        "gathers over another group than the mesh's, with `reshard_after_forward=k`": (
            "process.test_fsdp_gathers:test_a_gather_over_another_group_goes_as_it_is_and_the_report_says_so",
        ),
        'gathers of 16-bit values with `gather="bf16"`': GATHERED_IN_16_BITS,
        "scatters of a module of which some parameters have no gradient": (
            "process.test_fsdp_scatters:test_what_is_unsent_waits_where_a_parameter_has_no_gradient",
        ),
    },
    ("docs/fsdp2.md", "What users of ZeRO++ met"): {
        "4852: quantized weights crash in bfloat16": LIKE_STOCK,
        "4886: the loss becomes infinite, and evaluations are worse": (
            *LIKE_STOCK,
            "process.test_fsdp:test_evaluations_between_steps_change_nothing",
        ),
        "4851, 5059: secondary shards (hpZ) go stale": (
            "process.test_fsdp_gathers:test_a_gather_sends_masters_as_they_are_now",
        ),
        "6926: the loss is stuck, and the gradient's norm is 0": (
            "process.test_fsdp:test_norms_of_gradients_are_those_of_stock_fsdp2",
        ),
    },
    ("docs/telemetry.md", "Metrics"): {
        "`bytes_sent`, `bytes_sent_mean`": TOLD,
        "`dense_bytes`": TOLD,
        "`ratio`, `ratio_mean`": TOLD,
        "`backward_s`, `compress_s`, `exposed_s`, `step_s`, each also `_mean`": TOLD,
        "`slowest_rank`, `slowest_computing_s`, `median_computing_s`": TOLD,
        "`share_of_linear`": METRICS,
        "`residual_to_gradient`": METRICS,
        "`step`, `skipped_steps`, `dropped_steps`": TOLD,
        "`health_warnings`": TOLD,
        "`gather_bytes_mean`, `scatter_bytes_mean`": (
            "process.test_fsdp:test_dense_counts_the_bytes_that_gloo_sends",
        ),
        "`memory_bytes`, `compile_s`": TOLD,
        "`link_bytes_per_s`, `link_latency_s`": (
            "unit.telemetry.test_wire:test_a_link_that_is_known_is_told",
        ),
    },
}
"""By page and heading: of each row its tests. They are those of `make test` alone."""

SENTENCES: dict[tuple[str, str], tuple[str, ...]] = {
    ("README.md", "It rejects those whose error-feedback residual exceeds 15 %"): (
        "unit.planning.test_choice:test_where_none_reaches_it_the_fastest_runs",
        "unit.recipes.test_trial:test_a_trial_ends_at_once_when_more_is_late_than_may_be",
        "process.test_train:test_an_adaptive_recipe_decides_alike_on_all_ranks",
    ),
    ("README.md", "If none beats plain all-reduce, gradients travel uncompressed, as in DDP."): (
        "unit.recipes.test_trial:test_dense_comes_back_where_nothing_beats_it_and_a_log_line_says_so",
        "process.test_train:test_auto_stays_with_dense_where_communication_hides_and_measures_no_more",
    ),
    ("README.md", "Compressor state resumes bit for bit from a checkpoint."): (
        "process.test_state:test_a_resumed_run_ends_where_the_uninterrupted_one_does",
    ),
    ("README.md", "NaN and Inf never contaminate it."): (
        "faults.test_status_vote:test_a_nan_on_one_rank_makes_every_gradient_nan_and_is_forgotten",
    ),
    ("README.md", "raises an exception, all others raise one that names it: in the same step"): (
        "faults.test_status_vote:test_backward_raises_on_the_other_ranks_and_names_the_one",
    ),
    ("README.md", "If a rank dies, the others raise once its connection closes"): (
        "faults.test_ranks:test_survivors_of_a_killed_rank_raise_long_before_the_timeout",
    ),
    ("docs/training.md", "`checksums=True` adds a checksum to every message that gradwire sends."): (
        "faults.test_status_vote:test_damaged_bytes_are_noticed_on_all_ranks_in_their_step_and_training_goes_on",
    ),
    ("docs/training.md", "`guard_every=n` compares the parameters of all ranks in every nth step"): (
        "unit.tools.test_guard:test_one_bit_on_one_rank_is_noticed_on_all_when_it_is_due",
    ),
    ("docs/training.md", "With `torch.distributed.checkpoint`, on any number of ranks"): (
        "process.test_state:test_a_dcp_checkpoint_keeps_every_ranks_memory_and_goes_to_another_world",
    ),
    ("docs/where-it-runs.md", "A *placement* says where error feedback and codecs run"): (
        "process.test_placement:test_a_training_by_way_of_the_host_is_the_cpus_bit_for_bit",
        "process.test_placement:test_a_training_on_the_device_is_the_cpus_bit_for_bit",
    ),
    ("docs/choosing.md", '`dense` has the bits of DDP. `gcomp(mode="lossless")` has those of a plain ring'): (
        "process.test_lossless:test_lossless_training_on_two_ranks_is_ddps_bit_for_bit",
    ),
    ("docs/training.md", "[`examples/`](../examples) has loops that run."): (
        "process.test_examples:test_a_training_loop_learns_and_reports",
    ),
    ("CONTRIBUTING.md", "Python blocks run in `tests/process/test_pages.py`"): (
        "process.test_pages:test_a_block_of_the_documents_runs",
    ),
}
"""By page and words of it."""


def rows(page: str, heading: str) -> list[str]:
    """What tells the rows of the tables right below a heading apart: their first cells.

    Where a first cell is empty, because the row goes on with the one above, the second cells belong to it.
    """
    _, found, text = (ROOT / page).read_text(encoding="utf-8").partition(f"# {heading}\n")
    assert found, f"{page} has no heading {heading!r}"
    section = re.split(r"^#", text, maxsplit=1, flags=re.MULTILINE)[0]
    names = []
    for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE):
        cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
        goes_on, first = not all(row[0] for row in cells), ""
        for row in cells:
            first = row[0] or first
            names.append(f"{first}, {row[1]}" if goes_on else first)
    assert names, f"{page} has no table below {heading!r}"
    return names


def left_out(test: str) -> bool:
    """Whether `make test` runs no case of this one, given as module:function."""
    name, _, function = test.partition(":")
    module = import_module(f"tests.{name}")
    return not any(True for _ in in_make_test(module, getattr(module, function)))


@pytest.mark.parametrize(("page", "heading"), TABLES, ids=[f"{heading}, {page}" for page, heading in TABLES])
def test_each_row_of_a_table_has_tests_in_make_test(page: str, heading: str) -> None:
    table = TABLES[page, heading]
    assert rows(page, heading) == list(table)
    assert {name: each for name, tests in table.items() for each in tests if left_out(each)} == {}
    assert all(table.values())


def test_what_sentences_promise_has_tests_in_make_test() -> None:
    for (page, words), tests in SENTENCES.items():
        text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
        assert words in text, page
        assert [each for each in tests if left_out(each)] == [], words


def test_each_recipe_takes_whole_steps_on_threads_in_make_test() -> None:
    cases = in_make_test(steps, steps.test_a_step_agrees_conserves_and_costs_what_it_predicts)
    stepping = {recipes.recipe(EVERY_RECIPE[case["name"]]).name for case in cases}
    assert [name for name in recipes.names() if name not in stepping] == []


def verbs(text: str) -> set[str]:
    """Collectives of a recipe; none of one that has to measure first."""
    built = recipes.recipe(text).build()
    rounds = () if built.next else built.exchange.rounds(4096, torch.float32, ExchangeContext(12, 0, 0, 3))
    return {each.verb for each in rounds}


def test_each_collective_carries_a_training_on_real_ranks_in_make_test() -> None:
    test = training.test_a_recipe_learns_replicas_are_identical_and_bytes_and_the_link_are_agreed
    trained = [case["recipe"] for case in in_make_test(training, test)]
    every, here = (set().union(*map(verbs, texts)) for texts in (TRAINS, trained))
    assert len(every) >= 4
    assert every == here


@pytest.mark.rest
def test_the_tests_of_other_versions_of_torch_are_there() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    done = subprocess.run(
        [*command, "@tests/versions.txt"], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:]
