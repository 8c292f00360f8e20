"""A few hundred mutations of everything that is decoded; `make fuzz` tries a million."""

from __future__ import annotations

import pytest
import torch

from gradwire.codec.select.topk import top_k
from gradwire.comm import ThreadComm, run_ranks
from gradwire.contrib.oktopk import ok_topk
from gradwire.errors import WireError
from gradwire.exchange.base import run
from gradwire.unit.context import ExchangeContext
from tests.golden.fuzz import runner
from tests.support.damage import Damage, DamagingComm

pytestmark = pytest.mark.filterwarnings("ignore::SyntaxWarning")

COUNTS = {
    "frames": 1000,
    "steps": 1000,
    "payloads": 500,
    "exchanges": 400,
    "rings": 60,
    "states": 150,
    "files": 40,
    "texts": 600,
}


@pytest.mark.parametrize("what", COUNTS)
def test_damage_is_refused_by_type_or_does_no_harm(what: str) -> None:
    found = runner(what)(COUNTS[what], 0)
    assert found.total() == COUNTS[what]
    assert any(not name.endswith(("decoded", "taken")) for name in found), "some of it is refused"


@pytest.mark.parametrize("bit", [8 * 8 + 40, 8 * 8 + 63])
def test_regions_that_do_not_ascend_are_refused(bit: int) -> None:
    """Region bounds travel in a sum of one integer per rank, of which the second is struck."""

    def rank(comm: ThreadComm) -> None:
        damaging = DamagingComm(comm, Damage(0, (bit,) if comm.rank else ()))
        x, mean = torch.randn(1000), torch.empty(1000)
        run(ok_topk(top_k(0.1)), x, mean, damaging, ExchangeContext(0, 0, comm.rank, 2))

    with pytest.raises(WireError, match="regions that ranks agree on do not ascend"):
        run_ranks(2, rank)
