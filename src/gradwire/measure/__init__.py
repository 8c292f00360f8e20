"""The only code that reads a clock."""
