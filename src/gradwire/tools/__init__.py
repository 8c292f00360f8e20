"""Tools on an attached model: predictions, diagnosis, and the state around a trial."""
