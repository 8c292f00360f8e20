"""Controllers measure and predict, and decide which composition runs next. All ranks decide alike.

Elsewhere, `control` names a comm: the one for status votes and everything else that ranks agree on.
"""
