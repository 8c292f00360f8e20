"""Arguments of exchanges: parameters and where they lie, units of them, and the context of an exchange.

Below exchanges, codecs and laws. Nothing here has a step.
"""
