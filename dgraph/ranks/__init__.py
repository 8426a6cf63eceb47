"""Ranks that hold one model together: their groups, the sharding of weights, and how processes meet."""
