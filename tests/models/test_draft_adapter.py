"""Nemotron's adapter for drafts: read from its folder, decoded by as a plain implementation does, and lossless."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

import dgraph
from dgraph.cache.store import open_store
from dgraph.compiler.base_graph import graph_of_model
from dgraph.compiler.saving import Fold, save_quantised
from dgraph.errors import CheckpointError, InputError, UnknownName
from dgraph.families import resolve
from dgraph.families.adapters import Adapter as DraftAdapter
from dgraph.families.adapters import LowRank
from dgraph.models.nemotron import stored
from dgraph.runtime.stats import StepRecord
from dgraph.testing import models
from tests.amounts import drawn
from tests.engine.alone import check_as_alone
from tests.models.test_nemotron import CONFIG, REMOTE, WEIGHTS
from tests.models.test_two_modes import CAUSAL, NEW, few_words
from tests.models.two_modes import Setup, compare
from tests.oracle.two_modes import Adapter, self_speculation
from tests.remote import stand_in, write

RANK, ALPHA = 2, 8
PROMPTS = [[i % 6 for i in range(first, first + n)] for first, n in ((0, 3), (2, 8), (5, 13), (1, 21))]
# adapter_config.json of linear_spec_lora, at another size
SETTINGS: dict[str, Any] = {
    "alpha_pattern": {},
    "bias": "none",
    "fan_in_fan_out": False,
    "layers_to_transform": None,
    "lora_alpha": ALPHA,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": RANK,
    "rank_pattern": {},
    "target_modules": ["o_proj"],
    "use_dora": False,
    "use_rslora": False,
}


def products(weights: Mapping[str, Tensor], target: str = "o_proj", size: float = 0.3) -> dict[str, Tensor]:
    """Tensors of an adapter in PEFT's names, for each weight of a checkpoint that is called so."""
    generator, found = torch.Generator().manual_seed(11), {}
    for name, weight in weights.items():
        if f"{target}.weight" in name:
            base = "base_model.model." + name.removesuffix(".weight")
            found[f"{base}.lora_A.weight"] = torch.randn(RANK, weight.shape[1], generator=generator) * size
            found[f"{base}.lora_B.weight"] = torch.randn(weight.shape[0], RANK, generator=generator) * size
    return found


def plainly(tensors: Mapping[str, Tensor]) -> Adapter:
    """The same as the oracle takes it."""
    before, after = "base_model.model.", ".lora_A.weight"
    bases = [name.removeprefix(before).removesuffix(after) for name in tensors if name.endswith(after)]
    return {
        f"{base}.weight": (tensors[f"{before}{base}{after}"], tensors[f"{before}{base}.lora_B.weight"], ALPHA / RANK)
        for base in bases
    }


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], **settings: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """The model of few words, with an adapter that changes what it drafts."""
    own, tensors = few_words(), products(few_words().plain.weights)
    folder = write_adapter(tmp_path_factory.mktemp("few_words") / "linear_spec_lora", tensors)
    model = resolve(own.model, adapter=str(folder))
    return Setup(model, graph_of_model(model, open_store()), replace(own.plain, adapter=plainly(tensors)))


# -- decoding --------------------------------------------------------------------------------------------------------


def test_drafts_are_those_of_the_adapter_and_what_verifies_them_is_not(adapted: Setup) -> None:
    """Tokens, what each step commits, and the final keys, against the oracle."""
    records: list[StepRecord] = []
    traces = [self_speculation(adapted.plain, prompt, NEW) for prompt in PROMPTS]
    run = adapted.optimized("dense")
    settings = {"max_new_tokens": NEW, "policy": "self_speculation"}
    result = run.generate(input_ids=PROMPTS, observer=records.append, keep_kv=True, **settings)
    compare(result, records, traces)
    without = few_words().optimized("dense").generate(input_ids=PROMPTS, **settings)
    assert result.token_ids == without.token_ids
    assert result.stats.sequence_steps != without.stats.sequence_steps, "other drafts"


@pytest.mark.parametrize("settings", [CAUSAL[0], CAUSAL[2]], ids=str)
def test_policies_that_do_not_draft_read_the_model_s_own_weights(adapted: Setup, settings: dict[str, Any]) -> None:
    mine: list[StepRecord] = []
    theirs: list[StepRecord] = []
    for setup, records in ((adapted, mine), (few_words(), theirs)):
        setup.optimized("dense").generate(input_ids=PROMPTS, max_new_tokens=NEW, observer=records.append, **settings)
    assert len(mine) == len(theirs)
    for one, other in zip(mine, theirs, strict=True):
        assert torch.equal(one.token, other.token)
        assert torch.equal(one.confidence, other.confidence), "bit for bit"


