"""Codecs: tensor to payload and back; stateless and local."""
