"""What the ranks of one machine find each other by, in the words of torchrun."""

from __future__ import annotations

import socket


def rendezvous(world: int) -> dict[str, str]:
    """The variables of the environment that all of so many ranks share, with a port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
