"""The only way out of the process: five verbs and their implementations."""
