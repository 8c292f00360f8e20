"""What a placement is made of, and what `attach` says of one."""

from __future__ import annotations

import logging
import os
import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire._api.transports import Transports, placements
from gradwire.comm import ThreadComm, run_ranks
from gradwire.placement import (
    Accelerator,
    BufferTransfer,
    CopyTransfer,
    HostDevice,
    Inline,
    Placement,
    StagedComm,
    StreamComm,
    device_at,
    host,
    stream,
)
from gradwire.planning.costs import BackwardTiming, CodecCost, Line, Link, Network
from gradwire.planning.facts import Facts
from gradwire.sources.nodes.members import NodeTable
from gradwire.step.history import History
from gradwire.step.step import Step
from gradwire.step.worker import Worker
from tests.device.scenes_ordered import accelerators
from tests.device.scenes_placed import watched
from tests.support.depth import drawn
from tests.support.rig import Rig, gradients, parted, specs
from tests.support.simulated import Near, Simulated


def nothing(job: Any) -> None:
    """An worker's thread that never runs."""


def test_gradients_of_the_cpu_are_read_where_they_are() -> None:
    def rank(comm: ThreadComm) -> Placement:
        return host(comm, nothing)

    [placement] = run_ranks(1, rank)
    x = torch.ones(3)
    assert placement.transfer.start(0, x).buffer is x
    assert placement.transfer.read(x) is placement.transfer.copy_to(x, x.device) is x
    assert placement.transfer.pinned_bytes == placement.transfer.copied_s() == 0
    assert placement.commits == "now"
    assert isinstance(placement.transfer, BufferTransfer)
    assert torch.equal(placement.fetch(x.sum())(), torch.tensor(3.0))


def test_a_device_is_taken_by_where_tensors_are() -> None:
    assert isinstance(device_at(torch.device("cpu")), HostDevice)
    there = device_at(torch.device("cuda", 1))
    assert isinstance(there, Accelerator)
    assert there.where == torch.device("cuda", 1)


def test_memory_is_pinned_once_for_each_tensor_and_anew_when_buckets_are_built_anew() -> None:
    copies = CopyTransfer(Simulated())
    first = copies.start(0, torch.ones(10)).buffer
    other = copies.start(1, torch.ones(6)).buffer
    assert copies.pinned_bytes == 64 + 32, "40 and 24 bytes, each up to the next power of two"
    assert copies.start(0, torch.zeros(10)).buffer is first
    assert not first.any()
    assert copies.start(0, torch.ones(16)).buffer is not first
    assert copies.pinned_bytes == 64, "what belonged to the old buckets has gone"
    assert copies.start(1, torch.ones(6)).buffer is not other


def test_the_last_copies_are_timed_both_ways() -> None:
    device = Simulated()
    copies = CopyTransfer(device)
    assert copies.copied_s() == 0.0
    brought = copies.start(0, torch.ones(1000))
    brought.ready()
    out_s = copies.copied_s()
    brought.copy_back()
    assert 0.0 < out_s < copies.copied_s()


def test_what_cannot_be_pinned_is_heard_of_by_the_worker() -> None:
    class Full(Simulated):
        def pinned(self, like: Tensor) -> Tensor:
            raise MemoryError("no pages left to lock")

    brought = CopyTransfer(Full()).start(0, torch.ones(4))
    assert brought.buffer.tolist() == [0.0] * 4, "something that can be exchanged"
    with pytest.raises(MemoryError, match="no pages left"):
        brought.ready()


