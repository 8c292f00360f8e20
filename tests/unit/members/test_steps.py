"""Which of its attempted steps a member brings to a round, after healing, a lost round and a save."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gradwire.members.steps import MovingSteps
from gradwire.sources.local_optimizers import LocalOptimizers
from tests.support.models import batch, optimizer_of, perceptron

EVERY = 4


pytestmark = pytest.mark.usefixtures("world_of_one")


class Member:
    """A member with `steps` attempted steps since it began, which has taken part in no round."""

    def __init__(self, steps: int, delay: int = 0, seed: int = 0) -> None:
        self.model = perceptron(seed)
        optimizer = optimizer_of(self.model)
        self.optimizers = LocalOptimizers(optimizer, lambda given: torch.optim.SGD(given, lr=1.0))
        group = dist.group.WORLD
        assert group is not None
        self.source = MovingSteps(
            self.model, group, self.optimizers, every=EVERY, delay=delay, on_host=True, name=f"of {seed}"
        )
        self.source.check_alone()
        self.source.go(lambda: None, lambda: False, lambda: False)
        for step in range(steps):
            inputs, targets = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(self.model(inputs), targets).backward()
            optimizer.step()


def test_steps_before_a_healing_count_in_no_later_round() -> None:
    member, other = Member(3), Member(0, seed=1)
    assert member.source.rounds.share == (3, EVERY)
    member.source.take_shared(other.source.shared_state())
    assert member.source.rounds.share == (0, EVERY), "what it had learned is gone"


def test_what_a_round_carried_that_is_dropped_comes_with_the_next_one() -> None:
    member, other = Member(3), Member(0, seed=1)
    member.source.take_shared(other.source.shared_state())
    assert not member.source.rounds.has_learned
    member.source.rounds.drop()
    assert member.source.rounds.has_learned


def test_steps_that_a_saved_round_carried_are_counted_once_when_it_lands() -> None:
    member = Member(EVERY + 1, delay=2)
    saved = member.source.state.save()
    means = {name: torch.zeros_like(each) for name, each in saved["shared"].items()}
    flight = {"lands_at": EVERY + 2, "means": means, "buffers": {}}
    saved |= {"flight": flight, "round_at": EVERY, "counted_at": 0, "left_at": EVERY, "counted": 9}
    resumed = Member(0, delay=2, seed=1)
    _text, apply = resumed.source.state.prepared(saved, own=True)
    apply()
    assert resumed.source.rounds.steps == EVERY + 1
    assert resumed.source.rounds.receive() == (True, False)
    resumed.source.rounds.step()  # the round lands
    assert resumed.source.rounds.steps == 1
    assert resumed.source.rounds.counted == 9, "of all replicas, whoever meets now"
