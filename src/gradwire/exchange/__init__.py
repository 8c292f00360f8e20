"""Exchanges: collectives by which ranks come to one mean of a unit. One method per file, from which it is
imported.

`compose` has the combinators. `base`, `round_robin` and `state` have no method of their own: several methods
use them.
"""
