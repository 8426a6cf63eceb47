"""Triton kernels of the ops of `dgraph.ops.lm_head`."""
