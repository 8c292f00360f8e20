"""A launch that shows whether kernels can run on a GPU at all."""

import torch

from gradwire.kernels.device.flagged import poison


def try_out(where: torch.device | None) -> None:
    """Launch a kernel on the GPU `where`, or raise why there can be none; elsewhere do nothing."""
    if where is not None and where.type == "cuda":
        poison([torch.zeros(1, device=where)], torch.zeros((), dtype=torch.bool, device=where))
