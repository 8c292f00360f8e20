"""Verbs of the delaying group that DDP does not call; two ranks are threads of one process."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from gradwire_lab.emulate import EmulatedLink
from gradwire_lab.emulate.delayed_group import Cable, DelayedGroup
from gradwire_lab.emulate.link import WireFile


@pytest.fixture
def wire():
    shared = WireFile.create(EmulatedLink())
    yield Cable(shared)
    shared.close()


def test_several_tensors_are_gathered_at_once(wire):
    store = dist.HashStore()

    def gathered(rank):
        group = DelayedGroup(store, rank, 2, timedelta(seconds=20), wire)
        outputs = [torch.empty(2 * numel) for numel in (3, 1)]
        work = group.allgather_into_tensor_coalesced(
            outputs, [torch.full((numel,), rank + 1.0) for numel in (3, 1)]
        )
        assert work.wait()
        assert work.result() == outputs
        return [output.tolist() for output in outputs]

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(gathered, range(2))) == 2 * [[[1.0] * 3 + [2.0] * 3, [1.0, 2.0]]]
