"""Checkpoints: the state of an engine, checked before it is taken up, as files or as tensors.

`shards` also serves steps: it says how ranks of a node share a parameter.
"""
