"""States that hold the current block beside the canvas."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dgraph.runtime.decode_state import DecodeState


@dataclass
class OwnBlockState(DecodeState):
    """A `DecodeState` whose rows are those of one block, and see up to its end.

    tokens i64[b, W]: what its rows read, with the block's own in the last B columns. masked bool[b, B]: columns of the
    block that are not decoded yet.
    """

    tokens: Tensor
    masked: Tensor

    @property
    def block(self) -> int:
        return self.masked.shape[1]

    def _columns(self) -> int:
        return self.tokens.numel()

    @property
    def block_masked(self) -> Tensor:
        return self.masked

    @property
    def block_tokens(self) -> Tensor:
        return self.tokens[:, -self.block :]

    @property
    def visible(self) -> Tensor:
        return self.start + self.block
