"""Pure functions from measured facts to a plan."""
