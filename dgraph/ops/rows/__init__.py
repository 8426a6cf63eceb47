"""Norms and rotations, row by row."""
