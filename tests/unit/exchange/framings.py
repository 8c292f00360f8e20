"""Frames of the tests' own: the bytes of the values, and lengths that depend on what is in them."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.errors import WireError


class Plain:
    """Values as they are, behind a header that says which they are; padded by what the first one says."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype

    def bound(self, numel: int) -> int:
        return 24 + -(-numel * self.dtype.itemsize // 8) * 8 + 56

    def encode(self, x: Tensor, start: int, hop: int, room: Tensor) -> int:
        header = torch.tensor([x.numel(), start, hop]).view(torch.uint8)
        frame = torch.cat([header, x.clone().view(torch.uint8)])
        padding = 8 * (int(x[0].nan_to_num(0.0, 0.0, 0.0).abs()) % 8) if x.numel() else 0
        length = -(-frame.numel() // 8) * 8 + padding
        room[: frame.numel()] = frame
        room[frame.numel() : length] = 0
        return length

    def round_trip(self, x: Tensor, start: int) -> None:
        pass

    def decode(self, data: Tensor, out: Tensor, start: int, hop: int, add: bool) -> None:
        if data[:24].view(torch.int64).tolist() != [out.numel(), start, hop]:
            raise WireError(f"{data[:24].view(torch.int64).tolist()} is not {[out.numel(), start, hop]}")
        values = data[24 : 24 + out.numel() * self.dtype.itemsize].view(self.dtype)
        out.copy_(out + values if add else values)


class Coarse(Plain):
    """In every hop rounded to whole numbers."""

    def encode(self, x: Tensor, start: int, hop: int, room: Tensor) -> int:
        return super().encode(x.round(), start, hop, room)

    def round_trip(self, x: Tensor, start: int) -> None:
        x.round_()
