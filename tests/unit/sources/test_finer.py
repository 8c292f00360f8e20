"""Smaller buckets: DDP's reducer is rebuilt, and nothing else changes."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.recipes import recipe
from gradwire.sources.buckets import SMALLEST_BYTES
from gradwire.sources.ddp.finer import caps_of, refine_buckets, restore_buckets

pytestmark = pytest.mark.usefixtures("world_of_one")


WIDTH = 450


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


TOTAL_BYTES = 6 * (WIDTH * WIDTH + WIDTH) * 4


def buckets_of(ddp: DistributedDataParallel, steps: int = 2) -> list[int]:
    """Sizes in bytes of the buckets of the last step."""
    seen: list[int] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            seen.clear()
        seen.append(bucket.buffer().nbytes)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    for _ in range(steps):
        ddp.zero_grad()
        ddp(torch.ones(2, WIDTH)).sum().backward()
    return seen


def test_a_default_module_has_one_large_bucket_after_the_first() -> None:
    assert len(buckets_of(DistributedDataParallel(model()))) <= 2


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("unused", [False, True])
def test_refined_buckets_are_small_and_hold_everything(view: bool, unused: bool) -> None:
    ddp = DistributedDataParallel(model(), gradient_as_bucket_view=view, find_unused_parameters=unused)
    assert refine_buckets(ddp, TOTAL_BYTES, 32)
    sizes = buckets_of(ddp)
    assert len(sizes) >= 3
    assert max(sizes) <= SMALLEST_BYTES + WIDTH * WIDTH * 4
    assert sum(sizes) == TOTAL_BYTES


def test_gradients_are_those_of_the_module_alone() -> None:
    alone, ddp = model(), DistributedDataParallel(model())
    alone(torch.ones(2, WIDTH)).sum().backward()
    refine_buckets(ddp, TOTAL_BYTES, 32)
    buckets_of(ddp)
    for mine, theirs in zip(ddp.module.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_refining_in_the_middle_of_training_keeps_it_going() -> None:
    ddp = DistributedDataParallel(model())
    for _ in range(3):
        ddp(torch.ones(2, WIDTH)).sum().backward()
    assert refine_buckets(ddp, TOTAL_BYTES, 32)
    assert len(buckets_of(ddp)) >= 3


def test_what_was_refined_is_restored() -> None:
    coarse = buckets_of(DistributedDataParallel(model()), steps=3)
    ddp = DistributedDataParallel(model())
    own = caps_of(ddp)
    assert refine_buckets(ddp, TOTAL_BYTES, 32)
    restore_buckets(ddp, own)
    assert caps_of(ddp) == own
    assert buckets_of(ddp, steps=3) == coarse


def test_nothing_is_rebuilt_where_nothing_was_refined() -> None:
    ddp = DistributedDataParallel(model())
    before = ddp.reducer
    restore_buckets(ddp, caps_of(ddp))
    assert ddp.reducer is before


def test_under_an_adaptive_recipe_dense_travels_in_ddps_own_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire._api.attach.is_alone", lambda _comm: False)
    ddp = DistributedDataParallel(model())
    own, wire = caps_of(ddp), gradwire.attach(ddp, recipe="auto")
    reducer, caps = wire.attached.backward.reducer, []
    chosen = recipe("topk(ratio=0.1)").build()
    for change in (
        lambda: None,
        lambda: reducer.install(chosen),
        wire.flush,
        lambda: reducer.restore(reducer.retired()),
    ):
        change()
        for _ in range(2):
            ddp.zero_grad()
            ddp(torch.ones(2, WIDTH)).sum().backward()
        caps.append(caps_of(ddp) == own)
        wire.flush()
    assert caps == [True, False, False, True]


def test_a_small_cap_is_never_enlarged() -> None:
    ddp = DistributedDataParallel(model(), bucket_cap_mb=0.25)
    before = ddp.reducer
    assert refine_buckets(ddp, TOTAL_BYTES, 32)
    assert ddp.reducer is before


def test_a_static_graph_is_left_alone() -> None:
    ddp = DistributedDataParallel(model(), static_graph=True)
    assert not refine_buckets(ddp, TOTAL_BYTES, 32)


@pytest.mark.parametrize(("total", "buckets", "cap"), [(10, 32, 1), (64 << 20, 32, 2), (64 << 20, 8, 8)])
def test_the_cap_makes_as_many_buckets_as_are_wanted_and_has_a_floor(
    total: int, buckets: int, cap: int
) -> None:
    ddp = DistributedDataParallel(model())
    assert refine_buckets(ddp, total, buckets)
    assert caps_of(ddp).bytes_cap == cap * SMALLEST_BYTES
