"""Hierarchy: gradients are added up inside each node before shards of them travel between nodes."""
