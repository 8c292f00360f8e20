"""What a round costs on the wire."""

from __future__ import annotations

import pytest
import torch

from gradwire.comm.base import DONE, Round, Verb


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize(
    ("verb", "total_sends"),
    [
        # Payloads sent by all ranks together, counted by hand per algorithm.
        ("all_reduce", lambda w: 2 * (w - 1)),  # a ring: W ranks, 2(W-1) chunks of M/W each
        ("all_gather", lambda w: w * (w - 1)),  # everybody's payload reaches everybody else
        ("broadcast", lambda w: w - 1),  # every other rank receives it once
        ("all_to_all", lambda w: w - 1),  # W ranks send W-1 rows of M/W each
        ("shift", lambda w: w if w > 1 else 0),  # everybody sends once, nobody to itself
    ],
)
def test_bytes_are_what_the_algorithm_sends(verb: Verb, total_sends, world: int) -> None:
    round_ = Round(verb, 210, torch.float32)
    assert round_.wire_bytes(world) == pytest.approx(total_sends(world) * 840 / world, rel=1e-15)


@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.uint8, 1), (torch.float16, 2), (torch.int32, 4), (torch.float64, 8)]
)
def test_payload_counts_bytes_of_the_type(dtype: torch.dtype, size: int) -> None:
    assert Round("all_gather", 11, dtype).payload_bytes == 11 * size


def test_done_calls_back_at_once() -> None:
    called = []
    DONE.wait()
    DONE.then(lambda: called.append(True))
    assert called == [True]
