"""Checkpoints: the state of an engine, checked before it is taken up, as files or as tensors."""
