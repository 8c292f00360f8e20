"""A small convolutional network for quick runs."""

from torch import Tensor, nn


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
