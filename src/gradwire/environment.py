"""Environment variables that the library reads.

Launchers set them. They take the names from here because the modules that read them load torch.
"""

RANKS_HERE = "GRADWIRE_RANKS_HERE"
"""Number of ranks that share this rank's cores, where LOCAL_WORLD_SIZE does not tell: an emulated network
makes every rank a node, and gives it cores of its own where there are enough."""
