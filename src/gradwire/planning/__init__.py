"""Pure functions from measured facts to a plan: numbers in, numbers out, no clock and no network.

Import from the files: `from gradwire.planning.predict import predict`. A run loads only those that it needs.
"""
