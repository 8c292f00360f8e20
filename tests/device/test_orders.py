"""Each place where gradwire puts work of streams in order is missed by a scene if it alone is taken out.

Places are found in the source. So one that comes later fails here, until a scene relies on it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.device.orders import OTHERS, nothing, orders, places
from tests.device.scenes_ordered import SCENES
from tests.support.looped import looped
from tests.support.removed import Mention, without


@pytest.fixture(scope="module", autouse=True)
def _world_of_one() -> Iterator[None]:
    """One rank, which compresses as in company."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("gradwire._api.attach.is_alone", lambda _comm: False)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


@looped("name", SCENES)
def test_nothing_is_wrong_with_all_in_order(name: str) -> None:
    assert SCENES[name]() == []


def missed(place: Mention) -> bool:
    """Whether a scene finds something wrong without what is at `place`, or breaks."""
    with without(place, nothing):
        for scene in SCENES.values():
            try:
                wrong = scene()
            except Exception:
                return True
            if wrong:
                return True
    return False


@looped("place", places(), few=5)
def test_each_place_is_missed(place: Mention) -> None:
    assert missed(place)


def test_what_is_left_out_is_there() -> None:
    assert {(each.path, each.text) for each in orders()} >= OTHERS
