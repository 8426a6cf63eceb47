"""Products whose tiles programs divide among themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Division:
    """Sizes of a product, of its tiles, programs, shares of a tile at most, and whether shares are even."""

    rows: int
    d_out: int
    d_in: int
    high: int
    wide: int
    deep: int
    programs: int
    splits: int
    even: bool

    @property
    def iterations(self) -> int:
        """Of a tile."""
        return -(-self.d_in // self.deep)

    @property
    def tiles(self) -> int:
        """All of the product."""
        return -(-self.rows // self.high) * -(-self.d_out // self.wide)


_SIZES = {
    "three rounds": (32, 12288, 4096, 64, 32, 256, 132, 8),
    "one tile for three programs of four": (32, 12288, 4096, 32, 128, 128, 132, 8),
    "a quarter of the programs": (16, 4096, 12288, 16, 128, 128, 132, 8),
    "more tiles than programs": (32, 24576, 4096, 32, 128, 128, 132, 8),
    "nearly a tile for each": (32, 8192, 12288, 32, 64, 128, 132, 8),
    "a tile for each": (32, 8448, 128, 32, 64, 64, 132, 8),
    "one tile": (5, 64, 8192, 32, 64, 64, 132, 8),
    "one iteration": (5, 64, 64, 32, 64, 64, 132, 8),
    "sizes that end within tiles": (130, 333, 1000, 64, 64, 64, 7, 4),
    "few programs": (5, 50, 48, 16, 64, 16, 3, 8),
    "whole tiles alone": (32, 12800, 1024, 32, 64, 64, 132, 1),
}
CASES = {
    f"{name}{', even' if even else ''}": Division(*sizes, even=even)
    for name, sizes in _SIZES.items()
    for even in (False, True)
}
