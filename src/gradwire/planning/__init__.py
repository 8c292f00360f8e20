"""Pure functions from measured facts to a plan: numbers in, numbers out, no clock and no network.

Import from the files, as `from gradwire.planning.step_time import step_time`: a run loads only those that it
needs.
"""
