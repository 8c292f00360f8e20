"""Metrics and traces of a running model, for dashboards, logs and trace viewers, by methods of `Wire`."""
