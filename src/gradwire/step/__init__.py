"""From arriving gradients to committed means: units, exchanges, the verdict. It knows no wrapper."""
