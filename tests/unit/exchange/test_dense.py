"""Plain all-reduce: the arithmetic of DDP, in its order."""

from __future__ import annotations

import torch

from gradwire.comm import Round, ThreadComm, run_ranks
from gradwire.exchange.base import run
from gradwire.exchange.dense import dense
from gradwire.measure.metered import MeteredComm
from gradwire.unit.context import ExchangeContext
from tests.support.looped import looped
from tests.support.steps import step


def test_half_precision_does_not_overflow_on_the_way() -> None:
    for result in step(dense(), lambda rank: torch.full((3,), 60000.0, dtype=torch.float16), 4):
        assert result.mean.tolist() == [60000.0] * 3


@looped("dtype", [torch.bfloat16, torch.float16])
def test_where_parameters_are_shorter_values_travel_as_those_and_the_rest_stays(dtype: torch.dtype) -> None:
    inputs = [torch.randn(500, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    inputs[0][7] = inputs[1][7] = 3e5  # too large for float16

    def body(comm: ThreadComm) -> tuple[torch.Tensor, torch.Tensor, list[Round]]:
        x, metered = inputs[comm.rank].clone(), MeteredComm(comm)
        mean, ctx = torch.empty_like(x), ExchangeContext(0, 0, comm.rank, comm.world, narrow=dtype)
        run(dense(), x, mean, metered, ctx)
        assert tuple(metered.rounds) == dense().rounds(500, torch.float32, ctx)
        return mean, x, metered.rounds

    # float16 ends at 65504: each of two ranks is held to 2^14, so that no sum overflows.
    limit = 2.0**14 if dtype == torch.float16 else 2.0**126
    shares = [(x / 2.0).clamp(-limit, limit).to(dtype) for x in inputs]
    for x, (mean, unsent, (sent,)) in zip(inputs, run_ranks(2, body), strict=True):
        share = (x / 2.0).clamp(-limit, limit).to(dtype)
        assert sent.dtype == dtype
        assert torch.equal(mean, (shares[0] + shares[1]).float())
        assert torch.equal(unsent, x - 2.0 * share.float())
        assert unsent.any()
