"""Plans of keys: those that are always seen, those that are kept of the others and where, and the step that chooses.

A sequence has a window of positions whose keys are always seen (the current block, or the response). All others are
candidates. Every layer keeps some candidates for each KV head. Packed, they are copied together, and the rest is gone
until a step forwards the sequence as a whole again. In pages, all stay where they are, and the choice is a list of
positions: it takes four bytes for a key and its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from dgraph.errors import InputError, UnknownName

WINDOWS = ("block", "response")
PACKED, PAGES = KEPT = ("packed", "pages")


@dataclass(frozen=True)
class KVPlan:
    """Plan of the keys and values that a sequence keeps.

    Attributes:
        window: positions that are always seen: the "block" that is being decoded, or the whole "response".
        delay: with the window "block": steps of a block before the one that chooses. These, and the choosing one,
            are full steps that see every key. With the window "response" the first step of a response chooses; later
            ones that forward the prompt give the chosen keys their new values.
        every: with the window "block": interval of steps of a block at which keys are chosen anew; 0 for once.
        ratio: share of its candidates that a head keeps on average, in (0, 1]; 0 if `pairs` gives their number.
        pairs: candidates that a head keeps on average, one number for all layers or one for each.
        kept: where the kept candidates are: "packed" copies, or in their "pages", which then hold every position. A
            block-causal model has later blocks choose among all keys once more, so that they stay in their pages. So do
            those of a bidirectional model whose steps keep something of rows outside of the window (a saliency gate).
    """

    window: str = "response"
    delay: int = 0
    every: int = 0
    ratio: float = 0.0
    pairs: tuple[int, ...] = ()
    kept: str = PACKED

    def __post_init__(self) -> None:
        for what, value, known in (("window", self.window, WINDOWS), ("place of kept keys", self.kept, KEPT)):
            if value not in known:
                raise UnknownName(what, str(value), known)
        for name, steps in (("delay", self.delay), ("every", self.every)):
            if type(steps) is not int or steps < 0:
                raise InputError(f"{name} must be an integer of at least 0, got {steps!r}.")
            if steps and self.window != "block":
                raise InputError(f"{name} counts steps of a block; with the window {self.window!r} leave it at 0.")
        check_budget(self.ratio, self.pairs)

    @property
    def repacks(self) -> bool:
        """True if kept entries get new values later, so that their positions must be stored."""
        return self.window == "response"

    @property
    def of_later_blocks(self) -> KVPlan:
        """The same for a block-causal model, whose keys are final: where windows are blocks, each chooses among all."""
        return replace(self, kept=PAGES) if self.window == "block" else self

    def kept_from(self, prompt: int, unit: int) -> int:
        """First position of a block-causal sequence that keeps its place in the cache after keys were chosen.

        The window of a response begins with the block in which the prompt ends. Blocks begin at multiples of `unit`.
        """
        return prompt // unit * unit if self.window == "response" else 0

    def candidates(self, prompt: int, response: int) -> int:
        """The most positions outside of the window, for a prompt and a response of these lengths."""
        return prompt + (response if self.window == "block" else 0)

    def entries(self, layer: int, candidates: int, kv_heads: int, budgets: int = 0) -> int:
        """The most entries that a sequence keeps in a layer, over `kv_heads` heads.

        Args:
            layer: index of the layer, which may have a number of pairs of its own.
            candidates: number of candidates of the sequence; no head keeps more.
            kv_heads: number of heads whose entries are counted.
            budgets: number of heads whose budgets they may use; 0: their own.
        """
        pairs = pairs_of(self.pairs, layer) if self.pairs else int(self.ratio * candidates)
        return min(min(pairs, candidates) * (budgets or kv_heads), candidates * kv_heads)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> KVPlan:
        """The plan that `to_json` described.

        Raises:
            UnknownName: a field that plans do not have.
            InputError: a value out of range.
        """
        known = [f.name for f in fields(cls)]
        for name in value:
            if name not in known:
                raise UnknownName("field of a KV plan", name, known)
        return cls(**{**value, "pairs": tuple(value.get("pairs", ()))})

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "pairs": list(self.pairs)}


def pairs_of(pairs: tuple[int, ...], layer: int) -> int:
    """A layer's number of pairs: the only one, or its own; 0 for an empty tuple."""
    return pairs[layer if len(pairs) > 1 else 0] if pairs else 0


def check_budget(ratio: float, pairs: tuple[int, ...]) -> None:
    """Refuse a budget with neither or both of ratio and pairs.

    Raises:
        InputError: not exactly one of the two, or a value out of range.
    """
    if type(ratio) not in (int, float) or not 0 <= ratio <= 1:
        raise InputError(f"ratio must be a number in (0, 1], or 0 if pairs says how many, got {ratio!r}.")
    if not isinstance(pairs, tuple) or any(type(n) is not int or n < 0 for n in pairs):
        raise InputError(f"pairs must be a tuple of integers of at least 0, one or one for each layer, got {pairs!r}.")
    if bool(ratio) == bool(pairs):
        raise InputError(
            f"give either ratio (a share of the candidates) or pairs (a number of them), got {ratio!r} and {pairs!r}."
        )
