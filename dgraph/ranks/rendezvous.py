"""Address at which the ranks of one machine find each other, in torchrun's variables."""

from __future__ import annotations

import socket


def rendezvous(world: int) -> dict[str, str]:
    """Environment variables that all `world` ranks share, with a port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    return {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
