"""How a run of several settings proceeds; the settings are stand-ins, no process."""

from types import SimpleNamespace

import pytest

from gradwire_lab.bench.runner import MOST_WARMUP, measure
from gradwire_lab.bench.settings import Repetitions


class Stand:
    """A setting that has settled after so many steps."""

    def __init__(self, settles_at):
        self.measured = SimpleNamespace(entry=SimpleNamespace(name="x"))
        self.settles_at, self.uncounted, self.counted, self.alive = settles_at, 0, 0, True

    @property
    def settled(self):
        return self.uncounted >= self.settles_at

    def train(self, count, counted=True):
        if counted:
            self.counted += count
        else:
            assert self.counted == 0
            self.uncounted += count


def warmed(schedule, *settle_at):
    running = [Stand(each) for each in settle_at]
    found = measure(running, SimpleNamespace(schedule=schedule), lambda said: None)
    assert {each.uncounted for each in running} == {found}  # losses are after the same number of steps
    assert {each.counted for each in running} == {schedule.steps * schedule.rounds}
    return found


@pytest.mark.parametrize(
    ("settles_at", "uncounted"), [(0, 25), (25, 25), (26, 35), (62, 65), (1e9, MOST_WARMUP)]
)
def test_nothing_counts_before_all_recipes_have_settled(settles_at, uncounted):
    assert warmed(Repetitions(2, 3), 0, settles_at) == uncounted


def test_a_warmup_that_was_asked_for_is_kept():
    assert warmed(Repetitions(2, 3, warmup=4), 1e9) == 4
    assert warmed(Repetitions(2, 3, warmup=0), 1e9) == 0
