"""How long a published network computes and communicates: from the papers, else estimated and said so.

COVAP Table I is measured on 64 V100 behind 30 Gbit/s per node of eight; "before" is everything that precedes
the backward pass. MergeComp section 3 gives one iteration on one GPU and the all-reduce of two over PCIe.
"""

from dataclasses import dataclass

from gradwire.lab.workloads.profile import Profile

# An estimate takes what Table I implies: VGG-19's 210 ms and ResNet-101's 135 ms backward at batch 32 are
# 12 and 7 TFLOP/s, and its three all-reduces run at 640 to 840 MB of gradient per second.
_FLOP_PER_S = 8e12
_LAYER_S = 1e-4  # a kernel's launch and its small work, which dominate thin layers
_GRADIENT_BYTES_PER_S = 0.68e9
_BACKWARD_FLOP_PER_MAC = 4  # gradients by input and by weight, two operations each
_BATCH = {"mask_rcnn": 1, "transformer_base": 140, "gpt2": 1}


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
        "MergeComp, section 3: 64 ms per iteration; one third of it before backward is assumed",
        "MergeComp, section 3: 2 GPUs over PCIe",
    ),
}
_GPT2_CCR = 3.5


def timing(profile: Profile) -> Timing:
    """Published times of `profile.model`, or an estimate from its multiply-adds and bytes."""
    if profile.model in _PUBLISHED:
        return _PUBLISHED[profile.model]
    allreduce_s = 4 * profile.parameters / _GRADIENT_BYTES_PER_S
    link = "estimated: gradient bytes at the 0.68 GB/s that COVAP's Table I implies (64 V100, 30 Gbit/s)"
    if profile.model == "gpt2":
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
