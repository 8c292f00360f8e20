"""Checkpoints: the state of a reducer as files or as tensors, validated before it is loaded."""
