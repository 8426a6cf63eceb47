"""Likelihood of responses under an autoregressive model, and the share of them that repeats.

A response's negative log-likelihood (NLL) is that of its text under the judge, after the prompt in the judge's chat
form. It is the sum of -log p(token | prompt, tokens before), in nats. The text is read anew by the judge's tokenizer: a
mean per token counts its tokens, not those of the model that wrote the text. So models with different tokenizers
compare under one judge; figures of judges with different tokenizers compare per byte only. The end of the turn is not
part of the text and is not counted. So a response that was cut short is judged like one that came to an end.

A low NLL alone is no quality: a text that repeats itself has one. Hence repetition is counted beside it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from dgraph.families import encode_part
from dgraph.families.causal import Causal

NGRAM = 4
"""Tokens of the n-grams that are counted as repeated."""
LOGITS = 512 * 2**20
"""Most bytes of float32 logits that a forward of the judge may make."""


def repetition(ids: Sequence[int], n: int = NGRAM) -> tuple[int, int]:
    """The number of a response's n-grams that occur earlier in it, and the number of all its n-grams.

    Their quotient is seq-rep-n of Welleck et al. (2020), Neural Text Generation with Unlikelihood Training, section 6.
    """
    found = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(found) - len(set(found)), len(found)


@dataclass(frozen=True)
class Judged:
    """Judgement of a response.

    Attributes:
        key: hash of the judge, the prompt and the text; see `Judge.key`.
        nll: negative log-likelihood of the text, in nats.
        judge_tokens: tokens of the text, by the judge's tokenizer.
    """

    key: str
    nll: float
    judge_tokens: int

    @classmethod
    def from_json(cls, value: Any) -> Judged:
        """The record that was written.

        Raises:
            KeyError, TypeError, ValueError: an entry is missing or of another type.
        """
        return cls(str(value["key"]), float(value["nll"]), int(value["judge_tokens"]))


@dataclass(frozen=True)
class Judge:
    """An autoregressive model that reads responses.

    Attributes:
        model: the model.
        weights: fingerprint of its weights, for keys.
    """

    model: Causal
    weights: str

    def key(self, prompt: str, text: str) -> str:
        """Hash of everything that a judgement depends on: the judge's weights and dtype, the prompt and the text."""
        parts = ("judge", self.weights, str(self.model.dtype), prompt, text)
        return hashlib.sha256("\n".join(f"{len(part)} {part}" for part in parts).encode()).hexdigest()[:32]

    def read(self, responses: Iterable[tuple[str, str]]) -> Iterator[list[Judged]]:
        """Judge (prompt, text) pairs, in parts as they are done; pairs that do not fit into the window are left out.

        A text of no tokens has an NLL of 0.
        """
        tokenizer, room = self.model.tokenizer, self.model.max_positions
        found = []
        for prompt, text in responses:
            before, after = tokenizer.encode(prompt), encode_part(tokenizer, text)
            if len(before) + len(after) <= room:
                found.append((self.key(prompt, text), before, after))
        found.sort(key=lambda one: len(one[1]) + len(one[2]))  # equal lengths together, so that there is little padding
        rows = max(1, LOGITS // (4 * self.model.vocab))
        part: list[tuple[str, list[int], list[int]]] = []
        for one in found:
            if part and (len(part) + 1) * (len(one[1]) + len(one[2])) > rows:
                yield self._forward(part)
                part = []
            part.append(one)
        if part:
            yield self._forward(part)

    @torch.no_grad()
    def _forward(self, part: Sequence[tuple[str, list[int], list[int]]]) -> list[Judged]:
        """Run one forward over sequences of token ids. Padding comes last, so no token sees it."""
        device = next(self.model.module.parameters()).device
        lines = [torch.tensor(before + after) for _, before, after in part]
        logits = self.model.module(torch.nn.utils.rnn.pad_sequence(lines, batch_first=True).to(device))
        judged = []
        for row, (key, before, after) in zip(logits, part, strict=True):
            predicted = row[len(before) - 1 : len(before) + len(after) - 1].float()
            total = cross_entropy(predicted, torch.tensor(after, dtype=torch.int64, device=device), reduction="sum")
            judged.append(Judged(key, float(total), len(after)))
        return judged
