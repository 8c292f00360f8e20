"""A flipped bit, in any message of any recipe: noticed on all ranks in its step, or put right.

Ranks check what they receive (`gradwire.comm.checksums`). After a step that fails, the memory is that of the
step before, and training goes on. Without checks the same bits leave replicas different, and no rank knows.
"""

from __future__ import annotations

import functools
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.comm import Comm, ThreadComm, run_ranks
from gradwire.comm.checksums import CheckedComm
from gradwire.errors import PeerFailed, TransportError, WireError
from tests.support.damage import Damage, DamagingComm
from tests.support.depth import FEW, FULL, seed
from tests.support.looped import looped
from tests.support.recipes import EVERY_RECIPE
from tests.support.rig import Rig, gradients

WORLDS = (2, 3, 4)
COUNT = 1000 if FULL else 8 if FEW else 24
STEPS, STRUCK = 3, 1
"""Of these steps, the one in which a message is damaged."""
UNIT_ELEMENTS = 3000


class Setting(NamedTuple):
    """Who exchanges what."""

    name: str
    world: int
    per_node: int = 1

    def run(self, unlucky: int, damage: Damage, *, checks: bool = True) -> list[Ran]:
        """All steps on all ranks; `damage` strikes the rank `unlucky` in one of them."""

        def rank(comm: Comm) -> Ran:
            now = Damage()

            def wrap(inner: Comm) -> Comm:
                assert isinstance(inner, ThreadComm)
                damaging = DamagingComm(inner, now)
                return CheckedComm(damaging) if checks else damaging

            rig = Rig(
                comm, EVERY_RECIPE[self.name], unit_elements=UNIT_ELEMENTS, per_node=self.per_node, wrap=wrap
            )
            found = Ran([], [], [])
            for step in range(STEPS):
                before, number = rig.planes, rig.reducer.step
                if step == STRUCK and comm.rank == unlucky:
                    first = len(now.sizes)
                    now.message, now.flips = first + damage.message, damage.flips
                    now.lasting = damage.lasting
                outcome = rig.step(gradients(comm.rank, step))
                now.lasting = False
                if step == STRUCK and comm.rank == unlucky:
                    damage.sizes[:] = now.sizes[first:]
                found.errors.append(outcome.error)
                found.means.append(outcome.flat())
                same = all(
                    torch.equal(tensor, before[key]) for key, tensor in rig.planes.items() if key in before
                )
                found.intact.append(same and rig.reducer.step == number)
            return found

        return run_ranks(self.world, rank)


class Ran(NamedTuple):
    """What became of the steps on one rank."""

    errors: list[BaseException | None]
    means: list[Tensor]
    intact: list[bool]


@functools.cache
def clean(setting: Setting, unlucky: int) -> tuple[list[Ran], list[int]]:
    """The steps without damage, and the sizes of the messages that might be struck."""
    nothing = Damage()
    return setting.run(unlucky, nothing), nothing.sizes


def cases() -> list[tuple[Setting, int, bool, float, float]]:
    """A setting, a rank, and where between the first and the last bit of the step it is struck.

    Every other rank is struck from there to the end of the step.
    """
    random = Random(seed())
    names = list(EVERY_RECIPE)
    random.shuffle(names)
    found = []
    for number in range(COUNT):
        world = WORLDS[number % len(WORLDS)]  # in turn: each has a test, in every run
        per_node = 2 if world == 4 and random.random() < 0.5 else 1
        setting = Setting(names[number % len(names)], world, per_node)
        lasting = per_node == 1 and random.random() < 0.5
        found.append((setting, random.randrange(world), lasting, random.random(), random.random()))
    return found


@looped(("setting", "unlucky", "lasting", "which", "where"), cases(), by=lambda row: f"{row[0].world} ranks")
def test_a_flipped_bit_is_noticed_on_all_ranks_in_its_step_or_put_right(
    setting: Setting, unlucky: int, lasting: bool, which: float, where: float
) -> None:
    undamaged, sizes = clean(setting, unlucky)
    if not sizes:
        return  # nothing travels in this step
    message = int(which * len(sizes))
    damage = Damage(message, (int(where * 8 * sizes[message]),), lasting)
    ran = setting.run(unlucky, damage)
    raised = [each.errors[STRUCK] for each in ran]
    if any(error is not None for error in raised):
        assert isinstance(raised[unlucky], WireError), raised
        assert all(isinstance(error, PeerFailed | WireError) for error in raised), "on all ranks"
        assert all(each.intact[STRUCK] for each in ran), "the memory is that of the last committed step"
        assert not any(each.means[STRUCK].isfinite().any() for each in ran)
    else:
        for each, as_it_is in zip(ran, undamaged, strict=True):
            assert torch.equal(each.means[STRUCK], as_it_is.means[STRUCK]), "put right"
    assert all(each.errors[-1] is None for each in ran), "training goes on"
    assert all(torch.equal(each.means[-1], ran[0].means[-1]) for each in ran), "and replicas stay equal"


@looped("name", ["dense", "int8"])
def test_without_checks_no_rank_knows(name: str) -> None:
    setting = Setting(name, 2)
    undamaged, _sizes = clean(setting, 1)
    ran = setting.run(1, Damage(0, tuple(range(8))), checks=False)
    assert [each.errors for each in ran] == [[None] * STEPS] * 2
    assert not torch.equal(ran[1].means[STRUCK], undamaged[1].means[STRUCK])


def test_means_that_come_damaged_again_and_again_end_the_run_on_all_ranks() -> None:
    """Inside a node they are sent after the status vote, and repeated, but not for ever."""
    setting = Setting("topk", 4, 2)
    _ran, sizes = clean(setting, 0)
    last = max(number for number, size in enumerate(sizes) if size > 3000)
    ran = setting.run(0, Damage(last, (0,), lasting=True))
    assert isinstance(ran[0].errors[STRUCK], WireError)
    assert all(isinstance(each.errors[STRUCK], PeerFailed) for each in ran[1:])
    assert all(isinstance(each.errors[-1], TransportError) for each in ran)
