"""Keys and values of sequences: paged caches, packed entries, and page tables."""