@drawn(3, 40, seed=st.integers(0, 2**31))
def test_self_speculation_with_an_adapter_gives_the_tokens_of_autoregression(seed: int) -> None:
    """25 prompts at a time; 1,000 in a release."""
    setup, generator = drawn_adapter(), torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 24, (25,), generator=generator).tolist()
    prompts = [torch.randint(0, 6, (n,), generator=generator).tolist() for n in lengths]
    run = setup.optimized("dense")
    tokens = [
        run.generate(input_ids=prompts, max_new_tokens=NEW, policy=policy).token_ids
        for policy in ("self_speculation", "autoregressive")
    ]
    assert tokens[0] == tokens[1]


@functools.cache
def drawn_adapter() -> Setup:
    """As `adapted`, without a folder: of every kind of layer."""
    own = few_words()
    tensors: dict[str, Tensor] = {}
    for target in ("q_proj", "o_proj", "up_proj"):
        tensors |= products(own.plain.weights, target, 0.1)
    names = {stored(name): name for name in own.graph.tensors}
    found = {names[name]: LowRank(down, up, scale) for name, (down, up, scale) in plainly(tensors).items()}
    model = replace(own.model, adapter=DraftAdapter("drawn", found))
    return Setup(model, graph_of_model(model, open_store()), own.plain)


def test_one_batch_holds_drafts_and_others(adapted: Setup) -> None:
    run = adapted.optimized("dense")
    decodings = [dgraph.Decoding(max_new_tokens=NEW, **settings) for settings in CAUSAL]
    check_as_alone(run, PROMPTS[:3], decodings, max_sequences=3, max_tokens=64)


@pytest.mark.parametrize(
    ("recipe", "options"), [("focus", {"alpha": 1.2}), ("dyllm", {"tau": 0.9}), ("dense", {"block_cache": "dc"})]
)
def test_recipes_with_an_adapter_change_no_token(adapted: Setup, recipe: str, options: dict[str, Any]) -> None:
    wanted = few_words().optimized("dense").generate(input_ids=PROMPTS, max_new_tokens=NEW, policy="autoregressive")
    run = adapted.optimized(recipe, **options)
    for policy in CAUSAL[:2]:
        assert run.generate(input_ids=PROMPTS, max_new_tokens=NEW, **policy).token_ids == wanted.token_ids


# -- folders ---------------------------------------------------------------------------------------------------------


def test_an_official_folder(tmp_path: Path) -> None:
    """The adapter's folder lies in the checkpoint's; in bfloat16 like the weights that are loaded so."""
    folder, tensors = write(tmp_path / "Nemotron", CONFIG, WEIGHTS), products(WEIGHTS)
    write_adapter(folder / "linear_spec_lora", tensors)
    for dtype in (torch.float32, torch.bfloat16):
        model = dgraph.load(folder, dtype, adapter="linear_spec_lora")
        assert model.adapter is not None
        assert model.spec.adapter == model.adapter.name == "linear_spec_lora"
        assert set(model.adapter.weights) == {f"model.layers.{i}.self_attn.o_proj.weight" for i in range(2)}
        for i in range(2):
            low = model.adapter.weights[f"model.layers.{i}.self_attn.o_proj.weight"]
            name = f"base_model.model.encoder.layers.{i}.self_attn.o_proj.lora_{{}}.weight"
            assert low.scale == ALPHA / RANK
            assert torch.equal(low.down, tensors[name.format("A")].to(dtype))
            assert torch.equal(low.up, tensors[name.format("B")].to(dtype))
    assert dgraph.load(folder).adapter is None


def test_a_model_object_and_a_loaded_model_take_one_too(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "mine", products(WEIGHTS), use_rslora=True)
    model = dgraph.adopt(stand_in(REMOTE, CONFIG, WEIGHTS), adapter=str(folder))
    assert model.adapter is not None
    assert {low.scale for low in model.adapter.weights.values()} == {ALPHA / RANK**0.5}
    assert resolve(model, adapter="").adapter is None
    again = resolve(resolve(model, adapter=""), adapter=str(folder))
    assert again.adapter is not None


