"""Slow networks on one machine."""
