"""Where numba cannot be imported, as on a bare machine with a GPU, plain torch computes on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.tiers import rest

pytestmark = pytest.mark.process

PROGRAM = """
import json, logging, sys
from importlib.machinery import PathFinder


class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in ("numba", "llvmlite") else super().find_spec(name, path, target)


recipe = sys.argv[1]
sys.meta_path[sys.meta_path.index(PathFinder)] = Without
said = []


class Said(logging.Handler):
    def emit(self, record):
        said.append(record)


logging.getLogger("gradwire").addHandler(Said())

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from unittest.mock import patch

import gradwire
import gradwire._api.attach as attaching

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def trained(recipe):
    torch.manual_seed(0)
    ddp, losses = DistributedDataParallel(torch.nn.Linear(64, 64)), []
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.125)
    if recipe is not None:
        with patch.object(attaching, "is_alone", lambda _comm: False):  # or nothing would be compressed
            gradwire.attach(ddp, optimizer, recipe)
    inputs = torch.randn(8, 64)
    for step in range(4):
        optimizer.zero_grad()
        loss = ddp(inputs).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return [p.detach().view(-1).tolist() for p in ddp.parameters()], losses


parameters, losses = trained(recipe)
warnings = [each.getMessage() for each in said if each.levelno >= logging.WARNING]
found = {"losses": losses, "warnings": warnings, "numba": "numba" in sys.modules}
print(json.dumps({**found, "is DDP's": parameters == trained(None)[0]}))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("recipe", rest(["dense", "int8", "topk(ratio=0.5)"], but=["int8"]))
def test_a_model_trains_and_its_user_is_told_once(recipe: str) -> None:
    command = [sys.executable, "-c", PROGRAM, recipe]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["numba"]
    assert found["losses"] == sorted(found["losses"], reverse=True)
    assert found["is DDP's"] == (recipe == "dense")
    said = [each for each in found["warnings"] if "plain torch computes instead" in each]
    assert len(said) == (recipe != "dense")
