"""Who brings gradients to the engine, and takes the means back: one package for each wrapper."""
