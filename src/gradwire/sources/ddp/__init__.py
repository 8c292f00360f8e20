"""Gradients from the buckets of `DistributedDataParallel`."""
