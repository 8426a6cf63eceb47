"""Scripts that measure; each prints its tables and can write them as Markdown and JSON."""
