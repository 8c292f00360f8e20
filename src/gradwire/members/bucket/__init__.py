"""Rounds over object storage: sites that reach a bucket, and not each other."""
