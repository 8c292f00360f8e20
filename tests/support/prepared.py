"""For the process that ranks are forked from: it has loaded modules and kernels, once for all of them."""

import gc
from importlib import import_module

import torch

from gradwire import recipes
from gradwire.kernels import compiler

import_module("gradwire._api.attach")
recipes.entries()
import_module("torch._dynamo")  # the first DDP, or optimizer, of a process drags it in
torch.set_num_threads(1)
compiler.prepare(compiler.every())
gc.freeze()  # what is here stays: no rank need look for garbage in it, nor copy it for that