def test_it_is_given_like_any_fact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On the command line, too: `--fact adapter=linear_spec_lora`."""
    from dgraph.cli.options import facts

    assert facts(["adapter=linear_spec_lora"]) == {"adapter": "linear_spec_lora"}
    folder = write(tmp_path / "Nemotron", CONFIG, WEIGHTS)
    write_adapter(folder / "linear_spec_lora", products(WEIGHTS))
    made = dgraph.optimize(str(folder), "dense", backend="eager", facts={"adapter": "linear_spec_lora"})
    assert len(made.graph("step").find("low_rank")) == 2
    with pytest.raises(UnknownName, match="adapter"):
        dgraph.optimize(str(folder), "dense", backend="eager", facts={"adaptor": "linear_spec_lora"})


Change = Callable[[dict[str, Tensor]], Any]
FIRST = "base_model.model.encoder.layers.0.self_attn.o_proj"


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"peft_type": "ADALORA"}, None, r"adapter_config\.json: peft_type is 'ADALORA', expected 'LORA'"),
        ({"use_dora": True}, None, r"use_dora is True, expected False: drafts read a low-rank product beside each"),
        ({"bias": "all"}, None, "bias is 'all', expected 'none'"),
        ({"modules_to_save": ["lm_head"]}, None, r"modules_to_save is \['lm_head'\], expected \[\]"),
        ({"rank_pattern": {"o_proj": 4}}, None, r"rank_pattern is \{'o_proj': 4\}, expected \{\}"),
        ({"r": 0}, None, r"r is 0, expected a rank, at least 1"),
        ({"lora_alpha": "much"}, None, "lora_alpha is 'much', expected a number"),
        (
            {"r": 3},
            None,
            rf"{FIRST}\.lora_A\.weight is torch.float32 \(2, 64\), expected .* \(3, 64\) by r",
        ),
        ({}, lambda t: t.pop(f"{FIRST}.lora_B.weight"), rf"{FIRST}\.lora_B\.weight is missing, expected .* \(32, 2\)"),
        ({}, lambda t: t.pop(f"{FIRST}.lora_A.weight"), rf"has the tensor {FIRST}\.lora_B\.weight, expected base_mo"),
        (
            {},
            lambda t: t.update({"base_model.model.diffusion_head.lora_A.weight": torch.zeros(2, 32)}),
            r"has the tensor base_model\.model\.diffusion_head\.lora_A.* such as encoder\.layers\.0\.self_attn\.q_proj",
        ),
        (
            {},
            lambda t: t.update({f"{FIRST}.lora_A.weight": torch.zeros(2, 64, dtype=torch.int8)}),
            "is torch.int8 .* expected floating-point numbers",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_its_name(
    tmp_path: Path, settings: dict[str, Any], change: Change | None, message: str
) -> None:
    tensors = products(WEIGHTS)
    if change is not None:
        change(tensors)
    folder = write_adapter(tmp_path / "adapter", tensors, **settings)
    with pytest.raises(CheckpointError, match=message):
        dgraph.adopt(stand_in(REMOTE, CONFIG, WEIGHTS), adapter=str(folder))


def test_models_that_do_not_draft_take_none(tmp_path: Path) -> None:
    folder = write(tmp_path / "Nemotron", CONFIG, WEIGHTS)
    with pytest.raises(CheckpointError, match=r"linear_spec_lora is no folder of an adapter: it has no adapter_config"):
        dgraph.load(folder, adapter="linear_spec_lora")
    with pytest.raises(InputError, match=r"fast_dllm_v2: adapter='x' is for drafts, .* encodes each block as a whole"):
        resolve(models(None, "fast_dllm_v2")[0].model, adapter="x")
    llama = models(None, "native")[0].model
    causal = {"attention": "block_causal", "encoding": "causal", "next_token": True}
    with pytest.raises(CheckpointError, match="the family LlamaForCausalLM reads no adapters; leave it out"):
        resolve(llama, adapter="x", **causal)


def test_an_adapter_stays_with_a_model_that_is_quantised(tmp_path: Path) -> None:
    folder = write(tmp_path / "Nemotron", CONFIG, WEIGHTS)
    write_adapter(folder / "linear_spec_lora", products(WEIGHTS))
    (folder / "onnx").mkdir()
    saved = save_quantised(folder, tmp_path / "int8", "int8").folder
    one, other = (dgraph.load(f, adapter="linear_spec_lora").adapter for f in (folder, saved))
    assert one is not None
    assert other is not None
    assert one.weights.keys() == other.weights.keys()
    assert not (saved / "onnx").exists()
    fold = Fold("model.norm.weight", (), torch.ones(1))
    assert not (save_quantised(folder, tmp_path / "folded", "int8", folds=[fold]).folder / "linear_spec_lora").exists()
