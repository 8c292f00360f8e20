"""Computation and communication times of published networks, and the same networks with fewer parameters.

Times come from the papers, or are estimates and say so. COVAP's Table I is assumed to be measured on 64 V100
with 30 Gbit/s per node of eight; "before" is everything that precedes the backward pass. MergeComp, section
3.2, gives one iteration on one GPU, on CIFAR-10, and the part of an all-reduce of two GPUs over PCIe that
follows the backward pass: 66 ms (its footnote 3). The whole all-reduce takes 66 to 109 ms; the least is used.
"""

import math
from dataclasses import dataclass, replace

from gradwire.planning.costs import BackwardTiming
from gradwire.planning.shapes import Profile, Shape, ready_of

_THIN = 16


def shrunk(profile: Profile, factor: float) -> Profile:
    """Shrink layers until there are about `profile.parameters / factor` parameters.

    All tensors lose the same share, vectors in their length and others in their first two dimensions: what
    norms and biases are of all bytes stays as published. `ValueError` where tensors are too thin for that.
    """
    if factor == 1:
        return profile
    if not factor >= 1:
        raise ValueError(f"shrink={factor} must be at least 1")
    target = profile.parameters / factor
    # rounding, and tensors too thin to lose their share, make the total miss: correct the share twice
    divisor = factor
    for _ in range(2):
        divisor *= _divided(profile, divisor).parameters / target
    made = _divided(profile, divisor)
    if abs(made.parameters / target - 1) > 0.1:
        raise ValueError(f"shrink={factor} is too much for {profile.model}: some of its tensors are too thin")
    return made


def _divided(profile: Profile, divisor: float) -> Profile:
    layers = tuple(
        replace(layer, shapes=tuple(_smaller(shape, divisor) for shape in layer.shapes))
        for layer in profile.layers
    )
    return replace(profile, layers=layers)


def _smaller(shape: Shape, divisor: float) -> Shape:
    """Both of the first two dimensions lose the root of `divisor`, so that a matrix keeps its proportions."""
    if len(shape) == 1:
        return (max(1, round(shape[0] / divisor)),)
    rows, columns, *rest = shape
    # a dimension of 2, 3 or 10 keeps its length; what rounding adds or takes there, the rows make good
    share = divisor if rows <= _THIN else 1.0 if columns <= _THIN else math.sqrt(divisor)
    thin = max(1, round(columns / share))
    return (max(1, round(rows * columns / divisor / thin)), thin, *rest)


# An estimate takes what Table I implies: VGG-19's 210 ms and ResNet-101's 135 ms backward at batch 32 are
# 12 and 7 TFLOP/s, and its three all-reduces run at 640 to 840 MB of gradient per second.
_FLOP_PER_S = 8e12
_LAYER_S = 1e-4  # a kernel's launch and its small work, which dominate thin layers
_GRADIENT_BYTES_PER_S = 0.68e9
_BACKWARD_FLOP_PER_MAC = 4  # gradients by input and by weight, two operations each
_ALONE = (
    *("gpt2", "gpt2_medium", "gpt2_xl", "llama_3_8b", "llama_7b", "mask_rcnn", "qwen2_5_7b", "sdxl_unet"),
)
_BATCH = {"transformer_base": 140, **dict.fromkeys(_ALONE, 1)}


@dataclass(frozen=True)
class Timing:
    """Seconds of one step on one worker: until backward begins, backward, and a dense all-reduce.

    `compute_from` and `link_from` say where the figures are from.
    """

    before_s: float
    backward_s: float
    allreduce_s: float
    compute_from: str
    link_from: str


_COVAP = "COVAP, Table I"
_CLUSTER = "COVAP, Table I: 64 V100, 30 Gbit/s"
_PUBLISHED = {
    "resnet101": Timing(0.055, 0.135, 0.280, _COVAP, _CLUSTER),
    "vgg19": Timing(0.105, 0.210, 0.842, _COVAP, _CLUSTER),
    "bert_base": Timing(0.080, 0.170, 0.520, _COVAP, _CLUSTER),
    "resnet50": Timing(
        64e-3 / 3,
        64e-3 * 2 / 3,
        66e-3,
        "MergeComp, section 3.2: 64 ms per iteration; one third of it before backward is assumed",
        "MergeComp, section 3.2: 2 GPUs over PCIe, at least",
    ),
}
_GPT2_CCR = 3.5


def timing(profile: Profile) -> Timing:
    """Published times of `profile.model`, or an estimate from its multiply-adds and bytes."""
    if profile.model in _PUBLISHED:
        return _PUBLISHED[profile.model]
    allreduce_s = 4 * profile.parameters / _GRADIENT_BYTES_PER_S
    link = "estimated: gradient bytes at the 0.68 GB/s that COVAP's Table I implies (64 V100, 30 Gbit/s)"
    if profile.model == "gpt2_covap":
        backward_s = allreduce_s / _GPT2_CCR
        compute = (
            "estimated: all-reduce time over the CCR of 3.5 in COVAP, section IV.C; before = backward / 2"
        )
    else:
        batch = _BATCH.get(profile.model, 32)
        flop = _BACKWARD_FLOP_PER_MAC * profile.macs * batch
        backward_s = flop / _FLOP_PER_S + _LAYER_S * len(profile.layers)
        compute = (
            f"estimated: multiply-adds of batch {batch} at 8 TFLOP/s, 0.1 ms per layer; before = backward / 2"
        )
    return Timing(backward_s / 2, backward_s, allreduce_s, compute, link)


def backward_of(profile: Profile) -> BackwardTiming:
    """The published backward pass.

    >>> from gradwire.planning.shapes import load
    >>> len(backward_of(load("resnet101")).numel)
    314
    """
    times = timing(profile)
    return ready_of(profile, times.before_s, times.backward_s)
