"""Memory on the host or on a device, bytes over gloo or over NCCL: each of the four leaves the same bits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gradwire.comm import Comm, run_ranks
from gradwire.placement import Placement, Post, host, staged, stream, through_a_device
from tests.device.test_staging import Transport
from tests.device.test_streaming import Unready
from tests.support.looped import looped
from tests.support.rig import Rig, flat, gradients
from tests.support.simulated import Near

WORLD, STEPS = 3, 3
CPU = torch.device("cpu")

CELLS: dict[str, Callable[[Comm, Post], Placement]] = {
    "host, gloo": lambda comm, post: host(Transport(comm), post),
    "host, NCCL": lambda comm, post: host(through_a_device(Unready(comm), CPU), post),
    "device, gloo": lambda comm, post: staged(Transport(comm), post, Near()),
    "device, NCCL": lambda comm, _post: stream(Unready(comm), comm, Near()),
    "device, NCCL alone": lambda comm, _post: stream(
        Unready(comm), through_a_device(Unready(comm), CPU), Near()
    ),
}
"""The last one is of a cluster without a gloo group: what ranks agree on goes by way of the device."""


def trained(recipe: str, comm: Comm, cell: str) -> tuple[Tensor, Tensor, int]:
    """Means, memory and the number of steps that counted; in the second step a rank has a NaN."""
    means = []
    rig = Rig(comm, recipe, place=lambda post: CELLS[cell](comm, post))
    for step in range(STEPS):
        grads = gradients(comm.rank, step)
        if step == 1 and comm.rank == 1:
            grads["last.weight"][3] = torch.nan
        means.append(rig.step(grads).flat().nan_to_num(7.0))
    rig.reducer.commit_deferred()
    return torch.stack(means), flat(rig.memory) if rig.memory else torch.empty(0), rig.reducer.step


@looped("recipe", ["dense", "topk(ratio=0.1)", "int8", "leader_topk"], few=1)
def test_each_pair_of_memory_and_wire_leaves_the_same_bits(recipe: str) -> None:
    expected = run_ranks(WORLD, lambda comm: trained(recipe, comm, "host, gloo"))
    assert [counted for *_, counted in expected] == [STEPS - 1] * WORLD
    for cell in CELLS:
        found = run_ranks(WORLD, lambda comm, cell=cell: trained(recipe, comm, cell))
        for (means, memory, counted), (other_means, other_memory, other_counted) in zip(
            found, expected, strict=True
        ):
            assert torch.equal(means, other_means), cell
            assert torch.equal(memory, other_memory), cell
            assert counted == other_counted, cell
