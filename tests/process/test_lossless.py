"""Real gloo ranks: lossless training is DDP's bit for bit.

With two ranks a sum has two addends, x_0/2 and x_1/2, so that there is only one order, DDP's.
"""

from __future__ import annotations

import pytest

from tests.support.world import Scenes, value

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Scenes:
    """All scenes on two ranks."""
    return Scenes("tests.process.scenes_lossless", 2, tmp_path_factory.mktemp("two"))


def test_lossless_training_on_two_ranks_is_ddps_bit_for_bit(two: Scenes) -> None:
    for found in value(two, "training"):
        for plain, lossless in found.values():
            assert lossless == plain


@pytest.mark.rest
def test_near_lossless_training_stays_where_ddp_goes(two: Scenes) -> None:
    first, second = value(two, "near")
    for setting, found in first.items():
        assert found["digest"] == second[setting]["digest"]
        # A step moves a parameter by 2 ulp at most, 2^-22 of it, and these steps by some 10^-3 of it: 60 of
        # them stay within 60·2^-22·10^3 of their way or so, if training does not spread what was close.
        assert found["away"] < 0.015, setting
        assert found["ratio"] < 0.9, setting


@pytest.mark.rest
def test_a_loss_scale_of_a_power_of_two_changes_no_bit(two: Scenes) -> None:
    for plain, scaled in value(two, "loss scales"):
        assert scaled == plain


def test_a_resumed_run_goes_on_with_its_tables(two: Scenes) -> None:
    assert value(two, "resumed") == [True, True]
