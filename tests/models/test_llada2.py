"""LLaDA2: official checkpoints and remote-code objects, and what becomes of them under every pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dgraph
from dgraph.cache.store import open_store
from dgraph.errors import CheckpointError
from dgraph.families import families
from dgraph.frontend.frozen import capture_or_load
from dgraph.models.llada2 import FACTS, Config
from dgraph.models.shapes import SHAPES, random_model
from dgraph.passes import CacheKV, ChunkLMHead, FuseProjections, PackRows
from tests.amounts import first_cases
from tests.oracle import llada2 as oracle
from tests.oracle.qwen3 import Cache, project
from tests.recipes.block_causal import Setup, check, optimized, prompts_for
from tests.remote import SEQUENCES, change_tensors, check_head, logits_of, stand_in, write
from tests.tiny import caches_of, interpret, ops_of, rewritten, rows_of

SIZES = oracle.Config()
WEIGHTS = oracle.random_weights(SIZES, seed=4)
CLASS = "LLaDA2MoeModelLM"


def expected(tokens: Sequence[int], weights: dict[str, Tensor] = WEIGHTS, sizes: oracle.Config = SIZES) -> Tensor:
    """Logits [t, vocab] of a sequence in which every row sees every row."""
    t = len(tokens)
    cache = Cache(sizes, t, weights["lm_head.weight"])  # type: ignore[arg-type]
    return project(weights, oracle.forward(weights, sizes, tokens, range(t), [t] * t, cache))


def remote(weights: dict[str, Tensor] = WEIGHTS, sizes: oracle.Config = SIZES, **config: Any) -> nn.Module:
    """An object of the checkpoint's own class; there a bias of experts is a buffer."""
    model = stand_in(CLASS, oracle.keys(sizes, **config), weights)
    for module in model.modules():
        if "expert_bias" in dict(module.named_parameters(recurse=False)):
            bias = module.expert_bias.detach()  # type: ignore[union-attr, operator]
            del module.expert_bias
            module.register_buffer("expert_bias", bias)
    return model


def near(got: Tensor, want: Tensor) -> None:
    """Equal in fp32 but for the order of sums: 1e-5 of the largest logit."""
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.fixture(scope="module")
def setup() -> Setup:
    model = dgraph.adopt(remote(), block_length=16)
    return Setup(SIZES, WEIGHTS, model, dgraph.capture(model))


# -- numbers -----------------------------------------------------------------------------------------------------


def test_module_graph_and_every_pass_equal_the_oracle(setup: Setup) -> None:
    wanted = [expected(tokens) for tokens in SEQUENCES]
    assert min(w.std() for w in wanted) > 0.5
    for tokens, logits in zip(SEQUENCES, wanted, strict=True):
        near(logits_of(setup.model, tokens), logits)
    ids = torch.tensor([SEQUENCES[0], SEQUENCES[0][::-1]])
    batch = {"input_ids": ids, "positions": torch.arange(9).expand(2, 9)}
    near(interpret(setup.graph, batch)["logits"], torch.stack([expected(row.tolist()) for row in ids]))

    packed, rows = rewritten(setup.graph, PackRows()), rows_of(SEQUENCES)
    near(interpret(packed, rows)["logits"], torch.cat(wanted))
    fused = rewritten(packed, FuseProjections())
    near(interpret(fused, rows)["logits"], torch.cat(wanted))
    cached = rewritten(fused, CacheKV())
    inputs = {**rows, **caches_of(setup.model.spec, [len(s) for s in SEQUENCES])}
    near(interpret(cached, inputs)["logits"], torch.cat(wanted))
    check_head(rewritten(cached, ChunkLMHead(2)), {**inputs, **rows}, torch.cat(wanted))


def test_what_the_graph_says(setup: Setup) -> None:
    """Half of each head is rotated; a layer of experts is one routing and one call; layers fold."""
    first, second, third = (ops_of(setup.graph, layer) for layer in range(3))
    assert "dgraph.experts" not in first
    assert second == third
    for ops in (first, second):
        assert (ops.count("dgraph.rope"), ops.count("dgraph.rms_norm"), ops.count("dgraph.attention")) == (2, 4, 1)
    assert (second.count("dgraph.route"), second.count("dgraph.experts")) == (1, 1)
    packed = rewritten(setup.graph, PackRows())
    (experts, _), (route, _) = packed.find("experts"), packed.find("route")
    assert packed.type_text(experts) == "f32[N, 64]"
    assert packed.type_text(route) == "(i64[N, 3], f32[N, 3])"
    fused = rewritten(packed, FuseProjections())
    names = [name for name in fused.tensors if "+" in name]
    assert names == [
        "model.layers.0.mlp.gate_proj+up_proj.weight",
        "model.layers.1.mlp.shared_experts.gate_proj+up_proj.weight",
        "model.layers.2.mlp.shared_experts.gate_proj+up_proj.weight",
    ]
    assert "x2" in dgraph.dump(setup.graph)


