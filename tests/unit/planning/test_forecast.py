"""What a forecast becomes where codecs run elsewhere."""

from __future__ import annotations

from gradwire.planning.collectives import Transfer
from gradwire.planning.costs import Backward
from gradwire.planning.forecast import Forecast
from gradwire.planning.predict import Tail, UnitWork


def test_copies_out_queue_one_after_the_other_and_all_means_come_back_at_the_end() -> None:
    units = tuple(UnitWork(ready_s, 10, (Transfer("shift", 1.0),)) for ready_s in (1.0, 2.0))
    backward = Backward(0.0, (1.0, 2.0), (10, 10), 2.0)
    forecast = Forecast(backward, (units,), Tail(Transfer("shift", 0.0)), 0.0, 0.0, 0.0, at_most=False)
    assert forecast.step_s() == 3.0
    # Half a second an element: the first unit is there at 6 s, the second at 11 s and sent at 12 s.
    assert forecast.copied(0.5).step_s() == 12.0 + 2 * 10 * 0.5
    assert forecast.copied(0.0).step_s() == 3.0
