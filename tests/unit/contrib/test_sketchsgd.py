"""What a sum of count sketches finds, and what is done about it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gradwire.comm import Round
from gradwire.contrib.sketchsgd import sketch
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped
from tests.support.steps import step

WORLDS = (1, 2, 3, 4, 5)


def noise(rank: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank))


@looped("world", WORLDS)
@looped("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@looped(("planted", "table"), [(20, 5.0), (200, 60.0)])
def test_planted_sums_are_found(world: int, dtype: torch.dtype, planted: int, table: float) -> None:
    # A tenth of what may be sent with a small table; all of it with a large one.
    size, count = 20_000, 200
    places = torch.randperm(size, generator=torch.Generator().manual_seed(9))[:planted]

    def inputs(rank: int) -> Tensor:
        x = noise(rank, size)
        x[places] = (100.0 + places % 8) * (2 * world - 1 if rank == world - 1 else -1.0)
        return x.to(dtype)

    given = [inputs(rank) for rank in range(world)]
    exact = torch.stack(given).double().mean(0)
    for rank, result in enumerate(step(sketch(0.01, table=table), given.__getitem__, world)):
        sent = result.mean != 0
        assert sent[places].all()
        assert int(sent.sum()) == count
        assert torch.equal(result.unsent, given[rank].masked_fill(sent, 0.0))
        # W + 2 roundings of partial sums below 2W·107/W.
        bound = (world + 2) * 214 * torch.finfo(dtype).eps / 2
        assert (result.mean.double() - exact)[sent].abs().max() <= bound


def heavy_tailed(size: int) -> Tensor:
    """Student's t of 2 degrees: normal over the root of half a χ² of 2 degrees, which is exponential."""
    random = torch.Generator().manual_seed(1)
    exponential = -torch.rand(size, generator=random).clamp_min(1e-9).log()
    return torch.randn(size, generator=random) / exponential.sqrt()


def test_most_of_the_energy_of_a_heavy_tail_is_found() -> None:
    size, count = 400_000, 4000
    x = heavy_tailed(size)
    best = x.square().sort(descending=True).values[:count].sum()
    found = []
    for table in (0.5, 2.0, 5.0):
        (result,) = step(sketch(0.01, table=table), lambda _rank: x, 1)
        assert int((result.mean != 0).sum()) == count
        found.append(float(result.mean.square().sum() / best))
    assert found == sorted(found)
    assert found[-1] >= 0.8


@looped("world", WORLDS)
def test_everything_asked_for_is_an_exact_top_k_of_the_sums(world: int) -> None:
    # With as many candidates as elements the table has no say.
    given = [noise(rank, 100).mul(100).round() for rank in range(world)]
    total = torch.stack(given).sum(0)
    places = total.abs().sort(descending=True, stable=True).indices[:10]
    for rank, result in enumerate(step(sketch(0.1, candidates=10), given.__getitem__, world)):
        assert set((result.unsent != given[rank]).nonzero().view(-1).tolist()) <= set(places.tolist())
        assert (result.mean[places] - total[places] / world).abs().max() <= (world + 1) * 400 * 2.0**-24
        assert int((result.mean != 0).sum()) == 10


def test_rounds() -> None:
    ctx = ExchangeContext(0, 0, 0, 8)
    assert sketch(0.01).rounds(100_000, torch.float16, ctx) == (
        Round("all_reduce", 5 * 1000, torch.float32),
        Round("all_reduce", 4 * 1000, torch.float16),
    )
    assert sketch(0.01, rows=3, table=2.5, candidates=200).rounds(1000, torch.float64, ctx) == (
        Round("all_reduce", 3 * 9, torch.float32),  # 25 numbers, and as many in each row
        Round("all_reduce", 1000, torch.float64),  # there are no 2000 to ask for
    )


def test_hashes_stay_over_steps_and_differ_between_units() -> None:
    # So few columns that chance decides what is found among equals.
    x = torch.ones(2000) + torch.arange(2000) / 1e5
    exchange = sketch(0.01, candidates=1, table=0.5)
    found = [step(exchange, lambda _rank: x, 1, number, unit)[0].mean for number, unit in ((0, 0), (7, 0))]
    assert torch.equal(*found)
    (other,) = step(exchange, lambda _rank: x, 1, 0, unit=1)
    assert not torch.equal(other.mean != 0, found[0] != 0)


@looped("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_found_and_stays_in_its_place(bad: float) -> None:
    given = [noise(rank, 5000) for rank in range(3)]
    given[1][1234] = bad
    for result in step(sketch(0.01), given.__getitem__, 3):
        assert (~result.mean.isfinite()).nonzero().tolist() == [[1234]]
        assert result.unsent.isfinite().all()


@looped(
    ("options", "complaint"),
    [
        ({"rows": 4}, "odd"),
        ({"rows": 0}, "odd"),
        ({"rows": 2.5}, "odd"),
        ({"table": 0.0}, "above 0"),
        ({"table": float("nan")}, "above 0"),
        ({"candidates": 0}, "at least 1"),
        ({"candidates": 1.5}, "at least 1"),
        ({"ratio": 2.0}, "outside"),
    ],
)
def test_impossible_options_raise(options: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        sketch(**{"ratio": 0.1, **options})
