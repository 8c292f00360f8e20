"""Agreement over a unit: one file per pattern."""
