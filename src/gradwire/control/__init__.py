"""Controllers: they measure, predict, and decide which composition runs next. All ranks decide alike.

What is called `control` elsewhere is a comm: verdicts, and all else that ranks agree on, travel over it.
"""
