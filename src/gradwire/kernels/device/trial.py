"""Trial launch that shows whether Triton can run kernels on a GPU."""

import torch

from gradwire.kernels.device.flagged import poison


def try_out(where: torch.device | None) -> None:
    """Launch a kernel on the GPU `where`; raises if that fails. Does nothing for other devices."""
    if where is not None and where.type == "cuda":
        poison(
            [torch.zeros(1, dtype=torch.float32, device=where)],
            torch.zeros((), dtype=torch.bool, device=where),
        )
