"""What a running model tells dashboards, logs and trace viewers; the methods of `Wire` are the way in."""
