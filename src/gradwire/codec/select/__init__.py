"""Selectors: which elements travel. One method per file, from which it is imported."""
