"""Compression rates by layer: weights with fewer uses per sample are compressed more.

ScaleCom (Chen et al. 2020, section 4): the gradient of a weight is a sum over all positions at which the
weight is used in a sample. The more positions, the less it is compressed. A convolution uses its weights once
per output pixel, a linear layer once.

Differences from the paper: of its three ranges only the first one is used, up to 128; the bound of 196 was
chosen to fit its table 2. Its FLOPs per gradient are taken as multiply–adds. The ranges come close to four of
the six reported rates: ResNet-18 128x for 112x, ResNet-50 101x for 96x, MobileNetV2 173x for 155x, and a
transformer's linear layers 50x for 47x. They miss two: ResNet-34 on CIFAR-10 (3x3 stem, 32x32) 206x for 92x,
and the LSTM at 128 samples per worker, 21 uses per sample, 400x for 100x. The paper adjusts the rate itself:
its LSTM goes from 400x at 32 samples per worker to 100x at 128 (tables 2 and 3), in inverse proportion. Here
thresholds scale with the batch, because a forward pass shows the uses of a weight but not the number of
samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RateRule:
    """`rates` (n + 1,) for n ascending `thresholds`, in multiply–adds per weight and sample.

    A weight used up to the first threshold has the first rate, up to the second the second, and so on; one
    used more than the last threshold has the last. Raises `ValueError` if the numbers do not fit together.
    """

    thresholds: tuple[float, ...] = (128.0, 196.0)
    rates: tuple[float, ...] = (400.0, 50.0, 25.0)
    batch: int = 32

    def __post_init__(self) -> None:
        if len(self.rates) != len(self.thresholds) + 1 or list(self.thresholds) != sorted(self.thresholds):
            raise ValueError(f"{self}: n ascending thresholds need n + 1 rates")

    def __call__(self, weights: int, macs: float, batch: int | None = None) -> float:
        """The rate of a layer of `weights` weights and `macs` multiply–adds per sample: one value in `rate`
        travels.

        `batch` is the samples per worker, by default the rule's. A larger one uses every weight more often.

        >>> rule = RateRule()
        >>> rule(9, 9 * 200), rule(9, 9 * 150), rule(9, 9), rule(9, 9, batch=32 * 200)
        (25.0, 50.0, 400.0, 25.0)
        """
        used = macs / weights * (batch or self.batch) / self.batch if weights else 0.0
        return self.rates[sum(used > threshold for threshold in self.thresholds)]


def rates_of(uses: Mapping[str, float], rule: RateRule | None = None) -> dict[str, int]:
    """Compression rates by glob pattern over parameter names, from multiply–adds per weight over a rank's
    whole batch.

    With 4.5k tokens, a linear layer's weight is used 4500 / 32 = 141 times per sample of a batch of 32. It
    gets 50x, near the 47x that the paper reports for its transformer. A use of 0 means "not counted". Such a
    parameter matches no pattern, unless its module has a counted parameter, as a bias beside its weight.

    >>> rates_of({"conv.weight": 32 * 256.0, "fc.weight": 32.0, "fc.bias": 0.0})
    {'conv.*': 25, 'fc.*': 400}
    >>> rates_of({"a.conv.weight": 32 * 256.0, "a.own": 0.0})
    {'a.conv.*': 25}
    """
    rule = rule or RateRule()
    known = {name.rpartition(".")[0] for name, used in uses.items() if used}
    return patterns_of(
        {
            name: int(rule(1, used, batch=1)) if used else None
            for name, used in uses.items()
            if used or name.rpartition(".")[0] not in known
        }
    )


def patterns_of(rates: Mapping[str, int | None]) -> dict[str, int]:
    """Express rates by as few glob patterns over parameter names as possible; the first match counts.

    A module whose parameters all have one rate becomes a single pattern. No pattern matches a name with
    `None`.

    >>> patterns_of({"a.0.weight": 25, "a.1.weight": 25, "b.weight": 50, "b.bias": 400, "c": 400})
    {'a.*': 25, 'b.weight': 50, 'b.bias': 400, 'c': 400}
    """
    inside: dict[str, dict[str, int | None]] = {}
    for name, rate in rates.items():
        head, _, rest = name.partition(".")
        inside.setdefault(head, {})[rest] = rate
    found: dict[str, int] = {}
    for head, named in inside.items():
        values = set(named.values())
        if len(values) == 1:
            [value] = values
            if value is not None:
                found[head if set(named) == {""} else f"{head}.*"] = value
        else:
            found |= {f"{head}.{pattern}": rate for pattern, rate in patterns_of(named).items()}
    return found