def test_a_sum_that_routes_is_not_fused() -> None:
    """In fp32 the router reads what the shared expert reads; its sums keep their order all the same."""
    model = dgraph.adopt(remote())
    fused = rewritten(dgraph.capture(model), PackRows(), FuseProjections())
    assert "model.layers.1.mlp.gate.weight" in fused.tensors


@pytest.mark.parametrize(
    "sizes",
    [
        oracle.Config(dense=0, groups=1, top_groups=1),
        pytest.param(oracle.Config(dense=2, topk=1, rotary=1.0), marks=pytest.mark.release),
        pytest.param(
            oracle.Config(layers=2, experts=4, groups=2, top_groups=1, topk=2, kv_heads=4, rotary=0.25),
            marks=pytest.mark.release,
        ),
    ],
    ids=["no dense layer, no groups", "one expert, all rotated", "one group"],
)
def test_other_sizes(sizes: oracle.Config) -> None:
    weights = oracle.random_weights(sizes, seed=2)
    model = dgraph.adopt(remote(weights, sizes))
    near(logits_of(model, SEQUENCES[2]), expected(SEQUENCES[2], weights, sizes))
    packed = rewritten(dgraph.capture(model), PackRows())
    near(interpret(packed, rows_of([SEQUENCES[2]]))["logits"], expected(SEQUENCES[2], weights, sizes))


def test_the_bias_of_experts_matters() -> None:
    flat = {n: torch.zeros_like(w) if n.endswith("expert_bias") else w for n, w in WEIGHTS.items()}
    assert (expected(SEQUENCES[0], flat) - expected(SEQUENCES[0])).abs().max() > 0.1


def test_a_captured_graph_is_kept(setup: Setup, tmp_path: Path) -> None:
    store = open_store(tmp_path / "artifacts")
    model = setup.model
    texts = []
    for new in (True, False):
        graph, captured_now = capture_or_load(model.module, model.spec, model.prefix, store)
        assert captured_now is new
        texts.append(dgraph.dump(graph))
    assert texts[0] == texts[1] == dgraph.dump(setup.graph)
    assert model.module.identity != dgraph.adopt(remote(rope_theta=7.0)).module.identity  # type: ignore[operator]


# -- decoding ----------------------------------------------------------------------------------------------------

ORACLE = {"forward": oracle.forward}


@first_cases(1, "backend", ["eager", "inductor"])
def test_dense_is_the_oracle(setup: Setup, backend: str) -> None:
    run = optimized(setup, "dense", backend)
    check(setup, 16, run, {"threshold": 0.7}, {"evict": False, "block_cache": "off", "recommit": True, **ORACLE})


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_focus_is_the_oracle(setup: Setup, backend: str) -> None:
    check(setup, 16, optimized(setup, "focus", backend), {"threshold": 0.7}, ORACLE)


@pytest.mark.parametrize("options", [{}, {"count": "device"}], ids=["", "rows counted on the device"])
def test_focus_in_buckets_is_the_oracle(setup: Setup, options: dict[str, Any]) -> None:
    """Padding rows, of whatever they hold, are routed too and reach no live row."""
    check(setup, 16, optimized(setup, "focus", "eager", [48, 200], **options), {"threshold": 0.7}, ORACLE)


@pytest.mark.parametrize("recipe", ["dense", "focus"])
def test_a_batch_gives_what_each_prompt_gives_alone(setup: Setup, recipe: str) -> None:
    run, prompts = optimized(setup, recipe), prompts_for(16)
    settings: dict[str, Any] = {"max_new_tokens": 40, "threshold": 0.6}
    together = run.generate(input_ids=prompts, **settings).token_ids
    assert together == [run.generate(input_ids=[p], **settings).token_ids[0] for p in prompts]


# -- loading -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 3])
def test_an_official_folder(tmp_path: Path, shards: int) -> None:
    model = dgraph.load(write(tmp_path / "LLaDA2.0-mini", oracle.keys(SIZES), WEIGHTS, shards))
    near(logits_of(model, SEQUENCES[0]), expected(SEQUENCES[0]))
    spec = model.spec
    assert (model.name, model.tokenizer, spec.family, spec.dtype) == ("LLaDA2.0-mini", None, "llada2", torch.float32)
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim, spec.vocab) == (3, 64, 4, 2, 16, 97)
    assert (spec.mask_id, spec.eos_ids, spec.pad_id, spec.max_positions) == (96, (5,), 0, 512)
    assert (spec.block_length, spec.attention, spec.logit_shift) == (32, "block_causal", 0)


