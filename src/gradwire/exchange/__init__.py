"""Exchanges: how ranks come to one mean of a unit. One pattern per file, from which it is imported.

`compose` has the combinators. `base`, `turns` and `state` are no patterns: several patterns use them.
"""
