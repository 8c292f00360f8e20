"""Agreement over a unit: one pattern per file, from which it is imported; `compose` has the combinators."""
