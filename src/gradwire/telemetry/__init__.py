"""A running model tells of itself: history, log, metrics and traces, for reports, dashboards and viewers."""
