"""Triton kernels of the ops of `dgraph.ops.selection`."""
