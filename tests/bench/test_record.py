"""Recording: the embedded model's own commits as a trace."""

from __future__ import annotations

import pytest

import dgraph
from dgraph.bench.record import record, report, text_prompts
from dgraph.errors import InputError
from dgraph.runtime.script import selections


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


def test_models_without_passages() -> None:
    with pytest.raises(InputError, match="comes with no held-out prompts; give a file"):
        text_prompts("./somewhere", 3)
