"""Products of rows and weights, as they are or quantised."""
