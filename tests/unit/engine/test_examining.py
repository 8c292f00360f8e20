"""What is recorded of dense steps, and what ranks find out from it and tell each other."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest
import torch

from gradwire.arena import ParameterSpec
from gradwire.comm import Comm, ThreadComm, run_ranks
from gradwire.comm.checked import CheckedComm
from gradwire.decide.profiler import DISCARDED, MEASURED, ORDINARY
from gradwire.engine import examining
from gradwire.engine.arrival import Arrival, Entry
from gradwire.engine.examining import (
    LARGEST,
    MOST_RANKS,
    RECORDED,
    STEPS,
    WAIT_S,
    Examination,
    Found,
    Recording,
    sample_of,
)
from gradwire.errors import PeerFailed, WireError
from gradwire.measure.codec import EchoComm
from gradwire.placement import HostDevice
from gradwire.planning.costs import CodecCost, Line
from gradwire.recipes import recipe
from tests.support.damage import Damage, DamagingComm
from tests.support.rig import Rig, gradients, specs

TEXTS = ("int4", "topk(ratio=0.1)", "fp16")
CODEC = CodecCost(Line(1.0, 2.0), Line(3.0, 4.0))


def _matrix(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> ParameterSpec:
    return ParameterSpec(name, shape, dtype, torch.Size(shape).numel())


def test_whole_matrices_are_recorded_the_largest_that_fit_and_not_too_many_elements() -> None:
    many = [_matrix(f"m{number}", 512, 1024) for number in range(8)] + [_matrix("s", 64, 64)]
    assert [spec.name for spec in sample_of([*many, _matrix("vector", 9000)], world=2)] == ["s"]
    found = sample_of([_matrix(f"m{number}", 128, 1024) for number in range(64)], world=2)
    assert sum(spec.numel for spec in found) == LARGEST
    one = sample_of([_matrix("only", 100, 50)], world=16)
    assert [(spec.name, spec.shape, spec.numel) for spec in one] == [("only", (1, 50), 50)]
    assert sample_of([_matrix("vector", 9000)], world=2) == ()


@pytest.mark.parametrize("world", [2, 4, 64])
def test_what_is_recorded_costs_the_bytes_of_two_dense_steps_at_most(world: int) -> None:
    model = [_matrix(f"m{number}", 40 + number, 64) for number in range(100)]
    recorded = sum(spec.numel for spec in sample_of(model, world))
    ring = 2 * (world - 1) / world * sum(spec.numel for spec in model)
    assert 0 < (world - 1) * RECORDED * recorded <= 2 * ring


def _arrival(gradient: torch.Tensor) -> Arrival:
    return Arrival(torch.cat([torch.zeros(3), gradient]), (Entry("w", 3, gradient.numel()),), 0)


def test_only_committed_steps_are_kept_the_last_of_them_without_the_loss_scale() -> None:
    world = 3
    spec = _matrix("w", 64, 64)

    def rank(comm: Comm) -> list[list[float]]:
        recording = Recording([spec, _matrix("rest", 4096, 64)], world)
        for step in range(RECORDED + 3):
            recording.take(_arrival(torch.full((4096,), 8.0 * (10 * step + comm.rank))), scale=8.0)
            recording.end(committed=step != 5)
        steps = recording.gathered(comm, comm)
        assert all(len(set(gradient.tolist())) == 1 for step in steps for gradient in step)
        return [[float(gradient[0]) for gradient in step] for step in steps]

    expected = [[10.0 * step + rank for rank in range(world)] for step in [2, 3, 4, *range(6, RECORDED + 3)]]
    assert run_ranks(world, rank) == [expected] * world


def test_where_recorded_gradients_come_damaged_all_ranks_raise() -> None:
    def rank(comm: ThreadComm) -> str:
        damage = Damage(0, (5,)) if comm.rank == 0 else Damage()
        checked = CheckedComm(DamagingComm(comm, damage))
        recording = Recording([_matrix("w", 64, 64), _matrix("rest", 4096, 64)], comm.world)
        recording.take(_arrival(torch.ones(4096)), scale=1.0)
        recording.end(committed=True)
        try:
            recording.gathered(checked, checked)
        except (WireError, PeerFailed) as error:
            return type(error).__name__
        return "nothing"

    assert run_ranks(3, rank) == ["WireError", "PeerFailed", "PeerFailed"]


def test_a_rank_that_cannot_record_fails_its_step_on_all_ranks() -> None:
    full = MemoryError("no room")

    def rank(comm: Comm) -> BaseException | None:
        rig = Rig(comm, "auto")
        if comm.rank == 0:

            def take(*_: object) -> None:
                raise full

            rig.engine._decider._recording.take = take  # type: ignore[attr-defined]  # of this rank only
        failed = rig.step(gradients(comm.rank, 0)).error
        assert rig.engine.step == 0
        return failed

    own, other = run_ranks(2, rank)
    assert own is full
    assert isinstance(other, PeerFailed)


def test_the_first_ranks_stand_for_all() -> None:
    def rank(comm: Comm) -> tuple[int, int]:
        recording = Recording([_matrix("w", 64, 64), _matrix("rest", 8192, 64)], comm.world)
        recording.take(_arrival(torch.ones(4096)), scale=1.0)
        recording.end(committed=True)
        [step] = recording.gathered(comm, comm)
        return len(step), step[0].numel()

    assert run_ranks(MOST_RANKS + 1, rank) == [(MOST_RANKS, 4096)] * (MOST_RANKS + 1)


def _examination(job: Callable[..., Found] | None, monkeypatch: pytest.MonkeyPatch) -> Examination:
    """Of the first and third of `TEXTS`, which rank 0 of two examines."""
    if job is not None:
        monkeypatch.setattr(examining, "_examined", job)
        monkeypatch.setattr(examining, "in_background", lambda work: work())
    built = [recipe(text).build() for text in TEXTS]
    recording = Recording([_matrix("w", 64, 64)], 2)
    draws = torch.randn(3, 2, 256, generator=torch.Generator().manual_seed(0))
    recording.specs = (_matrix("w", 4, 64),)
    return Examination(
        built,
        recording,
        [list(step) for step in draws],
        EchoComm(2),
        HostDevice(),
    )


def test_ranks_share_the_recipes_and_rows_bring_them_together(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = _examination(lambda composition, *_: Found(len(composition.text), CODEC), monkeypatch)
    found = [len(recipe(text).build().text) for text in TEXTS]
    row = mine.row
    assert row == (1.0, found[0], 1.0, 2.0, 3.0, 4.0, *5 * (-1.0,), found[2], 1.0, 2.0, 3.0, 4.0)
    theirs = (1.0, *5 * (-1.0,), 0.5, 4.0, 3.0, 2.0, 1.0, *5 * (-1.0,))
    together = mine.observe([row, theirs])
    assert together == (
        Found(found[0], CODEC),
        Found(0.5, CodecCost(Line(4.0, 3.0), Line(2.0, 1.0))),
        Found(found[2], CODEC),
    )


@pytest.mark.parametrize("step_s", [0.25, 1.0, 30.0])
def test_it_waits_for_all_ranks_but_not_for_ever(step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight steps, or five seconds where these are shorter: a busy machine takes the same choice."""
    now = [0.0]
    monkeypatch.setattr(examining, "now_s", lambda: now[0])
    mine = _examination(lambda *_: Found(1.0, CODEC), monkeypatch)
    monkeypatch.setattr(examining, "in_background", lambda _work: None)
    slow = _examination(None, monkeypatch)  # its thread never ends
    steps, found = 0, None
    while found is None:
        steps, now[0] = steps + 1, now[0] + step_s
        rows = [mine.row, slow.row]
        found = mine.observe(rows)
        assert slow.observe(rows) == found
    assert steps == max(STEPS, round(WAIT_S / step_s))
    assert found == (Found(1.0, CODEC), None, Found(1.0, CODEC))


