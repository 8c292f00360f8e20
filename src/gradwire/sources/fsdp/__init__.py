"""FSDP2's own traffic: gathers of parameters and scatters of gradients, within one mesh."""
