"""Adapters for frameworks: one file each, imported only on demand."""