def test_the_facts_of_the_published_checkpoints() -> None:
    assert (FACTS["mask_id"], FACTS["eos_ids"], FACTS["pad_id"]) == (156895, (156892,), 156892)
    wide = {n: w for n, w in WEIGHTS.items() if "word_embeddings" not in n and "lm_head" not in n}
    silent = {"vocab_size": 157184, "mask_token_id": None, "eos_token_id": None, "pad_token_id": None}
    for name in ("model.word_embeddings.weight", "lm_head.weight"):
        wide[name] = torch.zeros(1, 1).expand(157184, SIZES.hidden)
    spec = dgraph.adopt(remote(wide, **silent)).spec
    assert (spec.mask_id, spec.eos_ids, spec.pad_id) == (156895, (156892,), 156892)


def test_weights_are_of_the_dtype_asked_for_and_the_bias_of_experts_is_not_rounded(tmp_path: Path) -> None:
    stored = {n: w if n.endswith("expert_bias") else w.bfloat16() for n, w in WEIGHTS.items()}
    model = dgraph.load(write(tmp_path / "m", oracle.keys(SIZES), stored), dtype=torch.bfloat16)
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}
    name = "model.layers.2.mlp.gate.expert_bias"
    assert torch.equal(model.module.get_buffer(name), WEIGHTS[name])
    assert model.module.get_buffer("model.rotary_emb.inv_freq").dtype == torch.float32
    own = families()["llada2"].open(tmp_path / "m", None, torch.device("cpu"))
    assert own is not None
    assert own.spec.dtype == torch.bfloat16


def without(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name, None)