def test_what_cannot_be_examined_is_unknown_and_the_others_are_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(composition: object, *_: object) -> Found:
        if getattr(composition, "text", "").startswith("int4"):
            raise ZeroDivisionError("on purpose")
        return Found(0.5, CODEC)

    mine = _examination(fails, monkeypatch)
    assert mine.observe([mine.row]) == (None, None, Found(0.5, CODEC))
    assert "int4" in caplog.messages[0]
    assert "on purpose" in caplog.messages[0]


def test_it_ends_with_what_refers_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    started, asked = threading.Event(), []

    def examined(
        _composition: object, _specs: object, _recorded: object, is_over: Callable[[], bool], _device: object
    ) -> Found:
        started.set()
        while not is_over():
            asked.append(None)
        raise examining.Interrupted

    monkeypatch.setattr(examining, "_examined", examined)
    mine = _examination(None, monkeypatch)
    assert started.wait(10)
    [thread] = [each for each in threading.enumerate() if each.name == "gradwire examines"]
    assert not thread.daemon, "in native code it would abort an interpreter that ends"
    del mine
    thread.join(10)
    assert not thread.is_alive()


def test_a_model_that_is_dropped_is_gone_while_recipes_are_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine, and what brings buffers, refer to the model."""
    jobs: list[Callable[[], None]] = []
    monkeypatch.setattr(examining, "in_background", jobs.append)
    monkeypatch.setattr("gradwire.recipes.auto.shortlist", lambda *_: ("int4", "fp16"))

    def rank(comm: Comm) -> bool:
        def buffers() -> None:
            return None

        rig = Rig(comm, "auto", buffers=buffers)
        gone = weakref.ref(buffers), weakref.ref(rig.engine)
        for step in range(DISCARDED + ORDINARY + MEASURED):
            rig.step(gradients(comm.rank, step))
        assert rig.engine.measuring
        del rig, buffers
        gc.collect()
        return not any(each() for each in gone)

    assert run_ranks(1, rank) == [True]
    assert len(jobs) == 1, "it is still to be done"


def test_measured_codecs_and_fidelities_are_of_the_recipes_themselves() -> None:
    spec = _matrix("w", 64, 64)
    draws = torch.randn(4, 2, 4096, generator=torch.Generator().manual_seed(0))
    recorded = [list(step) for step in draws]
    found = {
        text: examining._examined(recipe(text).build(), (spec,), recorded, lambda: False, HostDevice())
        for text in ("fp16", "int4", "topk(ratio=0.01)")
    }
    kept = [each.fidelity for each in found.values()]
    assert kept == sorted(kept, reverse=True)
    assert all(each.codec.encode(1 << 19) > 0.0 for each in found.values())


def test_dense_steps_are_recorded_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under `auto` means are those of `dense`, bit for bit, until it decides."""
    seen: list[list[list[torch.Tensor]]] = []
    monkeypatch.setattr(examining, "in_background", lambda _work: None)
    gathered = Recording.gathered

    def kept(recording: Recording, comm: Comm, control: Comm) -> list[list[torch.Tensor]]:
        seen.append([list(step) for step in gathered(recording, comm, control)])
        return seen[-1]

    monkeypatch.setattr(Recording, "gathered", kept)
    monkeypatch.setattr("gradwire.recipes.auto.shortlist", lambda *_: ("int4",))
    steps = DISCARDED + ORDINARY + MEASURED

    def rank(comm: Comm, text: str) -> list[torch.Tensor]:
        rig = Rig(comm, text)
        return [rig.step(gradients(comm.rank, step)).flat() for step in range(steps)]

    measured, plain = (run_ranks(2, lambda comm, text=text: rank(comm, text)) for text in ("auto", "dense"))
    assert all(
        torch.equal(a, b)
        for ours, theirs in zip(measured, plain, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    [sample] = sample_of(specs(), 2)
    assert len(seen) == 2
    for number, step in enumerate(seen[0], start=steps - RECORDED):
        for each, gradient in enumerate(step):
            wanted = gradients(each, number)[sample.name].view(-1)[: sample.numel]
            assert torch.equal(gradient, wanted)
