"""FSDP2's own traffic: parameters that it gathers, and gradients that it scatters, within one mesh."""
