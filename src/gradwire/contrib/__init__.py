"""Methods for comparison with gradwire's own, one per file: parts and recipe."""
