"""Side-by-side runs: settings, processes, measurements, tables. What trains is in `workloads`."""
