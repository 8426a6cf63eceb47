"""Bytes that keys and values of a sequence take, from the inputs that its programs declare."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dgraph.errors import InputError
from dgraph.plans.kv import PAGES, KVPlan
from dgraph.runtime.kv.store import ring_size
from dgraph.runtime.requests import step_rows
from dgraph.spec import ModelSpec
from dgraph.types.shapes import InputSpec


@dataclass(frozen=True)
class KVCost:
    """Bytes of keys, values and everything else that is kept per position.

    Attributes:
        position: of a position in the paged caches of all layers together, those with a window left out.
        page: positions of a page.
        plan: the keys and values that a sequence keeps; None for all.
        packed: one tuple per layer with packed keys: its number, bytes of an entry, KV heads, and bytes of a sequence's
            entry counts there. Where KV heads share the budgets of other ranks' heads, the number of these follows.
        causal: True if attention is block-causal.
        block, shift: rows of a block, and the logit shift of the model.
        after: positions after a sequence that its last block may take, where blocks begin anywhere.
        rings: one tuple per window of layers: its positions, bytes of a position in their caches, and pages of a
            sequence there. The pages are those of a sequence that is decoded.
    """

    position: int
    page: int
    plan: KVPlan | None
    packed: tuple[tuple[int, ...], ...]
    causal: bool
    block: int
    shift: int
    after: int = 0
    rings: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, inputs: Iterable[InputSpec], spec: ModelSpec, page: int, plan: KVPlan | None) -> KVCost:
        """Make the cost from the declared inputs of all programs.

        Args:
            inputs: the declarations, each once; those that are no caches are left out.
            spec: the model.
            page: positions of a page.
            plan: of the recipe.

        Raises:
            InputError: a cache whose sizes are not numbers.
        """
        position, entries, counts = 0, dict[int, int](), dict[int, tuple[int, ...]]()
        rings: dict[int, int] = {}
        for one in inputs:
            size = math.prod(one.element) * one.dtype.itemsize if one.in_place else 0
            if one.per == "position" and one.window:
                rings[one.window] = rings.get(one.window, 0) + size
            elif one.per == "position":
                position += size
            elif one.per == "packed" and one.layer is not None:
                if one.shape[0] == "sequences":
                    counts[one.layer] = (one.element[0], size, *([one.budgets] if one.budgets else []))
                else:
                    entries[one.layer] = entries.get(one.layer, 0) + size
        packed = tuple((layer, entries[layer], *counts[layer]) for layer in sorted(entries))
        causal = spec.attention == "block_causal"
        after = spec.block_length if spec.encoding == "causal" else 0
        shape = spec.block_length, spec.logit_shift, after
        rows = step_rows(spec.block_length, spec)
        held = tuple((window, size, ring_size(window, rows, page)) for window, size in sorted(rings.items()))
        return cls(position, page, plan, packed, causal, *shape, held)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all layers."""
        return self.position * self.page

    def sequence(self, length: int, response: int) -> int:
        """Bytes of a sequence, as long as it lives; while its prompt is prefilled, rings have more of it.

        They are the bytes of a sequence that denoises. Under a policy that only encodes (autoregression) no keys are
        chosen, whatever the plan, so that none is absent from the pages. No policy is known here.

        Args:
            length: positions, prompt and response together.
            response: positions of the response; they matter only where not all keys are kept.

        Raises:
            InputError: not 1 <= response <= length.
        """
        if not 1 <= response <= length:
            raise InputError(f"a sequence of {length} positions has a response of 1 to {length}, got {response}.")
        whole = -(-(length + self.after) // self.page)
        pages = whole - self._absent(length - response) // self.page
        kept = pages * self.page_bytes + self._packed(length - response, response)
        return kept + sum(min(whole, held) * self.page * size for _, size, held in self.rings)

    def _absent(self, prompt: int) -> int:
        """Positions at the beginning of a sequence that have no place in the pages, since the kept keys are packed."""
        if self.plan is None or self.plan.kept == PAGES:
            return 0
        if not self.causal:
            return max(prompt - self.shift, 0)
        return self.plan.kept_from(prompt, 1 if self.after else self.block)

    def _packed(self, prompt: int, response: int) -> int:
        if self.plan is None:
            return 0
        candidates = self.plan.candidates(prompt, response)
        return sum(
            size * self.plan.entries(layer, candidates, heads, *budgets) + counts
            for layer, size, heads, counts, *budgets in self.packed
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            **vars(self),
            "plan": None if self.plan is None else self.plan.to_json(),
            "packed": [list(layer) for layer in self.packed],
            "rings": [list(ring) for ring in self.rings],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> KVCost:
        """The cost that `to_json` described."""
        plan = None if value["plan"] is None else KVPlan.from_json(value["plan"])
        pairs = {name: tuple(tuple(each) for each in value[name]) for name in ("packed", "rings")}
        return cls(**{**value, "plan": plan, **pairs})
