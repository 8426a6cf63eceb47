"""Scripts that measure; each prints its tables and can write them as Markdown and JSON."""

import time

BEGAN = time.perf_counter()
"""When a process that is one of them began: this is what it imports first."""
