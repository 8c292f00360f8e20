"""For the process that ranks are forked from: kernels are loaded there once, not by every rank."""

import torch

from gradwire import kernels

torch.set_num_threads(1)
kernels.prepare()