@pytest.fixture
def ddp(monkeypatch: pytest.MonkeyPatch) -> Iterator[DistributedDataParallel]:
    """A world of one rank, which compresses as in company."""
    monkeypatch.setattr("gradwire._api.attach.is_alone", lambda _comm: False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield DistributedDataParallel(nn.Linear(64, 64))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", ["auto", "host", "device"])
def test_on_the_cpu_every_placement_is_the_same(ddp: DistributedDataParallel, placement: Any) -> None:
    wire = gradwire.attach(ddp, recipe="int8", placement=placement)
    ddp(torch.ones(2, 64)).sum().backward()
    report = wire.report()
    assert (report.placement, report.pinned_bytes, report.copied_s) == ("host", 0, 0.0)
    assert "placement" not in str(report)


def test_a_placement_that_nobody_knows_is_refused(ddp: DistributedDataParallel) -> None:
    wrong: Any = "gpu"
    with pytest.raises(ValueError, match="'gpu' is none of"):
        gradwire.attach(ddp, placement=wrong)


def on_a_device(
    monkeypatch: pytest.MonkeyPatch, device: Simulated | None = None, *, streams: bool = False
) -> Simulated:
    device = Simulated() if device is None else device
    monkeypatch.setattr("gradwire._api.attach.device_at", lambda _where: device)
    monkeypatch.setattr("gradwire.comm.groups.STREAMED", frozenset({"gloo"} if streams else ()))
    return device


def test_by_way_of_the_host_is_said_once_with_what_it_costs(
    ddp: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_a_device(monkeypatch)
    wire = gradwire.attach(ddp, recipe="int8", placement="host")
    for _ in range(2):
        ddp(torch.ones(2, 64)).sum().backward()
    assert [record.levelname for record in caplog.records if "experimental" in record.message] == ["WARNING"]
    report = wire.report()
    assert report.pinned_bytes == 2 * 4 * 64 * 64  # one bucket of 64 · 65, up to the next power of two
    assert re.search(r"placement    host: [\d.]+ kB pinned, ", str(report))


@pytest.mark.parametrize(("compress_s", "needed"), [(0.3, 12), (0.09, 0)])
def test_by_way_of_the_host_the_report_says_how_many_cores_would_keep_up(
    ddp: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch, compress_s: float, needed: int
) -> None:
    on_a_device(monkeypatch)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    wire = gradwire.attach(ddp, recipe="int8", placement="host")
    ddp(torch.ones(2, 64)).sum().backward()
    spent = {"compress_s": compress_s, "backward_s": 0.1}
    monkeypatch.setattr(History, "median", lambda _history, field: spent.get(field, 0.0))
    report = wire.report()
    assert (report.codec_cores, report.cores_needed) == (4, needed)
    said = "take 300.0 ms with 4 cores, longer than the backward pass, with which 12 would keep up"
    assert (said in report.text(1000)) == bool(needed)
    assert ("2 ranks share 8 cores by LOCAL_WORLD_SIZE" in report.text(1000)) == bool(needed)


CHOSEN = [
    ("int8", False, "staged"),
    ("int8", True, "stream"),
    ("dgc", True, "stream"),
    ("dgc(clip=1.0)", True, "host"),
    ("gcomp", True, "host"),
    ("gcomp", False, "host"),
    ("auto", False, "staged"),
    ("flexible", True, "host"),  # it looks at gradients
]


@pytest.mark.parametrize(
    ("recipe", "streams", "placement", "asked"),
    drawn(
        [(*row, asked) for row in CHOSEN for asked in ("auto", "device")], 6, "chosen by recipe and backend"
    ),
)
def test_recipe_and_backend_choose(
    ddp: DistributedDataParallel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    recipe: str,
    streams: bool,
    placement: str,
    asked: Any,
) -> None:
    on_a_device(monkeypatch, Near(), streams=streams)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    wire = gradwire.attach(ddp, optimizer, recipe, placement=asked)
    for _ in range(2):
        ddp(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    report = wire.report()
    assert (report.placement, report.step) == (placement, 2)
    assert f"placement    {placement}: " in str(report)
    said = [record.levelname for record in caplog.records if "reads numbers on the host" in record.message]
    assert said == (["WARNING"] if placement == "host" else [])
    assert ("reads numbers on the host" in report.placement_why) == (placement == "host")
    [untried] = [record.getMessage() for record in caplog.records if "experimental" in record.message]
    assert f"by the placement {placement!r}" in untried


@pytest.mark.parametrize(("recipe", "levels"), [("int8", 1), ("topk(ratio=0.001)", 0)])
@pytest.mark.parametrize("placement", ["auto", "device", "host"])
def test_bytes_decide_on_two_levels_whoever_carries_them(
    ddp: DistributedDataParallel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    placement: Any,
    recipe: str,
    levels: int,
) -> None:
    caplog.set_level(logging.INFO, "gradwire")
    on_a_device(monkeypatch, Near(), streams=True)
    asked: list[object] = []

    def with_parts(lines: Transports, parts: object, *_: object) -> Transports:
        asked.append(parts)
        return lines

    monkeypatch.setattr("gradwire._api.attach.agreed", lambda *_: (NodeTable(((0, 1), (2, 3))), ""))
    monkeypatch.setattr("gradwire._api.attach.with_parts", with_parts)
    wire = gradwire.attach(ddp, recipe=recipe, placement=placement)
    assert asked == [((0, 1), (0, 2))] * levels
    assert wire.report().placement == ("host" if placement == "host" else "stream")
    assert ("little beside the sum inside a node" in caplog.text) == (not levels)


@pytest.mark.parametrize(
    ("asked", "streams", "names"),
    [("auto", True, ["stream", "host"]), ("device", False, ["staged", "host"]), ("host", True, ["host"])],
)
def test_each_placement_has_its_way_inside_a_node_and_to_everyone(
    asked: Any, streams: bool, names: list[str]
) -> None:
    def rank(comm: ThreadComm) -> None:
        worker: Any = SimpleNamespace(post=nothing, post_after=nothing, crashed=nothing)
        parts: Any = parted(comm, 2)
        cpu: Any = comm
        lines = Transports(Near(), comm, cpu, cpu if streams else None, parts, parts if streams else ())
        found = [each for each in placements(asked, lines, (comm, *parts), worker) if each is not None]
        assert [each.name for each in found] == names
        kinds = {"stream": StreamComm, "staged": StagedComm, "host": ThreadComm}
        for each in found:
            assert (each.post_after is None) == (each.name == "stream"), "the host waits for a device"
            assert each.inside is not None
            assert each.everyone is not None
            assert {type(each.comm), type(each.inside), type(each.everyone)} == {kinds[each.name]}
            assert (each.comm.world, each.inside.world, each.everyone.world) == (3, 2, 6)

    run_ranks(6, rank)


@pytest.mark.parametrize(("value", "warnings"), [("1", 1), ("0", 0)])
def test_waits_that_hide_nothing_are_named_once(
    value: str, warnings: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", value)

    def rank(comm: ThreadComm) -> str:
        worker: Any = SimpleNamespace(post=nothing, post_after=nothing, crashed=nothing)
        streamed: Any = comm
        placement, _ = placements("auto", Transports(Near(), comm, None, streamed), (comm,), worker)
        return placement.name

    assert run_ranks(2, rank) == ["stream"] * 2
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warnings


def test_checksums_are_of_what_the_host_sends(
    ddp: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_device(monkeypatch, Near(), streams=True)
    with pytest.raises(ValueError, match="with placement='device' NCCL sends from the device"):
        gradwire.attach(ddp, recipe="int8", placement="device", checksums=True)
    wire = gradwire.attach(ddp, recipe="int8", checksums=True)
    ddp(torch.ones(2, 64)).sum().backward()
    assert (wire.report().placement, wire.report().step) == ("staged", 1)


def test_units_are_larger_where_a_recipe_stays_on_the_device_and_states_move_between_them(
    ddp: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    del ddp  # its process group stays

    def limit(*, stays_on_device: bool) -> int:
        return 1 << 15 if stays_on_device else 1 << 12

    monkeypatch.setattr("gradwire.step.layout.largest_unit", limit)
    topk, by_host = "topk(ratio=0.1)", "threshold(threshold=0.01)"
    units, state = [], None
    for there, recipe in ((False, topk), (True, topk), (False, topk), (True, by_host)):
        with monkeypatch.context() as patched:
            if there:
                on_a_device(patched, Near(), streams=True)
            model = DistributedDataParallel(nn.Linear(256, 256))
            wire = gradwire.attach(model, recipe=recipe)
            if state is not None and recipe == topk:
                wire.load_state_dict(state)
                loaded, memory = wire.state_dict()["rank0"]["memory"], state["rank0"]["memory"]
                assert all(torch.equal(loaded[name], values) for name, values in memory.items())
            model(torch.ones(2, 256)).sum().backward()
            units.append(wire.report().units)
            state = wire.state_dict()
            wire.detach()
    assert units == [16, 4, 16, 16], "as many as on the CPU, where a recipe reads numbers on the host"


def test_what_runs_next_may_run_elsewhere_and_memory_goes_along(
    ddp: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    on_a_device(monkeypatch, Near(), streams=True)
    wire = gradwire.attach(ddp, recipe="topk(ratio=0.1)")
    backward = wire.attached.backward
    seen = []
    for text in ("topk(ratio=0.1)", "threshold(threshold=0.01)", "topk(ratio=0.2)"):
        before = wire.state_dict()["rank0"]["memory"]
        backward.call(lambda text=text: backward.reducer.install(gradwire.recipe(text).build()))
        after = wire.state_dict()["rank0"]["memory"]
        assert all(torch.equal(after[name], values) for name, values in before.items())
        ddp(torch.ones(2, 64)).sum().backward()
        seen.append((wire.report().placement, wire.report().step))
    assert any(bool(values.any()) for values in after.values())
    assert seen == [("stream", 1), ("host", 2), ("stream", 3)]


def test_a_group_of_the_users_has_to_carry_tensors_on_the_cpu(
    ddp: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_device(monkeypatch)
    group = dist.new_group([0])
    monkeypatch.setattr("gradwire.comm.groups.carries_cpu", lambda each: each is not group)
    with pytest.raises(ValueError, match="carries no tensors on the CPU"):
        gradwire.attach(ddp, process_group=group)


def _dense_is_slow(facts: Facts) -> Facts:
    """`facts`, as if dense steps had been measured, and all-reduce took ten times as long as computing."""
    numel = tuple(spec.numel for spec in specs())
    known = BackwardTiming(0.0, tuple(0.01 * (number + 1) for number in range(len(numel))), numel, 0.1)
    facts = replace(facts, backward_s=0.1, allreduce_s=1.0, gradient_bytes=4.0 * sum(numel))
    return replace(facts, backward=known, network=Network(Link(1e-3, 3e-5)), codec=FAST, payloads=1.0)


FAST = CodecCost(Line(0.0, 1e-7), Line(0.0, 0.0))


@pytest.mark.parametrize("asked", ["auto", "device"])
def test_each_recipe_runs_where_its_numbers_are_read_whatever_was_measured(
    ddp: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch, asked: Any
) -> None:
    on_a_device(monkeypatch, Near(), streams=True)
    measured: list[object] = []

    def measure(exchange: object, **_: object) -> None:
        measured.append(exchange)
        raise AssertionError("no time decides where it runs")

    monkeypatch.setattr("gradwire.measure.codec.measure_codec", measure)
    wire = gradwire.attach(ddp, recipe="int8", placement=asked)
    backward = wire.attached.backward
    numel = tuple(spec.numel for spec in backward.reducer.specs)
    known = BackwardTiming(0.0, (0.5, 1.0), numel, 1.0)
    backward.reducer.facts = Facts(1.0, 1.0, 2, known, Network(Link(alpha_s=1e-3, beta_s=1e-6)))
    seen = []
    for text in ("topk(ratio=0.1)", "threshold(threshold=0.01)", "int8", "dense"):
        wire.switch(text)
        ddp(torch.ones(2, 64)).sum().backward()
        report = wire.report()
        seen.append((report.placement, "need not read any number" in report.placement_why))
    assert measured == []
    assert seen == [("stream", True), ("host", False), ("stream", True), ("stream", True)]


@pytest.mark.parametrize(("tried", "placed"), [("int8", "stream"), ("gcomp", "host")])
def test_a_trial_of_auto_runs_where_its_numbers_are_read(
    tried: str, placed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = defaultdict[int, list[bool]](list)
    """By thread, one of which is a rank: whether a codec was timed on the host."""

    def cost(_exchange: object, _text: str, where: Any, **_: object) -> CodecCost:
        measured[threading.get_ident()].append(where.is_host)
        return FAST

    monkeypatch.setattr("gradwire.control.auto.codec_cost", cost)
    monkeypatch.setattr("gradwire.control.warmup.surveyed", lambda facts, *_: _dense_is_slow(facts))
    monkeypatch.setattr("gradwire.recipes.auto.CANDIDATES", {tried: 0.01})
    monkeypatch.setattr(Step, "lasted_s", lambda step: 0.1 if tried in step.recipe else 1.0)

    def rank(comm: ThreadComm) -> tuple[set[tuple[bool, str]], list[bool]]:
        device, seen = Near(), set[tuple[bool, str]]()
        with device.using(device.new_stream()):
            rig = Rig(
                comm, "auto", place=lambda _post: stream(comm, comm, device),
                on_host=host(comm, Inline(), device),
            )  # fmt: skip
            for step in range(40):
                where = rig.reducer.placement.name
                plan = rig.step(gradients(comm.rank, step)).step.recipe
                seen.add((tried in plan, where))
                if tried in plan:
                    break
            return seen, measured[threading.get_ident()]

    for seen, on_host in run_ranks(2, rank):
        assert seen == {(False, "stream"), (True, placed)}
        assert on_host == [False, placed == "host"], "dense, and the recipe on trial"


@pytest.mark.filterwarnings("ignore:Grad strides do not match")
@pytest.mark.parametrize("views", [False, pytest.param(True, marks=pytest.mark.rest)])
def test_the_order_of_gradients_is_looked_at_without_a_wait_and_refused_in_the_next_pass(
    ddp: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch, views: bool
) -> None:
    device = on_a_device(monkeypatch, Near(), streams=True)
    for is_changed in (False, True):
        layers = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Conv2d(8, 4, 3))
        model = DistributedDataParallel(layers, gradient_as_bucket_view=views)
        if is_changed:
            model.to(memory_format=torch.channels_last)
        wire = gradwire.attach(model, recipe="dense", placement="device")
        inputs = torch.randn(2, 2, 8, 8)
        with watched(device, wire):
            model(inputs).sum().backward()
            assert device.waited == []
            for _ in range(2):
                model.zero_grad()
                with pytest.raises(ValueError, match="memory format") if is_changed else nullcontext():
                    model(inputs).sum().backward()
        assert device.races == []


def test_parameters_on_two_devices_are_refused(ddp: DistributedDataParallel) -> None:
    source = gradwire.sources.source_of(ddp)
    source.parameters = {**source.parameters, "far": nn.Parameter(torch.empty(2, device="meta"))}
    with pytest.raises(ValueError, match="parameters are on cpu and meta"):
        source.check()


def test_a_thread_that_has_used_a_stream_is_on_its_own_device_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model on the second GPU, in a process whose current one is the first."""
    current = accelerators(monkeypatch)
    with Accelerator(torch.device("cuda", 1)).using("copies 1"):
        assert (current.stream, current.device) == ("copies 1", 1)
    assert (current.stream, current.device) == ("own 1", 0)
    assert current.contexts == {1}, "going back makes no context on the first GPU"


def test_two_threads_may_use_one_stream_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each thread has a current stream of its own; a stream that is its own context manager has one memory.
    current = accelerators(monkeypatch)
    device, entered, left = Accelerator(torch.device("cuda", 0)), threading.Event(), threading.Event()
    seen = []

    def other() -> None:
        with device.using("copies 0"):
            entered.set()
            left.wait(10.0)
            seen.append(current.stream)
        seen.append(current.stream)

    thread = threading.Thread(target=other)
    with device.using("copies 0"):
        thread.start()
        assert entered.wait(10.0)
    assert current.stream == "own 0"
    left.set()
    thread.join()
    assert seen == ["copies 0", "own 0"]


def test_the_worker_stays_on_the_device_of_the_model() -> None:
    """Its events would otherwise be recorded from the first GPU, and leave a context there."""
    seen: list[str] = []
    worker = Worker(print, begun=lambda: seen.append("began"))
    worker.call(lambda: seen.append("called"))
    worker.stop()
    assert seen == ["began", "called"]
