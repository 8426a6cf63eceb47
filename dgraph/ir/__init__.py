"""The graph of a model, its verifier, and rules about rows, order, shards and partial sums of its nodes."""
