"""Weights whose columns make up for each other's rounding: the search itself, and a checkpoint that it makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import dgraph
from dgraph.errors import InputError
from dgraph.evaluate import gptq
from dgraph.evaluate.gptq import gptq_for, rounded
from dgraph.evaluate.inputs import inputs_for
from dgraph.passes import QuantizeWeights
from dgraph.quantised import KINDS, Format, QuantisedWeight, quantise
from dgraph.saving import Fold, save_quantised
from tests.amounts import drawn
from tests.evaluate.test_scales import outlying
from tests.models import test_sdar_moe as mixture
from tests.models.test_quantised import CONFIG
from tests.remote import write
from tests.tiny import interpret

FORMATS = (Format("int4", (1, 8)), Format("int4", (1, 8), zeros=True), Format("int8"), Format("fp8"), Format("int4"))
STEP = QuantizeWeights("int4", (1, 16))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def errors_of(weight: QuantisedWeight, exact: Tensor, inputs: Tensor) -> Tensor:
    """Of each row, the squared error of its outputs."""
    return ((weight.dequantised(torch.float64) - exact.double()) @ inputs.double().t()).square().sum(1)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_where_inputs_are_independent_it_rounds_to_the_nearest(format: Format) -> None:
    weight, diagonal = normal(7, 48, seed=0), torch.rand(48, generator=torch.Generator().manual_seed(1)) + 0.1
    diagonal[5] = 0.0
    found, want = rounded(weight, diagonal.diag(), format), quantise(weight, format)
    assert torch.equal(found.values.view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(found.scales, want.scales)
    assert (found.zeros is None) == (want.zeros is None)


@drawn(
    few=12,
    many=80,
    format=st.sampled_from(FORMATS),
    rows=st.integers(1, 9),
    columns=st.sampled_from([2, 16, 30, 140]),
    count=st.integers(1, 60),
    rank=st.integers(1, 40),
    seed=st.integers(0, 99),
)
def test_outputs_are_never_further_off_than_by_rounding_to_the_nearest(
    format: Format, rows: int, columns: int, count: int, rank: int, seed: int
) -> None:
    weight = normal(rows, columns, seed=seed)
    inputs = normal(count, rank, seed=seed + 1) @ normal(rank, columns, seed=seed + 2)
    found = rounded(weight, inputs.t() @ inputs, format)
    assert found.shape == weight.shape
    off, plain = (errors_of(each, weight, inputs) for each in (found, quantise(weight, format)))
    assert (off <= plain * (1 + 1e-3) + 1e-6).all()


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_outputs_of_inputs_that_go_together_are_much_nearer(format: Format) -> None:
    weight, inputs = normal(16, 144, seed=3), normal(400, 20, seed=4) @ normal(20, 144, seed=5)
    inputs = inputs + 0.1 * normal(400, 144, seed=6)
    found, plain = rounded(weight, inputs.t() @ inputs, format), quantise(weight, format)
    off, nearest = (float(errors_of(each, weight, inputs).sum()) for each in (found, plain))
    assert off < 0.5 * nearest


def test_columns_are_rounded_as_the_paper_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order: each rounds to the nearest, and the others solve what is left of the squared error without it."""
    format, kind = Format("int8"), KINDS["int8"]
    weight, inputs = normal(3, 6, seed=7), normal(50, 6, seed=8)
    monkeypatch.setattr(gptq, "TOGETHER", 4)
    hessian = (inputs.t() @ inputs).double()
    hessian += gptq.DAMPING * hessian.diagonal().mean() * torch.eye(6)
    scale = weight.double().abs().amax(1, keepdim=True) / kind.reach
    left = weight.double()
    for i in range(6):
        nearest = (left[:, i : i + 1] / scale).round().clamp(*kind.limits) * scale
        off = left[:, i] - nearest[:, 0]
        rest = slice(i + 1, 6)
        # min over d of (off e_i + d)^T H (off e_i + d), d among the rest
        left[:, rest] += torch.linalg.solve(hessian[rest, rest], hessian[rest, i])[None, :] * off[:, None]
        left[:, i] = nearest[:, 0]
    got = gptq._fed_forward(weight, inputs.t() @ inputs, format).dequantised(torch.float64)
    torch.testing.assert_close(got, left, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_is_nearer_to_what_it_was_made_from(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", CONFIG, outlying())
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 90, (12,), generator=draw).tolist() for _ in range(12)]
    told: list[tuple[int, int]] = []
    found = gptq_for(inputs_for(folder, weights=STEP, input_ids=ids[:8]), lambda *now: told.append(now))
    assert told[-1] == (len(found), len(found))
    plainly = save_quantised(folder, tmp_path / "plain", STEP)
    searched = save_quantised(folder, tmp_path / "searched", STEP, rounded=found)
    assert len(found) == searched.quantised == plainly.quantised
    assert searched.after == plainly.after
    inputs = {"input_ids": torch.tensor(ids[8:]), "positions": torch.arange(12).expand(4, 12)}
    graphs = [dgraph.capture(f).copy() for f in (folder, plainly.folder, searched.folder)]
    exact, plain, made = (interpret(graph, inputs)["logits"].log_softmax(-1) for graph in graphs)
    divergence = [float((exact.exp() * (exact - other)).sum(-1).mean()) for other in (made, plain)]
    assert divergence[0] < 0.9 * divergence[1]


def test_experts_are_left_to_the_nearest(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", mixture.KEYS, mixture.WEIGHTS)
    inputs = inputs_for(folder, weights=QuantizeWeights("int4", (1, 8)), input_ids=[[3, 4, 5]])
    assert any("experts" in name for name in inputs.formats)
    assert {name for name in inputs.formats if "experts" not in name} == set(gptq_for(inputs))


def test_what_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", CONFIG, outlying())
    ids = [[3, 4, 5]]
    with pytest.raises(InputError, match=r"in blocks of \[8, 8\] .*q_proj\.weight has scales that several rows share"):
        gptq_for(inputs_for(folder, weights=QuantizeWeights("fp8", (8, 8)), input_ids=ids))
    found = gptq_for(inputs_for(folder, weights=STEP, input_ids=ids))
    with pytest.raises(InputError, match=r"was rounded in blocks of \(1, 16\), and is to be written in \(1, 8\)"):
        save_quantised(folder, tmp_path / "q", QuantizeWeights("int4", (1, 8)), rounded=found)
    folds = [Fold("", tuple(found), torch.ones(1))]
    with pytest.raises(InputError, match="has a fold, without which it was rounded"):
        save_quantised(folder, tmp_path / "q", STEP, rounded=found, folds=folds)
