"""`make test` touches each recipe and each capability: of the tests of each, one carries no mark `rest`."""

from __future__ import annotations

import re
from importlib import import_module

import torch

from gradwire import recipes
from gradwire.step.context import ExchangeContext
from tests.laws import test_step as steps
from tests.process import test_train as training
from tests.support.recipes import EVERY_RECIPE, TRAINS
from tests.support.source import ROOT
from tests.support.tiers import in_make_test

WRITTEN = {
    "DDP, one rank per machine": (
        "process.test_train:test_dense_equals_plain_ddp_bit_for_bit",
        "process.test_hazards:test_dense_gives_the_values_of_plain_ddp",
    ),
    "DDP, several GPUs per machine, a slow network between machines": (
        "process.test_nodes:test_dense_on_two_levels_is_dense",
        "process.test_nodes:test_a_recipe_learns_and_its_replicas_are_identical",
    ),
    "DDP, one machine with several GPUs and no NVLink": (
        "process.test_train:test_dense_equals_plain_ddp_bit_for_bit",
        "device.test_streaming:test_whole_steps_never_make_the_host_wait",
    ),
    "FSDP2": (
        "process.test_sharded:test_dense_is_native_hsdp",
        "process.test_sharded:test_recipes_learn_and_replicas_stay_identical",
    ),
    "FSDP2 over slow links between all ranks": (
        "process.test_fsdp:test_all_ranks_compute_with_the_same_rounded_weights_and_masters_stay_exact",
        "process.test_fsdp:test_all_that_is_given_arrives_or_is_unsent",
    ),
    "sites far apart": ("process.test_outer:test_diloco_is_the_paper_s",),
    "sites that come and go": (
        "process.test_members:test_members_that_stay_take_the_rounds_of_replicas_bit_for_bit",
        "unit.members.test_round:test_without_faults_all_is_counted_once_and_nothing_is_lost",
    ),
    "Accelerate, the Hugging Face Trainer, Lightning, Ray Train": (
        "unit.sources.test_unwrap:test_ddp_is_found_inside_the_wrappers",
    ),
}
"""By the first column of README's table of what to write."""

ATTACHED = {
    "`DistributedDataParallel`": WRITTEN["DDP, one rank per machine"],
    "a module without a wrapper": (
        "process.test_plain:test_parameters_and_buffers_are_those_of_ddp_bit_for_bit",
    ),
    "a module under `fully_shard` (FSDP2)": WRITTEN["FSDP2"],
    "the same, all of whose links are slow": WRITTEN["FSDP2 over slow links between all ranks"],
}
"""By the first column of the table of what can be attached."""

PROMISED = {
    "the default chooses": (
        "process.test_train:test_an_adaptive_recipe_decides_alike_on_all_ranks",
        "process.test_train:test_auto_stays_with_dense_where_communication_hides_and_measures_no_more",
    ),
    "state resumes bit for bit": (
        "process.test_state:test_a_resumed_run_ends_where_the_uninterrupted_one_does",
    ),
    "files of state": ("process.test_checkpoints:test_every_rank_writes_a_file_and_takes_up_its_own",),
    "checkpoints of DCP": (
        "process.test_state:test_a_dcp_checkpoint_keeps_every_ranks_memory_and_goes_to_another_world",
    ),
    "NaN and Inf": (
        "faults.test_status_vote:test_a_nan_on_one_rank_makes_every_gradient_nan_and_is_forgotten",
    ),
    "an exception is named on all ranks": (
        "faults.test_status_vote:test_backward_raises_on_the_other_ranks_and_names_the_one",
    ),
    "a rank dies": ("faults.test_ranks:test_survivors_of_a_killed_rank_raise_long_before_the_timeout",),
    "checksums": (
        "faults.test_status_vote:test_damaged_bytes_are_noticed_on_all_ranks_in_their_step_and_training_goes_on",
    ),
    "gradients on a device": (
        "process.test_placement:test_a_training_by_way_of_the_host_is_the_cpus_bit_for_bit",
    ),
    "lossless is DDP": ("process.test_lossless:test_lossless_training_on_two_ranks_is_ddps_bit_for_bit",),
    "a plan": ("unit.api.test_plan:test_on_a_slow_link_it_is_worth_trying_and_auto_would_compress",),
    "a simulation": ("unit.api.test_simulate:test_a_world_is_what_a_plan_of_it_says",),
    "an example": ("process.test_examples:test_a_training_loop_learns_and_reports",),
    "a page": ("process.test_pages:test_a_block_of_the_documents_runs",),
}
"""By words of README and its pages."""


def rows(page: str, heading: str) -> list[str]:
    """First cells of the table below a heading."""
    text = (ROOT / page).read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    lines = re.findall(r"^\| (.+?) \|", text.partition("\n## ")[0], re.MULTILINE)
    assert lines, f"{page} has no table below {heading}"
    return lines[1:]  # without its head


def left_out(tests: tuple[str, ...]) -> bool:
    """Whether `make test` runs no case of these, each given as module:function."""
    for each in tests:
        name, _, function = each.partition(":")
        module = import_module(f"tests.{name}")
        if any(True for _ in in_make_test(module, getattr(module, function))):
            return False
    return True


def test_pages_promise_what_is_listed_here() -> None:
    assert rows("README.md", "Which line do I write") == list(WRITTEN)
    assert rows("docs/where-it-runs.md", "What can be attached") == list(ATTACHED)


def test_make_test_touches_each_capability() -> None:
    every = WRITTEN | ATTACHED | PROMISED
    assert [name for name, tests in every.items() if left_out(tests)] == []


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
