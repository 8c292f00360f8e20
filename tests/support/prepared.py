"""For the process that ranks are forked from: it has loaded modules and kernels, once for all of them."""

import gc
from importlib import import_module

import torch

from gradwire import recipes
from gradwire.kernels import compiler

torch.set_num_threads(1)
import_module("gradwire._api.attach")
recipes.entries()
for _each in ("fsdp", "tensor.parallel", "checkpoint.state_dict"):
    import_module(f"torch.distributed.{_each}")
# The first DDP, or optimizer, of a process drags in torch's compiler, the first compilation the rest of that.
import_module("torch._dynamo.backends.distributed")
# Where torch is built for CUDA, to compile what has gradients starts threads of autograd, which no fork has.
with torch.set_grad_enabled(torch.version.cuda is None):
    _sum = torch.compile(torch.nn.Linear(1, 1), backend="aot_eager")(torch.ones(1, 1)).sum()
if _sum.requires_grad:
    _sum.backward()
torch._dynamo.reset()
compiler.prepare(compiler.every())
gc.collect()
gc.freeze()  # what is here stays: no rank need look for garbage in it, nor copy it for that
