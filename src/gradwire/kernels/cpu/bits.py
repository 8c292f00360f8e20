"""A float32's magnitude as an integer: such comparisons vectorise, and order NaN and Inf above everything."""

import numpy as np

MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY = np.int32(0x7F800000)
