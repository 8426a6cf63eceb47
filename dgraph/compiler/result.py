"""The result of a generation, as texts and ids."""

from __future__ import annotations

from dataclasses import dataclass

from dgraph.runtime.results import SequenceKV
from dgraph.runtime.stats import GenerationStats
from dgraph.types.card import Card, Described, counted, quoted

_SHOWN = 3
"""Responses that the description of a result has."""


@dataclass(frozen=True, repr=False)
class Result(Described):
    """Result of `generate`.

    Attributes:
        texts: per prompt the response text; None without a tokenizer.
        token_ids: per prompt the response ids, the stop token left out.
        stats: counts and times; see `GenerationStats`.
        kv: per prompt its keys and values, if `keep_kv` was set.
    """

    texts: list[str] | None
    token_ids: list[list[int]]
    stats: GenerationStats
    kv: list[SequenceKV] | None = None

    def card(self) -> Card:
        """See `Described`."""
        shown = map(quoted, self.texts) if self.texts is not None else (str(ids[:12])[:60] for ids in self.token_ids)
        facts = [(f"{index}", text) for index, text in zip(range(_SHOWN), shown, strict=False)]
        more = len(self.token_ids) - len(facts)
        facts += [("...", f"{more:,} more")] if more > 0 else []
        done = f"{self.stats.tokens_per_step:.2f} tokens per step, {self.stats.total:.2f} s"
        title = f"Result of {counted(len(self.token_ids), 'prompt')}: {counted(self.stats.tokens, 'token')}, {done}"
        return Card(title, (*facts, ("use", ".texts, .token_ids, .stats")))
