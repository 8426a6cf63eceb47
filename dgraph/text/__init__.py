"""Graphs as text: listings with equal layers folded, differences between them, explanations, and a page in HTML.

`listing` turns a graph into plain values, `folding` folds equal layers, `notation` says how things are written,
`writer` prints them, `html` makes a page; `align` and `declarations` serve `diff`; `explain` tells what a recipe did.
The front functions that also take a model's name are in `dgraph.text.views`.
"""
