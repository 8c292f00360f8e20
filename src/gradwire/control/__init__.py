"""Controllers: they measure, predict, and decide which composition runs next. All ranks decide alike."""
