"""Attention over rows, pages, packed entries and sparse keys."""
