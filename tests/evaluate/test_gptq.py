"""Weights whose columns make up for each other's rounding: the search itself, and a checkpoint that it makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import dgraph
from dgraph.compiler.saving import Fold, save_quantised
from dgraph.errors import DgraphWarning, InputError
from dgraph.evaluate import gptq
from dgraph.evaluate.gptq import gptq_for, rounded
from dgraph.evaluate.inputs import inputs_for
from dgraph.families.quantised import KINDS, Format, QuantisedWeight, quantise
from dgraph.passes import QuantizeWeights
from dgraph.types.nodes import args_of
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


EXPERTS = QuantizeWeights("int8", (1, 8), which=("*.layers.0.mlp.experts.*",))
"""In int4 the largest number of a group is half way between two, which float64 and fp32 decide by their last bits."""


def as_published(weight: Tensor, inputs: Tensor, group: int) -> Tensor:
    """A weight as GPTQ rounds it to int8, or a row of it to the nearest if that is better; in plain float64."""
    kind, exact = KINDS["int8"], weight.detach().double()
    hessian = inputs.double().t() @ inputs.double()
    share = gptq.DAMPING * hessian.diagonal().mean()
    damped = hessian + torch.where(hessian.diagonal() > 0, share, torch.tensor(1.0).double()).diag()
    made = []
    for fed in (False, True):
        left = exact.clone()
        for i in range(left.shape[1]):
            if i % group == 0:
                scale = left[:, i : i + group].abs().amax(1) / kind.reach
            nearest = (left[:, i] / scale).round().clamp(*kind.limits) * scale
            off, rest = left[:, i] - nearest, slice(i + 1, None)
            if fed:
                left[:, rest] += torch.linalg.solve(damped[rest, rest], damped[rest, i])[None, :] * off[:, None]
            left[:, i] = nearest
        made.append(left)
    errors = [(((each - exact) @ hessian) * (each - exact)).sum(1) for each in made]
    return torch.where((errors[1] < errors[0])[:, None], made[1], made[0])


def test_experts_are_rounded_by_the_rows_that_reach_them(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", mixture.KEYS, mixture.WEIGHTS)
    draw = torch.Generator().manual_seed(2)
    ids = [torch.randint(6, 90, (60,), generator=draw).tolist() for _ in range(2)]
    inputs = inputs_for(folder, weights=EXPERTS, input_ids=ids, max_new_tokens=1)
    call = inputs.graph.find("experts", 0)[0]
    x, choice = (torch.cat(values) for values in zip(*inputs.of(args_of(call)[:2]), strict=True))
    path = "model.layers.0.mlp.experts"
    exact = {name: inputs.graph.tensors[f"{path}.{name}"].clone() for name in ("gate_up_proj", "down_proj")}
    told: list[tuple[int, int]] = []
    found = gptq_for(inputs, lambda *now: told.append(now))
    assert told[-1] == (len(inputs.formats), len(inputs.formats)) == (2, 2)
    for expert in range(mixture.EXPERTS):
        rows = x[(choice == expert).any(-1)]
        gate, up = (rows @ exact["gate_up_proj"][expert].t()).chunk(2, -1)
        read = {"gate_up_proj": rows, "down_proj": torch.nn.functional.silu(gate) * up}
        for name, values in read.items():
            got, want = found[f"{path}.{name}"][expert], as_published(exact[name][expert], values, 8)
            off = (got.dequantised(torch.float64) - want).abs().amax(1)
            assert (off < 1e-4).double().mean() > 0.95, "a near tie may be decided in another way"
    saved = save_quantised(folder, tmp_path / "q", EXPERTS, rounded=found)
    stored = dgraph.capture(saved.folder).tensors
    for name, weight in found.items():
        assert torch.equal(stored[name].view(torch.uint8), weight.values.view(torch.uint8)), name
        assert torch.equal(stored[f"{name}_scale"], weight.scales), name


def test_experts_that_no_row_reaches_are_rounded_to_the_nearest(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", mixture.KEYS, mixture.WEIGHTS)
    step = QuantizeWeights("int8", which=("model.layers.0.mlp.experts.down_proj",))
    inputs = inputs_for(folder, weights=step, input_ids=[[7]], max_new_tokens=1)
    ((_, choice),) = inputs.of(args_of(inputs.graph.find("experts", 0)[0])[:2])
    (name,) = inputs.formats
    missed = sorted(set(range(mixture.EXPERTS)) - set(choice.flatten().tolist()))
    assert missed
    exact = inputs.graph.tensors[name].clone()
    with pytest.warns(DgraphWarning, match=f"reaches {len(missed)} of {mixture.EXPERTS} experts of {name}"):
        found = gptq_for(inputs)[name]
    for expert in missed:
        nearest = quantise(exact[expert], inputs.formats[name])
        assert torch.equal(found[expert].values, nearest.values)
        assert torch.equal(found[expert].scales, nearest.scales)


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
