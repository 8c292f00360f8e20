"""Real gloo ranks: lossless training is DDP's bit for bit, and a process group that compresses sums as gloo
does.

Order of reduction: with two ranks a sum has two addends, x_0/2 and x_1/2, so that there is only one order,
DDP's. With three it is that of a ring (`tests/support/ring_order.py`), which is not gloo's.
"""

from __future__ import annotations

import pytest

from tests.support.ranks import Results, perform, perform_in_halves, value

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """All scenes on two ranks."""
    return perform_in_halves("tests.process.scenes_lossless", 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Sums on three ranks."""
    return perform("tests.process.scenes_lossless", 3, tmp_path_factory.mktemp("three"), ["ring sums"])


def test_lossless_training_on_two_ranks_is_ddps_bit_for_bit(two: Results) -> None:
    for found in value(two, "training"):
        for plain, lossless in found.values():
            assert lossless == plain


def test_near_lossless_training_stays_where_ddp_goes(two: Results) -> None:
    first, second = value(two, "near")
    for setting, found in first.items():
        assert found["digest"] == second[setting]["digest"]
        # A step moves a parameter by 2 ulp at most, 2^-22 of it, and these steps by some 10^-3 of it: 60 of
        # them stay within 60·2^-22·10^3 of their way or so, if training does not spread what was close.
        assert found["away"] < 0.015, setting
        assert found["ratio"] < 0.9, setting


def test_a_loss_scale_of_a_power_of_two_changes_no_bit(two: Results) -> None:
    for plain, scaled in value(two, "loss scales"):
        assert scaled == plain


def test_a_resumed_run_goes_on_with_its_tables(two: Results) -> None:
    assert value(two, "resumed") == [True, True]


def test_the_process_group_gives_gloos_sums(two: Results) -> None:
    assert value(two, "sums") == [[], []]


def test_the_process_group_adds_in_the_order_of_a_ring(two: Results, three: Results) -> None:
    assert value(two, "ring sums") + value(three, "ring sums") == [[]] * 5


def test_everything_else_goes_to_gloo(two: Results) -> None:
    for found in value(two, "everything else"):
        assert found == {
            "largest": True,
            "small": [3.0] * 3,
            "whole": [3],
            "many": [[3.0 + 2 * n] for n in range(5)],
            "spread": [1.0] * 4,
            "rows": [[0.0] * 2, [1.0] * 2],
            "swapped": [0.0, 1.0],
            "gathered": [[0.0] * 2, [1.0] * 2],
            "share": True,
            "across": [3.0],
        }


def test_ddp_over_the_process_group_is_ddp(two: Results) -> None:
    for plain, compressed in value(two, "ddp"):
        assert compressed == plain


def test_what_is_refused_over_the_process_group_is_said(two: Results) -> None:
    assert all("topk" in said for said in value(two, "refused"))
