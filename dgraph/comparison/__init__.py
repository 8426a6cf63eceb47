"""The workbench for numbers that differ: `dgraph.compare` and `dgraph.bisect`.

`compare` runs two sides on the same steps, and says by step, layer and node where their values part. `bisect` goes over
the passes of a recipe and the stages of lowering, and says which is the first that changes results.
"""
