"""The laboratory: slow networks on one machine, what trains on them, side-by-side runs and their report.

It uses the library and is never imported by it; the command line names its commands as text.
"""
