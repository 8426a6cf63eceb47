"""A recorder in the place of a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable


class Recorder:
    """Runs a function once when it is captured, and again on each replay."""

    def __init__(self, function: Callable[[], None]):
        self.function = function
        function()
        self.replays = 0

    def replay(self) -> None:
        """Run it on what its buffers hold now."""
        self.replays += 1
        self.function()
