"""Where tests have their tensors: on the CPU, or on the device that `GRADWIRE_TEST_DEVICE` names.

`make gpu` sets it to "cuda". The same kernel tests, laws and trainings then run there.
"""

from __future__ import annotations

import os

import torch

WHERE = torch.device(os.environ.get("GRADWIRE_TEST_DEVICE", "cpu"))
