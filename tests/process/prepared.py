"""For the process that ranks are forked from: it has loaded modules and kernels, once for all of them."""

from importlib import import_module

import torch

from gradwire import kernels

import_module("gradwire.ddp.attach")
torch.set_num_threads(1)
kernels.prepare()
