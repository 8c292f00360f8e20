"""Published numbers of COVAP (Meng et al. 2023), ms; 64 V100 behind 30 Gbit/s unless said otherwise."""

from __future__ import annotations

from typing import NamedTuple


class Row(NamedTuple):
    """A line of table I: times in ms, and the interval of section IV."""

    before: float
    backward: float
    allreduce: float
    overlapped: float
    linear: float
    interval: int


TABLE_I = {
    # S_LS of VGG-19 is printed as 3.04; its own times make 3.67. Of ResNet-101 S_ovlp is printed as 1.43.
    "ResNet-101": Row(55, 135, 280, 1.40, 2.47, 3),
    "VGG-19": Row(105, 210, 842, 1.22, 3.67, 4),
    "Bert": Row(80, 170, 520, 1.28, 3.08, 4),
}
GPT2_CCR, GPT2_INTERVAL = 3.5, 4  # section IV-C-4

# ResNet-101: CCR after compression, speed-ups over data parallelism without and with overlapping. Table III
# prints a linear 2.67, against the 2.47 of table I.
TABLE_III = {"Random-k": (1.07, 1.29, 2.05), "FP16": (1.04, 1.42, 2.35)}

# Elements of VGG-19's six units, in ready order.
TABLE_V = (4101096, 16781312, 107480576, 7079424, 7669760, 555072)

# Speed-up over one GPU, of 64.
TABLE_VII = {
    "DDP": {"ResNet-101": 21.52, "VGG-19": 12.07, "Bert": 26.64, "GPT-2": 19.10},
    "COVAP": {"ResNet-101": 57.52, "VGG-19": 51.80, "Bert": 57.84, "GPT-2": 56.11},
}
