"""Hierarchical reduction: gradients are summed inside each node before shards of them travel between
nodes.
"""
