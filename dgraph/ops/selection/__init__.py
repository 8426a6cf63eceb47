"""Selection of rows: importance, drift, eviction, and lists of kept rows."""
