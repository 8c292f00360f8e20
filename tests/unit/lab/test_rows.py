"""Rows from measurements: arithmetic alone, no process."""

import pytest

from gradwire_lab.bench.measurement import Measured
from gradwire_lab.bench.process_set import SettingFailed
from gradwire_lab.bench.rows import rows
from gradwire_lab.bench.settings import BOUND, BOUND_AGAIN, parse_entry
from gradwire_lab.bench.statistics import StepSample
from gradwire_lab.bench.table import exit_code, failures


def measured(entry, step_s, rounds=3, **fields):
    step = StepSample(step_s, 0.01, 0.1, 0.2, 0.3, 0.04, 0.5, 2.0, None)
    return Measured(entry, rounds=[[[step] * 2, [step] * 2] for _ in range(rounds)], **fields)


def four():
    return [
        measured(BOUND, 1.0),
        measured(parse_entry("ddp", "peer"), 4.0, setup={"parameters": 1000}, sent_bytes=[4100.0] * 3),
        measured(
            parse_entry("covap", "recipe"),
            1.25,
            report={"wire_bytes_per_step": 900.0, "compress_s": 0.02},
            fingerprints=["a", "a"],
        ),
        measured(BOUND_AGAIN, 1.0),
    ]


def named(document):
    return {row["name"]: row for row in document["rows"]}


def test_scaling_is_measured_against_no_communication():
    by_name = named(rows(four(), 2))
    assert by_name["ddp"]["scaling"] == 0.25
    assert by_name["covap"]["scaling"] == 0.8


def test_speedup_is_measured_against_ddp():
    by_name = named(rows(four(), 2))
    assert by_name["covap"]["speedup_over_ddp"]["ratio"] == pytest.approx(3.2)
    assert by_name["ddp"]["speedup_over_ddp"] is None


def test_fsdp2_in_other_types_is_not_what_others_are_compared_with():
    settings = [measured(parse_entry("fsdp2(param_dtype=bfloat16)", "peer"), 2.0), *four()]
    assert all(row["speedup_over_fsdp2"] is None for row in rows(settings, 2, "fsdp2")["rows"])
    settings.append(measured(parse_entry("fsdp2", "peer"), 5.0))
    by_name = named(rows(settings, 2, "fsdp2"))
    assert by_name["fsdp2(param_dtype=bfloat16)"]["speedup_over_fsdp2"]["ratio"] == pytest.approx(2.5)


def test_bytes_come_from_the_model_and_from_the_counters():
    by_name = named(rows(four(), 2))
    assert by_name["ddp"]["wire_bytes_per_step"] == 4000
    assert by_name["ddp"]["interface_bytes_per_step"] == 4100
    assert by_name["covap"]["wire_bytes_per_step"] == 900
    assert by_name["covap"]["interface_bytes_per_step"] is None


def test_a_fingerprint_is_of_replicas_that_are_identical():
    settings = four()
    settings[1].fingerprints = ["a", "b"]
    by_name = named(rows(settings, 2))
    assert by_name["covap"]["fingerprint"] == "a"
    assert by_name["ddp"]["fingerprint"] is None
    assert by_name[BOUND.name]["fingerprint"] is None


def test_processor_time_is_there_step_by_step_as_the_mean_over_ranks():
    row = named(rows(four(), 2))["ddp"]
    assert row["cpu_s_all"] == [0.5] * 6
    assert len(row["cpu_s_all"]) == len(row["step_s_all"])


def test_the_bounds_are_compared_with_each_other():
    assert rows(four(), 2)["spread"]["ratio"] == 1.0


def test_a_bound_has_no_loss_and_no_replicas():
    bound = named(rows(four(), 2))[BOUND.name]
    assert bound["loss"] is None
    assert bound["replicas_identical"] is None


def test_differing_replicas_show_and_fail_the_run():
    everybody = four()
    everybody[2].fingerprints = ["a", "b"]
    document = rows(everybody, 2)
    assert named(document)["covap"]["replicas_identical"] is False
    assert exit_code(document) == 1


def test_a_failed_recipe_fails_the_run_and_a_failed_peer_does_not():
    for index, code in ((1, 0), (2, 1)):
        everybody = four()
        everybody[index].failure = SettingFailed("taken to hang", "trace")
        document = rows(everybody, 2)
        assert exit_code(document) == code
        assert "trace" in failures(document)[0]


def test_a_setting_that_never_stepped_has_a_row():
    failed = Measured(parse_entry("fp16", "recipe"), failure=SettingFailed("died", ""))
    row = named(rows([*four(), failed], 2))["fp16"]
    assert row["step_s"] is None
    assert row["step_s_all"] == []
    assert row["failed"] == "died"
