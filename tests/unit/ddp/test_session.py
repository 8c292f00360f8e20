"""When buckets are handed to the engine."""

from types import SimpleNamespace

import pytest
import torch

from gradwire.ddp.arrival import Arrival
from gradwire.ddp.session import Session


class Bucket:
    """The n-th of three."""

    def __init__(self, number: int) -> None:
        self.number = number

    def index(self) -> int:
        return self.number


class Map:
    """Knows which bucket is the last."""

    def arrival(self, bucket: Bucket) -> Arrival:
        return Arrival(torch.zeros(1), (), bucket.number == 2)


@pytest.mark.parametrize(
    ("overlap", "measuring", "posted"),
    [(True, False, [1, 2, 3]), (True, True, [0, 0, 3]), (False, False, [0, 0, 3])],
)
def test_buckets_wait_for_the_end_of_backward_without_overlap_and_while_measuring(
    overlap: bool, measuring: bool, posted: list[int]
) -> None:
    jobs: list[object] = []
    session = Session(Map(), SimpleNamespace(post=jobs.append))
    session.engine = SimpleNamespace(measuring=measuring, arrive=print)
    session.overlap = overlap
    seen = []
    for number in range(3):
        session.take(Bucket(number))
        seen.append(len(jobs))
    assert seen == posted
