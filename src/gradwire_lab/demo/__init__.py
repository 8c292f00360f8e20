"""The demonstration: plain DDP and gradwire train the same model over the same slow link, side by side."""
