"""Scales that are folded into norms and gated products: the same function, and rounded better."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import dgraph
from dgraph.compiler.saving import Fold, save_quantised
from dgraph.errors import InputError
from dgraph.evaluate.inputs import inputs_for
from dgraph.evaluate.scales import groups_of, scales_for
from dgraph.passes import PackRows, QuantizeWeights
from dgraph.passes.manager import run_passes
from tests.models import test_sdar_moe as mixture
from tests.models.test_quantised import CONFIG, LAYERS, weights
from tests.remote import logits_of, write
from tests.tiny import interpret

STEP = QuantizeWeights("int4", (1, 16))
LARGE, TIMES = 5, 30.0
"""A channel of the residual stream that norms make large."""


def outlying() -> dict[str, Tensor]:
    """Weights of a model some of whose inputs are much larger than others, as those of trained ones."""
    found = weights()
    for name, tensor in found.items():
        if name.endswith("layernorm.weight"):
            tensor[LARGE] *= TIMES
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "m", CONFIG, outlying())


def groups(folder: Path) -> list[tuple[str, int]]:
    graph = dgraph.capture(folder).copy()
    run_passes(graph, [PackRows()])
    return [(re.sub(r"model\.layers\.\d+\.", "", group.made), len(group.read)) for group in groups_of(graph)]


def test_what_reads_the_same_inputs(folder: Path) -> None:
    of_layer = [("input_layernorm.weight", 3), ("post_attention_layernorm.weight", 2), ("mlp.up_proj.weight", 1)]
    assert groups(folder) == [*(of_layer * LAYERS), ("model.norm.weight", 1)]


def test_a_fold_is_the_same_function(folder: Path, tmp_path: Path) -> None:
    graph = dgraph.capture(folder).copy()
    run_passes(graph, [PackRows()])
    drawn = torch.Generator().manual_seed(0)
    folds = [
        Fold(g.made, g.read, 0.5 + 2 * torch.rand(g.inputs.meta["val"].shape[1], generator=drawn))
        for g in groups_of(graph)
    ]
    same = save_quantised(folder, tmp_path / "same", QuantizeWeights(None), folds=folds)
    assert (same.quantised, same.after) == (0, same.before)
    got, expected = (logits_of(dgraph.load(f), [3, 4, 5, 6]) for f in (same.folder, folder))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.release
def test_weights_round_better_with_scales(folder: Path, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 90, (12,), generator=draw).tolist() for _ in range(8)]
    told: list[tuple[int, int]] = []
    folds = scales_for(inputs_for(folder, weights=STEP, input_ids=ids[:4]), lambda *now: told.append(now))
    assert told[-1] == (3 * LAYERS, 3 * LAYERS)
    assert len(folds) > LAYERS
    assert all(fold.scales[LARGE] == fold.scales.max() > 1 for fold in folds if "layernorm" in fold.made)
    plainly = save_quantised(folder, tmp_path / "plain", STEP).folder
    scaled = save_quantised(folder, tmp_path / "scaled", STEP, folds=folds).folder

    def error(quantised: Path) -> float:
        graphs = [dgraph.capture(f).copy() for f in (folder, quantised)]
        inputs = {"input_ids": torch.tensor(ids[4:]), "positions": torch.arange(12).expand(4, 12)}
        theirs, mine = (interpret(graph, inputs)["logits"] for graph in graphs)
        return float((theirs - mine).square().mean())

    assert error(scaled) < 0.8 * error(plainly)


@pytest.mark.release
def test_experts_have_the_scales_of_their_norm(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", mixture.KEYS, mixture.WEIGHTS)
    assert ("post_attention_layernorm.weight", 2) in groups(folder)
    folds = [
        Fold("model.layers.0.post_attention_layernorm.weight", ROUTED, torch.linspace(0.5, 2, mixture.SIZES.hidden))
    ]
    same = save_quantised(folder, tmp_path / "same", QuantizeWeights(None), folds=folds).folder
    got, expected = (logits_of(dgraph.load(f), [3, 4, 5, 6]) for f in (same, folder))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


ROUTED = "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.experts.gate_up_proj"


def test_what_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="give either prompts"):
        inputs_for(folder)
    with pytest.raises(InputError, match="no prompt to measure inputs on"):
        inputs_for(folder, input_ids=[])
    saved = save_quantised(folder, tmp_path / "q", "int8").folder
    with pytest.raises(InputError, match="quantised already"):
        inputs_for(saved, input_ids=[[3, 4]])
