"""Recording of a model's own block histories as a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dgraph.api import CompiledModel, optimize
from dgraph.bench.traces import Trace
from dgraph.errors import InputError
from dgraph.families import Model, embedded
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.loop.scripted_policy import BlockStep, History
from dgraph.runtime.policies import Policy, traits_of
from dgraph.runtime.results import Progress
from dgraph.runtime.stats import GenerationStats, StepRecord
from dgraph.spec import ModelSpec


@dataclass(frozen=True)
class Recorded:
    """A trace, and statistics of the generation that it is from.

    Attributes:
        trace: the trace of whole blocks: those that no prompt began and in which no response ended.
        dropped: number of blocks that were left out.
        stats: statistics of the generation, all blocks included.
    """

    trace: Trace
    dropped: int
    stats: GenerationStats


@dataclass
class Histories:
    """Observer that collects block histories.

    In some models the forward of a finished block predicts the first token of the next one. That token is then in the
    first step of the history, in which it is kept. A block that begins with it leaves it out (see `Script`), and one
    that begins all masked commits it with the others. The forward itself is the commit of the block before, and no step
    of a history.

    Attributes:
        spec: the model's spec.
        evicts: True if a step keeps only some of its rows.
        begun: steps so far by (prompt, start of block).
        partial: keys of blocks that a prompt began or in which a response ended; they are left out.
    """

    spec: ModelSpec
    evicts: bool
    begun: dict[tuple[int, int], list[BlockStep]] = field(default_factory=dict)
    partial: set[tuple[int, int]] = field(default_factory=set)

    def __call__(self, record: StepRecord) -> None:
        """Add one step of every sequence that denoises in it."""
        denoised = record.sequence[record.input_ids == self.spec.mask_id].unique()
        for prompt in denoised.tolist():
            mine = (record.sequence == prompt) & record.candidate
            if not mine.any():
                continue
            columns, committed = record.column[mine], record.committed[mine]
            key = (prompt, int(record.start[mine][0]))
            given = (0,) if self.spec.next_token and key not in self.begun else ()
            if key not in self.begun and len(given) + len(columns) < self.spec.block_length:  # the prompt began it
                self.partial.add(key)
            if not set(self.spec.eos_ids).isdisjoint(record.token[mine][committed].tolist()):
                self.partial.add(key)
            kept = (*given, *columns[record.kept[mine]].tolist()) if self.evicts else None
            self.begun.setdefault(key, []).append(BlockStep((*given, *columns[committed].tolist()), kept))

    def whole(self) -> tuple[History, ...]:
        """The blocks that no prompt began and that were decoded to their end, by prompt and position."""
        return tuple(
            tuple(steps)
            for key, steps in sorted(self.begun.items())
            if key not in self.partial and sum(len(s.committed) for s in steps) == self.spec.block_length
        )


def text_prompts(name: str, count: int) -> list[str]:
    """The first `count` held-out prompts of an embedded model without one right answer: passages, dialogues.

    Raises:
        InputError: the model comes with no held-out prompts.
    """
    known = embedded()
    file = known[name].folder / "held_out.jsonl" if name in known else None
    if file is None or not file.is_file():
        raise InputError(f"{name} comes with no held-out prompts; give a file with one prompt per line.")
    examples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [e["prompt"] for e in examples if e["task"] == "text" or e.get("answer") is None][:count]


def record(
    model: Model,
    prompts: Sequence[str],
    recipe: str = "focus",
    decoding: Decoding | None = None,
    *,
    max_batch: int = 64,
    backend: str = "inductor",
    options: Mapping[str, Any] | None = None,
    weights: str | None = None,
    tell: Callable[[str], None] | None = None,
) -> Recorded:
    """Decode prompts under a recipe and record the history of each block.

    Args:
        model: the model to run.
        prompts: texts.
        recipe, options: the method; one that evicts rows gives kept columns.
        decoding: decoding settings of the prompts; None for the defaults.
        max_batch: prompts per batch.
        backend: "inductor" or "eager".
        weights: storage of the weights, as for `optimize`.
        tell: called with a text for each thing that is done.

    Raises:
        InputError: a setting that cannot be used, or no block was decoded as a whole. Also a model or a policy that
            does not commit each token once and for good.
    """
    tell, chosen = tell or (lambda what: None), decoding or Decoding()
    if reason := obstacle(model.spec, chosen.rule):
        raise InputError(f"a trace says which step commits each token of a block, once and for good, but {reason}.")
    said = {**chosen.to_json(), **dict(options or {}), **({} if weights is None else {"weights": weights})}
    optimized = optimize(model, recipe, backend=backend, progress=tell, weights=weights, **dict(options or {}))
    histories = Histories(model.spec, evicts(optimized))

    def count(progress: Progress) -> None:
        tell(f"decoding: {progress.finished} of {progress.prompts} prompts, {progress.decoded} tokens")

    result = optimized.generate(prompts, chosen, max_batch=max_batch, observer=histories, progress=count)
    found = histories.whole()
    block = model.spec.block_length
    if not found:
        raise InputError(
            f"no block of {block} was decoded as a whole; ask for more than {2 * block} tokens, or take other prompts."
        )
    settings = ", ".join(f"{name}={value}" for name, value in said.items() if name != "max_new_tokens")
    trace = Trace(block, found, f"{model.name}, {recipe}, {settings}, {len(prompts)} prompts")
    return Recorded(trace, len(histories.begun) - len(found), result.stats)


def obstacle(spec: ModelSpec, policy: Policy) -> str:
    """The reason why a trace cannot describe a model's decoding by a policy; "" if it can."""
    if spec.noise == "uniform":
        return f"{spec.family} draws its canvas anew in every step (noise='uniform'); record one with a mask token"
    named = type(policy).__name__
    if traits_of(policy).edits:
        return f"{named} also replaces tokens that it has committed; decode by a threshold"
    if traits_of(policy).autoregressive:
        return f"{named} commits what encoded rows predict, in blocks that begin anywhere; decode by a threshold"
    return ""


def evicts(optimized: CompiledModel) -> bool:
    """True if the step program keeps only some of its rows."""
    return "kept" in optimized.graph("step").outputs


def report(recorded: Recorded) -> dict[str, Any]:
    """A recording as plain values, with its redundancies."""
    trace, rows = recorded.trace, recorded.trace.redundancy()
    return {
        "source": trace.source,
        "block": trace.block,
        "blocks": len(trace.histories),
        "dropped_blocks": recorded.dropped,
        "steps_per_block": trace.steps,
        "dense_rows_per_token": rows.dense,
        "kept_rows_per_token": rows.kept,
        "kept_rows_per_token_with_recommit": rows.recommitted,
        "measured_rows_per_token": recorded.stats.rows_per_token,
        "torch": torch.__version__,
    }
