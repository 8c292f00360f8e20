"""A published network's backward pass in numbers, as the planner takes it."""

import math
from itertools import accumulate

from gradwire.lab.workloads.profile import Profile
from gradwire.lab.workloads.timing import timing
from gradwire.plan import Backward


def backward_of(profile: Profile) -> Backward:
    """Tensors in reverse order; a layer's are ready together, when its share of the multiply-adds is done.

    >>> from gradwire.lab.workloads.profile import load
    >>> len(backward_of(load("resnet101")).numel)
    314
    """
    times, layers = timing(profile), profile.layers[::-1]
    done = list(accumulate(layer.macs for layer in layers))
    tensors = [
        (times.backward_s * macs / max(done[-1], 1), math.prod(shape))
        for layer, macs in zip(layers, done, strict=True)
        for shape in layer.shapes[::-1]
    ]
    ready_s, numel = zip(*tensors, strict=True)
    return Backward(times.before_s, ready_s, numel, times.backward_s)
