"""Hot loops, each beside a plain-torch reference."""
