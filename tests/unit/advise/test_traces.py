"""Traces of runs whose times are known, and files that are no traces."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from gradwire.advise import kineto
from gradwire.advise.answer import advise
from gradwire.advise.observed import Observed, ObservedStep
from gradwire.advise.traces import read
from tests.support.looped import looped
from tests.support.traces import Run

RUN = Run()


def parts(found: Observed) -> ObservedStep:
    """The typical step of the first rank."""
    [first, *_] = found.ranks
    return ObservedStep(
        *(first.typical(lambda step, name=name: getattr(step, name)) for name in vars(first.steps[0]))
    )


@looped("name", ["trace.json", "trace.json.gz"])
def test_a_step_has_the_parts_that_were_recorded(tmp_path: Path, name: str) -> None:
    found = read([RUN.write(tmp_path / name)])
    step = parts(found)
    assert step.step_s == pytest.approx(RUN.step_s)
    assert step.exposed_s == pytest.approx(RUN.exposed_s)
    assert step.input_s == pytest.approx(RUN.input_s)
    assert step.backward_s == pytest.approx(RUN.backward_s)
    assert len(found.ranks[0].steps) == RUN.steps - 1, "the first one began before its optimizer step"
    assert (found.wrapper, found.backend, found.world, found.calls) == ("DDP", "gloo", 2, 3)
    assert found.buckets == tuple(RUN.sizes_bytes)
    assert found.gradients is not None
    assert found.gradients.shapes == RUN.layers
    each_s = RUN.backward_s / len(RUN.layers)
    assert found.gradients.ready_s == pytest.approx([(n + 1) * each_s for n in range(len(RUN.layers))])


def test_nothing_is_exposed_that_backward_hides(tmp_path: Path) -> None:
    hidden = replace(RUN, buckets=(1, 6), byte_s=1e-10, latency_s=0.0)
    step = parts(read([hidden.write(tmp_path / "trace.json")]))
    assert step.exposed_s == pytest.approx(0.0, abs=1e-9)
    assert step.communicating_s == pytest.approx(7 * 2e6 * 1e-10)


def test_kernels_of_nccl_are_exposed_where_no_other_kernel_runs(tmp_path: Path) -> None:
    found = read([replace(RUN, nccl=True, shapes=False).write(tmp_path / "trace.json")])
    assert parts(found).exposed_s == pytest.approx(RUN.exposed_s)
    assert (found.backend, found.calls, found.buckets) == ("nccl", 3, tuple(RUN.sizes_bytes))


def test_ranks_are_compared_by_durations_alone(tmp_path: Path) -> None:
    early = replace(RUN, rank=1, waits_s=0.05, origin_s=77.0)
    late = replace(RUN, rank=0, forward_s=RUN.forward_s + 0.05)
    found = read([each.write(tmp_path / f"{each.rank}.json") for each in (early, late)])
    assert found.late.is_one
    assert found.late[:2] == (0, pytest.approx(0.05))
    assert found.least(lambda step: step.exposed_s) == pytest.approx(RUN.exposed_s)
    assert found.missing == ()


def test_gradients_are_accumulated_without_being_sent(tmp_path: Path) -> None:
    found = read([replace(RUN, micro=2).write(tmp_path / "trace.json")])
    step = parts(found)
    assert step.step_s == pytest.approx(replace(RUN, micro=2).step_s)
    assert step.exposed_s == pytest.approx(RUN.exposed_s)
    assert step.input_s == pytest.approx(3 * RUN.input_s)
    assert found.passes == 1


@looped(("kind", "element_bytes"), [("c10::BFloat16", 2), ("float", 4)])
@looped("took_s", [0.15, 0.001])
def test_gathers_of_fsdp2_are_counted_and_judged(
    tmp_path: Path, kind: str, element_bytes: int, took_s: float
) -> None:
    run = replace(RUN, world=4, steps=6)
    events = run.events()
    forwards = [each for each in events if each["name"] == "DistributedDataParallel.forward"]
    for each in forwards:
        args = {"Input Dims": [[250_000]], "Input type": [kind]}
        gather = {**each, "cat": "cpu_op", "args": args, "tid": 7}
        for part in range(2):
            times = {"ts": each["ts"] + part * 5000.0, "dur": took_s * 1e6}
            events.append({**gather, **times, "name": "gloo:all_gather"})
        events.append({**gather, "name": "FSDP::all_gather", "tid": 1})
    path = tmp_path / f"{kind}{took_s}.json"
    path.write_text(json.dumps({**run.header, "traceEvents": sorted(events, key=lambda e: e.get("ts", 0.0))}))
    found = read([path])
    assert found.wrapper == "FSDP2"
    assert found.gathers is not None
    together_s = took_s + (0.005 if took_s > 0.005 else took_s)  # they overlap
    assert (found.gathers.calls, found.gathers.size_bytes) == (2, 2 * 250_000 * element_bytes)
    assert (found.gathers.took_s, found.gathers.element_bytes) == (pytest.approx(together_s), element_bytes)
    note = next(each for each in advise(found).notes if "gathered in" in each)
    assert f"{8 * element_bytes} bits: {1.5 * element_bytes:.0f} MB per rank and step" in note
    if took_s < 0.005:
        assert "fewer bits would not pay" in note
    else:
        assert ("0.3 to 3.7 of 16 bits" in note) == (element_bytes == 2)
        assert 'gather="exact"' in note


@looped("kept", ["optimizer", "profiled", "forward"])
def test_steps_are_found_without_an_optimizer(tmp_path: Path, kept: str) -> None:
    run = replace(RUN, optimizer=kept == "optimizer", profiled=kept == "profiled", loader=False)
    step = parts(read([run.write(tmp_path / "trace.json")]))
    assert step.step_s == pytest.approx(RUN.step_s)
    assert step.exposed_s == pytest.approx(RUN.exposed_s)


def test_a_trace_says_what_it_does_not_hold(tmp_path: Path) -> None:
    run = replace(RUN, world=4, shapes=False, optimizer=False)
    header = {"distributedInfo": {**run.header["distributedInfo"], "pg_config": [{}, {}, {}]}}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**header, "traceEvents": run.events()}))
    found = read([path])
    said = " ".join(found.missing)
    assert "record_shapes=True" in said
    assert "1 rank of 4" in said
    assert "3 process groups" in said
    assert "no optimizer step was recorded" in said
    assert (found.gradients, found.buckets, found.calls) == (None, (), 3)
    path.write_text(json.dumps(run.events()))  # an array alone, as Chrome writes it
    assert "how many ranks" in " ".join(read([path]).missing)


@looped(
    "written",
    [
        '"name": "{"device": "cpu"}(1): inner"',  # of torch 2.13
        r'"name": "C:\Users\me\train.py(7): step"',
        '"dur": -nan',
    ],
)
def test_events_that_are_no_json_are_left_out_and_counted(tmp_path: Path, written: str) -> None:
    """Events begin on lines of their own, as torch.profiler writes them."""
    path = tmp_path / "trace.json"
    text = json.dumps({**RUN.header, "traceEvents": RUN.events()}, indent=2)
    begins = '\n    {\n      "ph": "X",'
    wrong = begins + f'\n      "cat": "python_function",\n      {written},\n      "ts": 5.0\n    }},'
    path.write_text(text.replace(begins, wrong + begins, 2))
    found = read([path])
    assert parts(found) == pytest.approx(parts(read([RUN.write(tmp_path / "whole.json")])))
    assert any("2 events left out that torch.profiler wrote as no JSON" in said for said in found.missing)


RAW = RUN.raw
PACKED = gzip.compress(RAW)
HALF = len(PACKED) // 2
WRONG = {
    b"": "it is empty",
    RAW[: len(RAW) // 2]: "it is cut or damaged after",
    RAW[:-30]: "it is cut or damaged after",
    PACKED[:HALF]: "it was cut",
    PACKED[:HALF] + bytes(50) + PACKED[HALF + 50 :]: "its compressed data are damaged|cut or damaged|no text",
    b"#!/usr/bin/env python\n": "it is no JSON",
    b"\x89PNG\r\n\x1a\n" + bytes(range(128, 200)): "it is no text",
    b'{"model": "resnet50"}': "it has no traceEvents",
    b'{"traceEvents": [{"ph": "M"}, 5]}': "it is cut or damaged after 1 event",
    b'{"traceEvents": [{"ph": ]}': "it is cut or damaged after 0 events",
    b'{"traceEvents": [{"ph": "X", "name": "gloo:all_reduce", "dur": "long"}]}': "times or arguments",
    b'{"traceEvents": [{"ph": "X", "name": "gloo:all_reduce", "ts": 1e999}]}': "times or arguments",
    b'{"traceEvents": ' + b"[" * 200_000: "nested too deeply",
    b'{"traceEvents": []}': "no collective was recorded",
    replace(RUN, steps=2).raw: "1 whole training step",
}


@looped("raw", WRONG)
def test_a_wrong_file_is_refused_in_a_sentence(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=WRONG[raw]) as caught:
        read([path])
    assert str(caught.value).startswith(f"{path}: ")
    assert len(str(caught.value)) < 300


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json: it cannot be read: No such file"):
        read([tmp_path / "none.json"])


def test_traces_of_different_runs_are_refused(tmp_path: Path) -> None:
    one, same = RUN.write(tmp_path / "a.json"), RUN.write(tmp_path / "b.json")
    with pytest.raises(ValueError, match="same rank"):
        read([one, same])
    with pytest.raises(ValueError, match="runs of 2 and 4 ranks"):
        read([one, replace(RUN, rank=1, world=4).write(same)])
    with pytest.raises(ValueError, match=r"a step sends 2\.46 kB in one, 16 MB in another"):
        read([one, replace(RUN, rank=1, layers=((77,),) * 8).write(same)])
    with pytest.raises(ValueError, match="gloo's in one, NCCL's in another"):
        read([one, replace(RUN, rank=1, nccl=True).write(same)])


def test_copies_on_a_gpu_are_no_kernels(tmp_path: Path) -> None:
    run = replace(RUN, nccl=True)
    copied = [
        {**event, "cat": "gpu_memcpy", "name": "Memcpy HtoD"}
        for event in run.events()
        if str(event["name"]).startswith("nccl")
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**run.header, "traceEvents": run.events() + copied}))
    assert parts(read([path])).exposed_s == pytest.approx(RUN.exposed_s)


NO_SIZES = (
    {"Input Dims": [[10**9, 10**300]]},
    {"Input Dims": [[-5]]},
    {"In msg nelems": -5},
    {"In msg nelems": 1e3},
)


@looped("args", NO_SIZES)
def test_sizes_that_cannot_be_are_unknown(tmp_path: Path, args: dict[str, object]) -> None:
    run = replace(RUN, nccl="In msg nelems" in args)
    events = [{**event, "args": {**event.get("args", {}), **args}} for event in run.events()]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**run.header, "traceEvents": events}))
    found = read([path])
    assert (found.buckets, found.calls) == ((), 3)
    assert "sizes of gradients were not recorded" in " ".join(found.missing)


@looped("world", [-3, 10**9, 10**30, "two"])
def test_a_number_of_ranks_that_cannot_be_is_unknown(tmp_path: Path, world: object) -> None:
    header = {"distributedInfo": {**RUN.header["distributedInfo"], "world_size": world}}
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({**header, "traceEvents": RUN.events()}))
    assert read([path]).world == 0


def test_all_reduces_that_share_the_link_do_not_tell_what_one_takes(tmp_path: Path) -> None:
    """gloo runs two at once: the second and the third last until all of both are sent."""
    path = RUN.write(tmp_path / "trace.json")
    assert [size for size, _ in read([path]).timed] == RUN.sizes_bytes
    document = json.loads(RUN.raw)
    sums = [event for event in document["traceEvents"] if event["name"] == "gloo:all_reduce"]
    for second, third in zip(sums[1::3], sums[2::3], strict=True):
        end = third["ts"] + third["dur"]
        third["ts"], third["dur"], second["dur"] = second["ts"], end - second["ts"], end - second["ts"]
    path.write_text(json.dumps(document))
    assert [size for size, _ in read([path]).timed] == RUN.sizes_bytes[:1]


def test_what_recording_takes_grows_with_the_number_of_events(tmp_path: Path) -> None:
    path = RUN.write(tmp_path / "trace.json")
    few = read([path]).recording_s
    more = [{**event, "name": "aten::add"} for event in RUN.events() if event.get("cat") == "cpu_op"] * 9
    path.write_text(json.dumps({**RUN.header, "traceEvents": RUN.events() + more}))
    assert 1e-6 < few < 5 * few < read([path]).recording_s < 1e-3
    assert read([replace(RUN, nccl=True).write(path)]).recording_s == 0.0


def test_collectives_that_take_no_time_tell_nothing_of_the_link(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [{key: value for key, value in event.items() if key != "dur"} for event in RUN.events()]
    path.write_text(json.dumps({**RUN.header, "traceEvents": events}))
    found = read([path])
    assert found.timed == ()
    assert parts(found).exposed_s == 0.0


@looped("piece", [16, 100, 1000])
def test_events_may_end_anywhere_in_the_pieces(tmp_path: Path, piece: int) -> None:
    found: list[kineto.Event] = []
    path = RUN.write(tmp_path / "trace.json.gz")
    header, invalid = kineto.read(path, found.append, piece=piece)
    assert invalid == 0
    assert found == json.loads(json.dumps(RUN.events()))
    assert header["distributedInfo"] == RUN.header["distributedInfo"]


def test_memory_does_not_grow_with_what_is_dropped(tmp_path: Path) -> None:
    # The trace of a step has a thousand operators for each event that matters.
    dropped = [{"ph": "X", "cat": "cpu_op", "name": "aten::add", "ts": 1.0, "dur": 1.0}] * 1000
    path = tmp_path / "trace.json.gz"

    def peak_bytes(times: int) -> int:
        with gzip.open(path, "wt") as file:
            file.write('{"traceEvents": [')
            for _ in range(times):
                file.write(json.dumps(dropped)[1:-1] + ",")
            file.write(json.dumps(RUN.events())[1:-1] + "]}")
        tracemalloc.start()
        kineto.read(path, lambda _event: None, piece=1 << 16)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    few = peak_bytes(5)
    assert peak_bytes(20) < 1.1 * few