def narrow(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({n: t[:-1].clone() for n, t in tensors.items() if n == name})


EXPERT = "model.layers.2.mlp.experts.7.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(EXPERT), r"missing: model\.layers\.2\.mlp\.experts\.7\.up_proj\.weight\. Its config"),
        (without("model.layers.1.mlp.gate.expert_bias"), r"missing: model\.layers\.1\.mlp\.gate\.expert_bias"),
        (narrow(EXPERT), r"wrong shape: .*experts\.7\.up_proj\.weight is \(23, 64\), expected \(24, 64\)"),
        (
            lambda tensors: tensors.update({"model.layers.1.mlp.experts.16.up_proj.weight": torch.zeros(24, 64)}),
            r"unexpected: model\.layers\.1\.mlp\.experts\.16\.up_proj\.weight",
        ),
        (lambda t: [t.pop(n) for n in list(t) if ".experts.3." in n], r"missing: .*experts\.3\..* and 3 more"),
    ],
)
def test_a_damaged_checkpoint(tmp_path: Path, change: Callable[..., Any], message: str) -> None:
    folder = write(tmp_path / "m", oracle.keys(SIZES), WEIGHTS)
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=message):
        dgraph.load(folder)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_experts": None}, r"missing .*'num_experts'"),
        ({"hidden_size": "wide"}, r"hidden_size is 'wide', expected int"),
        ({"n_group": 5}, r"16 experts do not form 5 equal groups"),
        ({"num_experts_per_tok": 9}, r"topk must be between 1 and the 8 experts to choose from, got 9"),
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu', expected 'silu'"),
        ({"score_function": "softmax"}, r"score_function is 'softmax', expected 'sigmoid'"),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling is .*yarn.*, expected none"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, r"rope_type is 'yarn', expected 'default'"),
        ({"rope_parameters": {"type": "linear"}}, r"type is 'linear', expected 'default'"),
        ({"use_qk_norm": False}, r"use_qk_norm is False, expected True"),
    ],
)
def test_a_config_that_describes_something_else(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    folder = write(tmp_path / "m", oracle.keys(SIZES, **config), WEIGHTS)
    with pytest.raises(CheckpointError, match=rf"config\.json does not describe a LLaDA2 model: .*{message}"):
        dgraph.load(folder)


def test_keys_that_may_be_absent() -> None:
    keys = oracle.keys(SIZES)
    given = {k: v for k, v in keys.items() if k not in ("head_dim", "rope_theta", "partial_rotary_factor")}
    given |= {"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 1.0}, "num_key_value_heads": 0}
    config = Config.of(given, "test")
    assert (config.head_dim, config.rope_theta, config.rotary_dim, config.num_key_value_heads) == (16, 7.0, 16, 4)
    assert config.num_shared_experts == 1


def test_no_expert_for_all_rows() -> None:
    config = oracle.keys(SIZES, num_shared_experts=None)
    alone = {name: weight for name, weight in WEIGHTS.items() if "shared_experts" not in name}
    silent = {name: torch.zeros_like(w) if "shared_experts" in name else w for name, w in WEIGHTS.items()}
    model = dgraph.adopt(stand_in(CLASS, config, alone))
    near(logits_of(model, SEQUENCES[0]), expected(SEQUENCES[0], silent))


def test_biases_of_projections_and_a_tied_head(tmp_path: Path) -> None:
    weights = {n: w for n, w in WEIGHTS.items() if n != "lm_head.weight"}
    for layer in range(3):
        weights[f"model.layers.{layer}.attention.query_key_value.bias"] = torch.zeros(128)
        weights[f"model.layers.{layer}.attention.dense.bias"] = torch.zeros(64)
    config = oracle.keys(SIZES, use_bias=True, use_qkv_bias=True, tie_word_embeddings=True)
    loaded, adopted = (
        dgraph.load(write(tmp_path / "m", config, weights)),
        dgraph.adopt(stand_in(CLASS, config, weights)),
    )
    tied = {**WEIGHTS, "lm_head.weight": WEIGHTS["model.word_embeddings.weight"]}
    for model in (loaded, adopted):
        near(logits_of(model, SEQUENCES[0]), expected(SEQUENCES[0], tied))


# -- adopting ----------------------------------------------------------------------------------------------------


def test_a_remote_code_model_is_adopted_without_a_second_copy() -> None:
    """Whole tensors are shared; experts are stacked once, and the object's own become views of the stacks."""
    model = remote().train()
    model.get_parameter("model.norm.weight").requires_grad_(False)
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    adopted = dgraph.adopt(model)
    mine = dict(adopted.module.named_parameters())
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, WEIGHTS[name])
        assert parameter.requires_grad == trained[name]
        if ".experts." not in name:
            assert parameter is mine[name]
    stack = mine["model.layers.1.mlp.experts.gate_up_proj"]
    for kind, at in (("gate", 0), ("up", SIZES.expert)):
        own = model.get_parameter(f"model.layers.1.mlp.experts.5.{kind}_proj.weight")
        assert own.data_ptr() == stack[5, at].data_ptr()
    own = model.get_parameter("model.layers.2.mlp.experts.5.down_proj.weight")
    assert own.data_ptr() == mine["model.layers.2.mlp.experts.down_proj"][5].data_ptr()
    with torch.no_grad():
        own.zero_()
    assert not mine["model.layers.2.mlp.experts.down_proj"][5].any()
    assert model.training
    assert not adopted.module.training


def test_adopting_twice_stacks_once() -> None:
    model = remote()
    first, second = dgraph.adopt(model), dgraph.adopt(model)
    for (name, one), (_, two) in zip(first.module.named_parameters(), second.module.named_parameters(), strict=True):
        assert one.data_ptr() == two.data_ptr(), name
    near(logits_of(second, SEQUENCES[0]), expected(SEQUENCES[0]))


def test_a_remote_code_model_that_does_not_fit() -> None:
    fewer = {n: w for n, w in WEIGHTS.items() if n != EXPERT}
    with pytest.raises(CheckpointError, match=r"this LLaDA2MoeModelLM does not fit llada2: missing: .*experts\.7\.up_"):
        dgraph.adopt(remote(fewer))
    with pytest.raises(CheckpointError, match=r"this LLaDA2MoeModelLM's config does not describe .*5 equal groups"):
        dgraph.adopt(remote(n_group=5))


# -- shapes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llada2-mini", pytest.param("sdar-30b-a3b", marks=pytest.mark.release)])
def test_a_shape_with_random_weights(name: str) -> None:
    small = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "vocab_size": 97, "num_experts": 16}
    small |= {"moe_intermediate_size": 16, "mask_id": 96, "eos_ids": (5,), "pad_id": 0, "block_length": 8}
    model = random_model(name, "cpu", torch.float32, **small)
    assert (model.name, model.spec.heads, model.spec.head_dim) == (name, SHAPES[name][1]["num_attention_heads"], 128)
    assert all(p.isfinite().all() for p in model.module.parameters())
    again = random_model(name, "cpu", torch.float32, **small)
    near(logits_of(again, SEQUENCES[0]), logits_of(model, SEQUENCES[0]))
    run = dgraph.optimize(model, "dense", backend="eager")
    assert len(run.generate(input_ids=[[7, 8]], max_new_tokens=8, threshold=0.5).token_ids[0]) <= 8


def test_half_precision_goes_through_the_passes() -> None:
    model = dgraph.adopt(remote({n: w if "expert_bias" in n else w.bfloat16() for n, w in WEIGHTS.items()}))
    fused = rewritten(dgraph.capture(model), PackRows(), FuseProjections())
    (route, *_) = fused.find("route")
    assert fused.type_text(route.args[0]) == "f32[N, 16]"  # type: ignore[arg-type]
    got = interpret(fused, rows_of([SEQUENCES[0]]))["logits"]
    assert (got.float() - expected(SEQUENCES[0])).abs().mean() < 0.3
