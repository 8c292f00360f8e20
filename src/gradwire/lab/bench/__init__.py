"""Side-by-side runs, workloads, report."""
