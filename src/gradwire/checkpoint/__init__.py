"""Checkpoints: the state of an engine as files or as tensors, validated before it is loaded."""
