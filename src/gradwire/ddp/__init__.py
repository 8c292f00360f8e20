"""The hook, the worker, the verdict and attach."""
