"""Imported by the process that workers are forked from, because each would take seconds to load it all."""

import signal
from importlib import import_module

import torch
from torch import nn

from gradwire.kernels.compensation import mask_zeros

# Ctrl-C is for the launcher, which ends everything; a worker listens again once it has left the terminal.
signal.signal(signal.SIGINT, signal.SIG_IGN)
torch.set_num_threads(1)
import_module("gradwire_lab.bench.worker")
import_module("gradwire._api.attach")
# The first optimizer imports a compiler, which nothing here uses.
torch.optim.SGD(nn.Linear(1, 1).parameters())
# Numba loads most of itself at the first kernel. A recipe's own kernels are compiled by its workers, and for
# their sake no recipe is loaded here: all that a process has imported is compiled when it attaches.
mask_zeros(torch.zeros(1), torch.zeros(1))
