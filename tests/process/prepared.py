"""For the process that ranks are forked from: modules and kernels are loaded there once, not by every rank."""

from importlib import import_module

import torch

from gradwire import kernels

import_module("gradwire.ddp.attach")
torch.set_num_threads(1)
kernels.prepare()
