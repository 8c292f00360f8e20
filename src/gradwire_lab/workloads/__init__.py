"""Workloads of a bench run: real models on real data, emulated ones of published sizes, and the user's own.

>>> from gradwire_lab.workloads.catalogue import workload
>>> workload("resnet18").batch_size
16
"""
