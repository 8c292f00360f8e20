"""Agreement of the ranks: on arguments, on states, on the call they make, on the parameters."""
