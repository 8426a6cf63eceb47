"""Small artifacts, and a store of them."""

from __future__ import annotations

from pathlib import Path

from dgraph.cache.key import Key
from dgraph.cache.store import Store

FILES = {"region.pickle": b"code" * 50, "kernel0.so": b"\x7fELF" + bytes(range(256))}


def key(name: str = "a") -> Key:
    """A key; another name makes another one."""
    region = f"device cpu\n%0 = {name}\nreturn"
    return Key({"kind": "region", "device": "cpu", "torch": "2.0 git abc", "region": region})


def filled(store: Store, *names: str) -> list[Key]:
    """Keys of these names, with an artifact each."""
    keys = [key(name) for name in names]
    for found in keys:
        assert store.put(found, FILES)
    return keys


def folders(store: Store) -> list[str]:
    """Names of the folders of entries."""
    return sorted(p.name for p in store.entries.iterdir())


def flip(path: Path, at: int) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[at] ^= 0x01
    path.write_bytes(content)
