"""Where means land."""

from __future__ import annotations

import pytest
import torch

from gradwire.codec.select.topk import top_k
from gradwire.codec.sparse import sparse
from gradwire.comm import Comm, run_ranks
from gradwire.errors import GradwireError
from gradwire.exchange.compose import remember
from gradwire.exchange.payloads import gather
from gradwire.measure.metered import MeteredComm
from gradwire.step.flat_buffers import FlatBuffer
from gradwire.step.gradient_bucket import GradientBucket, route_of
from gradwire.step.intake import Intake
from gradwire.step.moods import Outcome
from gradwire.step.step import SentBytes, Step
from gradwire.unit.parameters import ParameterSpec, slots_of
from tests.support.rig import Rig, gradients


def _flat_buffer(*sizes: int) -> FlatBuffer:
    specs = [ParameterSpec(f"p{i}", (size,), torch.float32, size) for i, size in enumerate(sizes)]
    return FlatBuffer(0, specs, remember(gather(sparse(top_k(0.5)))), (), torch.device("cpu"))


def _step(*buckets: dict[str, int]) -> tuple[Step, list[torch.Tensor]]:
    step, buffers = Step(0, "plan"), []
    for bucket in buckets:
        entries = slots_of(
            [ParameterSpec(name, (size,), torch.float32, size) for name, size in bucket.items()]
        )
        buffers.append(torch.zeros(sum(bucket.values())))
        step.come.add(GradientBucket(buffers[-1], entries, len(buffers) - 1))
    assert len(step.come.turns) == len(buckets)
    return step, buffers


@pytest.mark.parametrize(
    "buckets",
    [
        [{"p0": 2, "p1": 3}],
        [{"x": 4, "p0": 2, "p1": 3, "y": 1}],
        [{"p1": 3, "p0": 2}],
        [{"p0": 2}, {"p1": 3}],
        # In the second bucket p1 lies where it would follow p0 if that bucket were the first.
        [{"p0": 2, "x": 4}, {"y": 2, "p1": 3}],
        [{"p0": 2, "x": 1, "p1": 3}],
    ],
)
@pytest.mark.parametrize("factor", [1.0, 8.0])
def test_a_mean_lands_on_its_parameters_and_nowhere_else(
    buckets: list[dict[str, int]], factor: float
) -> None:
    (unit,) = _flat_buffer(2, 3).units
    step, buffers = _step(*buckets)
    route, mean = route_of(unit, step.come.in_turn.taken), torch.arange(1.0, 6.0)
    place = step.come.place_of(route, torch.zeros(5), factor)
    if place is None:
        step.land(route, mean, factor)
    else:
        place.copy_(mean)
    expected = {"p0": [1.0, 2.0], "p1": [3.0, 4.0, 5.0]}
    for bucket, buffer in zip(buckets, buffers, strict=True):
        for (name, size), part in zip(bucket.items(), buffer.split(list(bucket.values())), strict=True):
            assert part.tolist() == [factor * value for value in expected.get(name, size * [0.0])]


def test_a_unit_within_one_bucket_needs_no_copy() -> None:
    (unit,) = _flat_buffer(2, 3).units
    step, (buffer,) = _step({"x": 4, "p0": 2, "p1": 3})
    place = step.come.place_of(route_of(unit, step.come.in_turn.taken), torch.zeros(5), 1.0)
    assert place is not None
    assert place.data_ptr() == buffer[4:].data_ptr()


def test_a_unit_is_complete_when_all_its_pieces_are() -> None:
    flat_buffer = _flat_buffer(2, 3)
    step, _ = _step({"p0": 2, "p1": 3})
    assert step.come.completed([(flat_buffer.units[0], 1)]) == []
    assert step.come.completed([(flat_buffer.units[0], 1)]) == list(flat_buffer.units)


def test_the_first_failure_is_kept_with_its_context() -> None:
    step, _ = _step()
    step.rank = 2
    first, second = ValueError("first"), ValueError("second")
    step.fail(first, "encode of flat buffer 0 unit 3")
    step.fail(second, "decode of flat buffer 0 unit 1")
    assert step.error is first
    assert first.__notes__ == ["gradwire: step 0, rank 2, encode of flat buffer 0 unit 3"]


def test_what_is_finite_is_read_from_tensors_when_it_is_asked_for() -> None:
    step, _ = _step()
    flag = torch.tensor(True)
    step.note_finite(True)
    step.note_finite(flag)
    assert step.is_finite()
    flag.fill_(False)  # as a device would, later
    assert not step.is_finite()


def test_the_first_failure_stays_until_the_step_ends_and_the_outcome_decides_what_is_raised() -> None:
    step, _ = _step()
    own, agreed = ValueError("broken"), ValueError("on all ranks")
    step.fail(own, "compensation of p0")
    step.outcome = Outcome.VOTED
    assert not step.is_over
    assert step.error is own
    step.end(Outcome.FAILED, agreed)
    assert step.is_over
    assert not step.committed
    step.fail(ValueError("late"), "decode")
    assert step.error is agreed


def test_every_rank_hears_how_long_each_of_them_computed() -> None:
    def rank(comm: Comm) -> tuple[float, tuple[float, ...]]:
        rig = Rig(comm, "int8")
        step = rig.step(gradients(comm.rank, 0)).step
        return step.computing_s, step.computing_by_rank_s

    told = run_ranks(3, rank)
    own = torch.tensor([own_s for own_s, _ in told], dtype=torch.float32).tolist()  # as it travels
    assert len(set(own)) > 1, "some microseconds; two of them are alike now and then"
    assert all(list(by_rank_s) == own for _, by_rank_s in told)


def test_a_bucket_that_never_has_its_turn_is_missed_where_nothing_is_compressed() -> None:
    come = Intake()
    come.require_all_units([])
    come.add(GradientBucket(torch.zeros(1), (), 1))
    with pytest.raises(GradwireError, match="never arrived"):
        come.require_all_units([])


@pytest.mark.parametrize(
    ("planned", "is_timed", "found"),
    [(8.0, True, (16.0, 8.0)), (8.0, False, (8.0, 8.0)), (None, False, (16.0, 16.0))],
)
def test_bytes_are_metered_where_that_costs_nothing_or_nothing_was_planned(
    planned: float | None, is_timed: bool, found: tuple[float, float]
) -> None:
    def rank(comm: Comm) -> tuple[float, float]:
        sent, metered = SentBytes(), MeteredComm(comm)
        metered.all_reduce(torch.zeros(4)).wait()
        sent.add(planned, metered, is_timed=is_timed)
        return sent.metered_bytes, sent.predicted_bytes

    assert run_ranks(2, rank) == [found] * 2
