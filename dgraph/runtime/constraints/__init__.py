"""Constraints on responses: a value that says which texts are valid, and the guide that keeps a sequence to it."""
