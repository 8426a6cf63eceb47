"""Recording: a model's own commits as a trace, and the same commits and kept rows by random weights that follow it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import dgraph
from dgraph.bench.load import endless, named
from dgraph.bench.record import obstacle, record, report, text_prompts
from dgraph.errors import InputError
from dgraph.recipes import Ablation
from dgraph.runtime.loop.scripted_policy import SPREAD, BlockStep, selections
from dgraph.runtime.policies import policy_of
from dgraph.runtime.stats import StepRecord
from dgraph.testing import models
from tests.amounts import first_cases
from tests.cli.folders import write_checkpoint
from tests.tiny import BLOCK, MASK, tiny_spec

FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shift": {"next_token": True, "logit_shift": 1},
    "shift, causal": {"next_token": True, "logit_shift": 1, "encoding": "causal"},
    "causal": {"next_token": True, "encoding": "causal"},
    "bidirectional": {"attention": "bidirectional"},
    "bidirectional, shift": {"attention": "bidirectional", "logit_shift": 1},
}
"""What a model says of itself."""
TEXTS = [" ".join(f"w{(7 * p + 3 * i) % 90 + 3}" for i in range(n)) for p, n in enumerate((8, 3, 16, 13))]
NEW = 6 * BLOCK


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("record") / "small")


@dataclass
class Watch:
    """An observer that notes what steps of a block, which forward masks, commit and keep: by prompt and start."""

    steps: dict[tuple[int, int], list[BlockStep]] = field(default_factory=lambda: defaultdict(list))

    def __call__(self, step: StepRecord) -> None:
        for prompt in step.sequence[step.input_ids == MASK].unique().tolist():
            mine = (step.sequence == prompt) & step.candidate
            if mine.any():
                columns, start = step.column[mine], int(step.start[mine][0])
                committed = tuple(columns[step.committed[mine]].tolist())
                self.steps[prompt, start].append(BlockStep(committed, tuple(columns[step.kept[mine]].tolist())))


def follow(folder: Path, facts: Mapping[str, Any], trace: Any, recipe: str, **options: Any) -> tuple[Watch, Any]:
    """Random weights under a trace, by a recipe."""
    cpu, own = torch.device("cpu"), {"random_weights": True, "block": None}
    model = endless(named(str(folder), cpu, torch.float32, **own, **facts))  # type: ignore[arg-type]
    program, watch = dgraph.optimize(model, recipe, backend="eager", **options), Watch()
    return watch, program.generate(TEXTS, max_new_tokens=NEW, policy=trace.script(), observer=watch).stats


@first_cases(2, "form", sorted(FORMS, key=lambda form: form not in ("shift, causal", "bidirectional, shift")))
def test_random_weights_commit_and_keep_what_was_recorded(folder: Path, form: str) -> None:
    """Of a model that begins a block with a known token, too: this token is in the first step of the history."""
    facts = FORMS[form]
    model = endless(dgraph.load(folder, **facts))
    found = record(model, TEXTS, decoding=dgraph.Decoding(threshold=0.5, max_new_tokens=NEW), backend="eager")
    trace, given = found.trace, {0} if model.spec.next_token else set()
    assert len(trace.histories) >= 12
    assert len({len(history) for history in trace.histories}) > 1, "blocks differ"
    for history in trace.histories:
        for step, (_, kept) in zip(history, selections(history, BLOCK), strict=True):
            assert set(step.kept or ()) == kept, "what was kept is closed under the rules of the selection"
    focus, stats = follow(folder, facts, trace, "focus", ablation=Ablation(select="scripted"))
    dense, counted = follow(folder, facts, trace, "dense")
    followed = 0
    for (prompt, start), steps in focus.steps.items():
        history = trace.histories[(prompt * SPREAD + start // BLOCK) % len(trace.histories)]
        counts = [len(step.committed) for step in steps]
        assert counts == [len(step.committed) for step in dense.steps[prompt, start]]
        if sum(counts) != BLOCK - len(given):
            continue  # the prompt began it
        followed += 1
        assert [set(step.committed) for step in steps] == [set(step.committed) - given for step in history]
        assert [set(step.kept or ()) for step in steps] == [set(step.kept or ()) - given for step in history]
    assert followed >= 12
    assert stats.tokens == counted.tokens == found.stats.tokens == len(TEXTS) * NEW
    assert stats.decoded == counted.decoded, "a response ends within a block, of which the trace says nothing"


@first_cases(1, "form", ["shift", "causal"])
def test_a_model_that_begins_all_masked_takes_as_many_steps(folder: Path, form: str) -> None:
    """It commits the known token with those of the first step."""
    model = endless(dgraph.load(folder, **FORMS[form]))
    trace = record(model, TEXTS, decoding=dgraph.Decoding(threshold=0.5, max_new_tokens=NEW), backend="eager").trace
    watch, _ = follow(folder, {}, trace, "focus", ablation=Ablation(select="scripted"))
    whole = 0
    for (prompt, start), steps in watch.steps.items():
        if sum(len(step.committed) for step in steps) == BLOCK:
            history = trace.histories[(prompt * SPREAD + start // BLOCK) % len(trace.histories)]
            assert tuple(BlockStep(s.committed, tuple(sorted(s.kept or ()))) for s in steps) == history
            whole += 1
    assert whole >= 12


def test_the_embedded_model_is_recorded() -> None:
    model = dgraph.load("tiny_sdar")
    decoding = dgraph.Decoding(threshold=0.4, max_new_tokens=64)
    found = record(model, text_prompts("tiny_sdar", 2), decoding=decoding, backend="eager")
    trace, rows = found.trace, found.trace.redundancy()
    assert trace.block == 32
    assert trace.keeps
    assert trace.histories
    assert found.dropped >= 1, "a prompt's remainder"
    assert rows.kept is not None
    assert rows.kept < rows.dense
    for history in trace.histories:
        for step, (_, kept) in zip(history, selections(history, 32), strict=True):
            assert set(step.kept or ()) == kept, "what FOCUS kept is closed under its rules"
    assert report(found)["blocks"] == len(trace.histories)
    assert "threshold=0.4" in trace.source


def test_what_no_trace_says() -> None:
    causal = tiny_spec(next_token=True, encoding="causal")
    assert obstacle(causal, dgraph.Decoding().rule) == ""
    assert "commits what encoded rows predict" in obstacle(causal, policy_of("autoregressive"))
    assert "replaces tokens that it has committed" in obstacle(tiny_spec(), policy_of("llada2.1"))
    (gemma,) = models(None, "diffusion_gemma")
    with pytest.raises(InputError, match=r"diffusion_gemma draws its canvas anew in every step .*; record one"):
        record(gemma.model, ["a"], decoding=dgraph.Decoding(policy="renoise"))


def test_models_without_passages() -> None:
    with pytest.raises(InputError, match="comes with no held-out prompts; give a file"):
        text_prompts("./somewhere", 3)
