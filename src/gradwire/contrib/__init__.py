"""Methods that gradwire is compared with, one per file: its parts, and the recipe made of them."""
