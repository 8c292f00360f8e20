"""Commands of the laboratory: parse, call, print."""
