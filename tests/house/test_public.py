"""Every public name still works once every module has been imported.

A module that is imported becomes an attribute of its package, and so could take the place of a function of
the same name.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from tests.support.source import MODULES

PROGRAM = """
import json, sys
from importlib import import_module
from types import ModuleType

packages = [module for module in map(import_module, sys.argv[1:]) if hasattr(module, "__all__")]
named = {f"{each.__name__}.{name}": getattr(each, name) for each in packages for name in each.__all__}
modules = [name for name, value in named.items() if isinstance(value, ModuleType)]

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import gradwire

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
ddp = DistributedDataParallel(torch.nn.Linear(3, 2))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
specs, choose = [], gradwire.by_size(smallest=10)

def policy(spec):
    specs.append(spec)
    return choose(spec)

wire = gradwire.attach(ddp, optimizer, gradwire.recipe("dense"), policy=policy)

def step(batch):
    optimizer.zero_grad()
    ddp(batch).sum().backward()
    optimizer.step()

step(torch.ones(4, 3))
step(torch.ones(4, 3))
cluster = {"rate_bit_per_s": 1e9, "step_s": 0.2, "candidates": ["dense", "int8"]}
plan = gradwire.plan("resnet18", workers=4, **cluster)
simulation = gradwire.simulate("resnet18", workers=(2, 8), **cluster)
alone = torch.nn.Linear(3, 2)
own = torch.optim.SGD(alone.parameters(), lr=0.1)
local = gradwire.outer(alone, own, replicas=dist.group.WORLD)
found = {
    "attach": isinstance(wire, gradwire.Wire),
    "Wire": wire.report().recipe == "dense",
    "Report": isinstance(wire.report(), gradwire.Report),
    "recipe": str(gradwire.recipe("topk(ratio=0.1)")) == "topk(ratio=0.1)",
    "Recipe": isinstance(gradwire.recipe("dense"), gradwire.Recipe),
    "recipes": "dense" in gradwire.recipes.names(),
    "by_size": {choose(spec) for spec in specs} == {"dense"},
    "ParameterSpec": {type(spec) for spec in specs} == {gradwire.ParameterSpec},
    "plan": isinstance(plan, gradwire.Plan),
    "plan_store": gradwire.plan_store("resnet18", sites=2, rate_bit_per_s=1e9, step_s=0.2).sites == 2,
    "Plan": plan.fastest.recipe == "int8",
    "simulate": isinstance(simulation, gradwire.Simulation),
    "Simulation": {each.workers for each in simulation.outcomes} == {2, 8},
    "outer": isinstance(local, gradwire.OuterWire),
    "OuterWire": local.attempts == 0,
    "__version__": gradwire.__version__.count(".") >= 2,
}
errors = ("GradwireError", "PeerFailed", "RanksDisagree", "TransportError", "WireError")
found |= {name: issubclass(getattr(gradwire, name), RuntimeError) for name in errors}
wire.detach()
model = torch.nn.Linear(3, 2)
own = torch.optim.SGD(model.parameters(), lr=0.1)
local = gradwire.outer(model, own, every=2, replicas=dist.group.WORLD)
found["outer"] = found["OuterWire"] = isinstance(local, gradwire.OuterWire)
local.detach()
dist.destroy_process_group()
found["GradwireWarning"] = issubclass(gradwire.GradwireWarning, UserWarning)
json.dump({"found": found, "public": gradwire.__all__, "modules": modules}, sys.stdout)
"""


@pytest.mark.rest
def test_every_public_name_works_after_every_module_has_been_imported() -> None:
    importable = [module.name for module in MODULES if not module.name.endswith("__main__")]
    command = [sys.executable, "-c", PROGRAM, *importable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["found"] == dict.fromkeys(shown["public"], True)
    # The kernels' packages export modules on purpose.
    modules = [name for name in shown["modules"] if not name.startswith("gradwire.kernels")]
    assert modules == ["gradwire.recipes"]


def test_every_warning_has_a_category_that_users_can_filter() -> None:
    calls = [
        (module.path, node)
        for module in MODULES
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "warnings.warn"
    ]
    assert len(calls) > 5
    named = {"GradwireWarning", "DeprecationWarning"}
    other = [f"{path}:{call.lineno}" for path, call in calls if ast.unparse(call.args[-1]) not in named]
    assert not other
