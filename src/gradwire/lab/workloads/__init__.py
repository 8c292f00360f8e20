"""Workloads of a bench run: real models on real data, and emulated ones of published sizes.

>>> from gradwire.lab.workloads import workload
>>> workload("resnet18").batch_size
16
"""

from gradwire.lab.workloads.base import Batch, Workload
from gradwire.lab.workloads.catalogue import names, workload

__all__ = ["Batch", "Workload", "names", "workload"]
