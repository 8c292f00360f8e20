"""Codecs: tensor to payload and back; stateless and local. One per file, from which it is imported."""
