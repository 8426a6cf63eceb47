"""Writes and reads of paged caches, scores of keys, and the packing of kept entries."""
