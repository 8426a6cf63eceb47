"""The most memory that a piece of code holds, measured in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

_WATCH = """
import threading, time
import torch

def held():  # what is mapped from files is not counted: it is the page cache's
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

class Watch(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self.most, self.over = 0, False

    def run(self):
        while not self.over:
            self.most = max(self.most, held())
            time.sleep(0.0005)

torch.set_num_threads(1)
"""


def peak_of(setup: str, code: str) -> int:
    """Bytes of memory at most while some code runs, beyond what was held before it.

    Args:
        setup: what runs before: imports, and once what allocates buffers that stay.
        code: what is measured.
    """
    script = f"{_WATCH}\n{textwrap.dedent(setup)}\nbefore, watch = held(), Watch()\nwatch.start()\n"
    script += f"{textwrap.dedent(code)}\nwatch.over = True\nwatch.join()\nprint(watch.most - before)"
    freed_at_once = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **freed_at_once},
    )
    assert run.returncode == 0, run.stderr
    return int(run.stdout.split()[-1])
