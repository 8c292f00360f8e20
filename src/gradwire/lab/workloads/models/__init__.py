"""Small models in plain torch, one per file."""
