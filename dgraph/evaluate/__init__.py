"""Evaluation: is the answer right, in how many steps and rows, and is it what the unchanged model says."""
