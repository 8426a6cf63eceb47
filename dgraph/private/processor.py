"""Capabilities of this machine's processor on which code compiled for it depends."""

from __future__ import annotations

import platform
from functools import lru_cache
from pathlib import Path


@lru_cache
def processor_features() -> str:
    """Instruction sets as Linux names them, sorted; elsewhere the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    found = next((line for line in lines if line.split(":")[0].strip() in ("flags", "Features")), "")
    return " ".join(sorted(found.partition(":")[2].split())) or platform.processor() or "unknown"
