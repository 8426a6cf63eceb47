"""Memory of an engine: peaks of programs, the share left for keys and values, and the prefix cache."""
