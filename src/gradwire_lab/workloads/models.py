"""Small models in plain torch: a convolutional network, residual networks and a transformer over characters.

Residual networks: He, Zhang, Ren, Sun 2015, section 4.2, for images of about 32x32 pixels. The transformer is
decoder-only (Vaswani et al. 2017; pre-norm as in Radford et al. 2019).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class ConvNet(nn.Module):
    """Two strided convolutions and two linear layers: 0.1 M parameters."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, 16, 5, 2, 2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 5, 2, 2),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(6),
            nn.Flatten(),
            nn.Linear(32 * 6 * 6, 64),
            nn.ReLU(),
            nn.Linear(64, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w) -> (n, classes)."""
        out: Tensor = self.layers(x)
        return out


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut, projected by a 1x1 convolution where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(n, inputs, h, w) -> (n, outputs, h / stride, w / stride)."""
        y = functional.relu(self.norm1(self.conv1(x)))
        return functional.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """3x3 stem without pooling, then stages of residual blocks that halve the image and a linear layer.

    Args:
        widths: channels of every stage; all stages but the first halve height and width.
        blocks: residual blocks of every stage.
    """

    def __init__(
        self,
        channels: int,
        classes: int,
        widths: tuple[int, ...],
        blocks: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        stages: list[nn.Module] = []
        for stage, (width, count) in enumerate(zip(widths, blocks, strict=True)):
            before = widths[max(stage - 1, 0)]
            stages.append(Block(before, width, 1 if stage == 0 else 2))
            stages += [Block(width, width, 1) for _ in range(count - 1)]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """(n, channels, h, w) -> (n, classes)."""
        y = self.stages(functional.relu(self.norm(self.stem(x))))
        out: Tensor = self.head(y.mean(dim=(2, 3)))
        return out


def resnet18(channels: int, classes: int) -> ResNet:
    """ResNet-18 for 32x32 images: 11.17 M parameters with one channel and ten classes."""
    return ResNet(channels, classes, (64, 128, 256, 512), (2, 2, 2, 2))


def resnet_demo(channels: int, classes: int) -> ResNet:
    """ResNet-14 for 32x32 images: six residual blocks of 16, 32 and 64 channels, 0.17 M parameters.

    One CPU core trains it in real time. Codec and network stack, which share that core in an emulated
    network, take little beside its arithmetic.
    """
    return ResNet(channels, classes, (16, 32, 64), (2, 2, 2))


class TransformerLayer(nn.Module):
    """Causal self-attention and a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attended = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(n, length, width) -> the same shape."""
        n, length, width = x.shape
        joined = self.query_key_value(self.norm1(x)).view(n, length, 3, self.heads, width // self.heads)
        query, key, value = joined.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(seen.transpose(1, 2).reshape(n, length, width))
        out: Tensor = x + self.narrow(functional.gelu(self.widen(self.norm2(x))))
        return out


class CharGPT(nn.Module):
    """Predicts the next character at every position; the output layer is the embedding, transposed."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.layers = nn.Sequential(*(TransformerLayer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # what is added to the residual stream 2·depth times starts smaller by the root of that
                onto_stream = name.endswith(("attended.weight", "narrow.weight"))
                std = 1 / math.sqrt(2 * depth * width if onto_stream else width)
                nn.init.normal_(parameter, std=std)

    def forward(self, codes: Tensor) -> Tensor:
        """(n, length) character codes -> (n, length, vocabulary) logits."""
        position = torch.arange(codes.shape[1], device=codes.device)
        x = self.layers(self.characters(codes) + self.positions(position))
        return functional.linear(self.norm(x), self.characters.weight)
