"""Checkpoints that come quantised, each layout written by `tests.models.stored`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

import dgraph
import dgraph.parallel.divide
from dgraph.errors import CheckpointError, InputError
from dgraph.families import Model, resolve
from dgraph.families.quantised import PARTS, QuantisedWeight, sizes_of
from dgraph.families.weights import WeightSource, hollow, weights_of
from dgraph.frontend.frozen import capture_or_load
from dgraph.models.checkpoint import build_native
from dgraph.models.tiny import BLOCK, KEYS, build_tiny
from dgraph.passes import ShardTensorParallel
from dgraph.passes.manager import run_passes
from dgraph.ranks.sharding import Sharding
from dgraph.testing.ranks import ranks
from tests.models import test_sdar_moe as mixture
from tests.models.stored import CASES, Case, gptq, torchao_by
from tests.remote import change_tensors, write

CONFIG = {**KEYS, "architectures": ["LlamaForCausalLM"], "block_length": BLOCK, "dtype": "float32"}
LAYERS = KEYS["num_hidden_layers"]
Store = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
SOME = "compressed int4 with zeros", "fp8 by block", "gptq"
"""Layouts that are decoded with by default."""


def weights() -> dict[str, Tensor]:
    model = build_tiny(lambda keys, source: build_native("LlamaForCausalLM", keys, source), {}, 3)
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def folders(
    tmp_path: Path, case: Case, shards: int = 2, others: Mapping[str, Store] = MappingProxyType({}), **changes: Any
) -> tuple[Path, Path]:
    """A checkpoint whose layers are quantised, and the same with the weights that these stand for.

    Args:
        others: how layers are stored whose path has a name in it.
        changes: of the settings.
    """
    stored, plain = {}, weights()
    for name, tensor in weights().items():
        module, _, leaf = name.rpartition(".")
        if leaf == "weight" and module.endswith("_proj"):
            store = next((other for part, other in others.items() if part in module), case.store)
            parts, plain[name] = store(tensor)
            stored |= {f"{module}.{part}": value for part, value in parts.items()}
        else:
            stored[name] = tensor
    config = {**CONFIG, "quantization_config": {**case.settings, **changes}}
    return write(tmp_path / "quantised", config, stored, shards), write(tmp_path / "plain", CONFIG, plain)


def taken_quantised(source: WeightSource, name: str, like: Tensor) -> QuantisedWeight:
    """A weight as it is stored."""
    format = source.formats[name]
    values, scales, *zeros = (
        source.take(f"{name}{part}", hollow(shape, dtype, like.device), None)
        for part, (shape, dtype) in zip(PARTS, sizes_of(like.shape, format), strict=False)
    )
    assert format.block is not None
    return QuantisedWeight(values, scales, zeros[0] if zeros else None, format.block)


def same_weights(quantised: Model, plain: Model) -> int:
    """That an opened checkpoint stands for the weights of another one; how many of them are stored quantised."""
    source, expected = quantised.weights, plain.weights
    assert source is not None
    assert expected is not None
    for name, like in weights_of(quantised.module, quantised.prefix).items():
        if name in source:
            found = source.take(name, like, None)
            if name in source.formats:
                found = taken_quantised(source, name, like).dequantised(torch.float32)
            assert torch.equal(found, expected.take(name, like, None)), name
    return len(source.formats)


@pytest.mark.parametrize("name", CASES)
def test_a_layout_is_read_as_the_weights_that_it_stands_for(name: str, tmp_path: Path) -> None:
    quantised, plain = (resolve(folder, opened=True) for folder in folders(tmp_path, CASES[name]))
    assert same_weights(quantised, plain) == 7 * LAYERS


@pytest.mark.parametrize("name", ["compressed fp8 by tensor", "compressed fp8 by block", "compressed int4", "awq"])
def test_experts_that_are_quantised_one_by_one(name: str, tmp_path: Path) -> None:
    stored, plain = {}, dict(mixture.WEIGHTS)
    for weight, tensor in mixture.WEIGHTS.items():
        module = weight.removesuffix(".weight")
        if ".experts." in module:
            parts, plain[weight] = CASES[name].store(tensor)
            stored |= {f"{module}.{part}": value for part, value in parts.items()}
        else:
            stored[weight] = tensor
    config = {**mixture.KEYS, "quantization_config": CASES[name].settings}
    folders = write(tmp_path / "q", config, stored), write(tmp_path / "p", mixture.KEYS, plain)
    assert same_weights(*(resolve(folder, opened=True) for folder in folders)) == 4


def test_embeddings_may_be_stored_in_a_way_of_their_own(tmp_path: Path) -> None:
    """Linear layers in fp8, vectors of ids in groups of int4: each class has a group of the settings."""
    linear, embedding = CASES["compressed fp8 by rows"], CASES["compressed int4"]
    stored, plain = {}, weights()
    for name, tensor in weights().items():
        module = name.removesuffix(".weight")
        if module.endswith(("_proj", "embed_tokens")):
            case = linear if module.endswith("_proj") else embedding
            parts, plain[name] = case.store(tensor)
            stored |= {f"{module}.{part}": value for part, value in parts.items()}
        else:
            stored[name] = tensor
    groups = {
        of: case.settings["config_groups"]["group_0"] for of, case in (("Linear", linear), ("Embedding", embedding))
    }
    groups = {of: {**group, "targets": [of]} for of, group in groups.items()}
    settings = {**linear.settings, "config_groups": groups}
    quantised = write(tmp_path / "q", {**CONFIG, "quantization_config": settings}, stored)
    folders = quantised, write(tmp_path / "p", CONFIG, plain)
    assert same_weights(*(resolve(folder, opened=True) for folder in folders)) == 7 * LAYERS + 1
    assert dgraph.capture(quantised).find("dequantise")


BITS_8, GROUPS_OF_16 = gptq(8, 1, False), gptq(4, 1, False, 16)


@pytest.mark.parametrize(
    ("dynamic", "others"),
    [
        ({"+:.*mlp.*": {"bits": 8}}, {"mlp": BITS_8}),
        ({r".*\.q_proj": {"bits": 8}}, {"q_proj": BITS_8}),
        ({"+:.*": {"group_size": 16, "desc_act": False}}, {"proj": GROUPS_OF_16}),
        ({"+:.*up_proj": {"group_size": 16}, "+:.*mlp.*": {"bits": 8}}, {"up_proj": GROUPS_OF_16, "mlp": BITS_8}),
        ({"+:mlp.*": {"bits": 8}}, {}),  # the beginning of a path is matched, not its middle
        ({"+:.*mlp.*": {"sym": True}}, {"mlp": gptq(4, 0, True)}),
    ],
)
def test_layers_of_gptq_have_settings_of_their_own(
    dynamic: dict[str, Any], others: dict[str, Store], tmp_path: Path
) -> None:
    quantised, plain = folders(tmp_path, CASES["gptq"], others=others, dynamic=dynamic)
    assert same_weights(resolve(quantised, opened=True), resolve(plain, opened=True)) == 7 * LAYERS
    if len(others) > 1:
        assert tokens_of(quantised) == tokens_of(plain)


def test_layers_of_gptq_may_be_left_as_they_are(tmp_path: Path) -> None:
    dynamic = {"-:.*mlp.*": {}, "+:.*": {"bits": 8}}
    others: dict[str, Store] = {"mlp": lambda weight: ({"weight": weight}, weight)}
    quantised, plain = folders(tmp_path, Case(CASES["gptq"].settings, BITS_8), others=others, dynamic=dynamic)
    assert same_weights(resolve(quantised, opened=True), resolve(plain, opened=True)) == 4 * LAYERS


def add_biases(value: float) -> Callable[[dict[str, Tensor]], None]:
    """Give every layer that is quantised a bias."""

    def apply(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(".qweight")]:
            outputs = tensors[name].shape[1]
            tensors[f"{name.removesuffix('qweight')}bias"] = torch.full((outputs,), value, dtype=torch.float16)

    return apply


def test_biases_of_zeros_that_autogptq_writes_are_left_out(tmp_path: Path) -> None:
    quantised, plain = folders(tmp_path, CASES["gptq"])
    change_tensors(quantised, add_biases(0.0))
    assert same_weights(resolve(quantised, opened=True), resolve(plain, opened=True)) == 7 * LAYERS


def test_biases_of_zeros_are_kept_where_a_layer_has_one(tmp_path: Path) -> None:
    quantised, _ = folders(tmp_path, CASES["gptq"])
    change_tensors(quantised, add_biases(0.0))
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    source = resolve(quantised, opened=True).weights
    assert source is not None
    assert "model.layers.0.self_attn.q_proj.bias" in source
    assert "model.layers.0.mlp.up_proj.bias" not in source


def test_a_bias_that_is_not_zero_is_named(tmp_path: Path) -> None:
    quantised, _ = folders(tmp_path, CASES["gptq"])
    change_tensors(quantised, add_biases(0.5))
    message = rf"checkpoint .*quantised: model\.layers\.0\.mlp\.down_proj\.bias, .* and {7 * LAYERS - 3} more: not zero"
    with pytest.raises(CheckpointError, match=message):
        resolve(quantised, opened=True)


def test_biases_of_zeros_beside_other_layers_are_not_left_out(tmp_path: Path) -> None:
    quantised, _ = folders(tmp_path, CASES["gptq"], shards=1)
    change_tensors(quantised, lambda tensors: tensors.update({"lm_head.bias": torch.zeros(4)}))
    with pytest.raises(CheckpointError, match=r"unexpected: lm_head\.bias"):
        resolve(quantised, opened=True)


GROUPED = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 8, "actorder": "group"}


@pytest.mark.parametrize(
    ("name", "leaf", "changes", "message"),
    [
        (
            "gptq",
            "g_idx",
            {"desc_act": True},
            r"desc_act=True\); .* with desc_act=False, or static_groups=True besides",
        ),
        (
            "compressed int4",
            "weight_g_idx",
            {"config_groups": {"a": {"targets": ["Linear"], "weights": GROUPED}}},
            r'actorder="group"\); .* with actorder="weight" or none',
        ),
    ],
)
def test_an_order_of_activations_is_read_where_it_is_the_plain_one(
    name: str, leaf: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    def with_order(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts, stands_for = CASES[name].store(weight)
        return {**parts, leaf: (torch.arange(weight.shape[1]) // 8).int()}, stands_for

    quantised, plain = folders(tmp_path, Case(CASES[name].settings, with_order), **changes)
    assert same_weights(resolve(quantised, opened=True), resolve(plain, opened=True)) == 7 * LAYERS
    change_tensors(quantised, damage(leaf, lambda t: t.flip(0)))
    with pytest.raises(CheckpointError, match=rf"k_proj\.{leaf} puts inputs into groups .*{message}"):
        resolve(quantised, opened=True)


@pytest.mark.parametrize(
    ("settings", "dtype", "message"),
    [
        (
            torchao_by("Int4WeightOnlyConfig", "OPAQUE", group_size=8),
            torch.uint8,
            r"is uint8 \[32, 24\], as torchao stores it by Int4WeightOnlyConfig in packing 'opaque'; dgraph reads",
        ),
        (
            torchao_by("Int4WeightOnlyConfig", "PLAIN"),
            torch.uint8,
            "by Int4WeightOnlyConfig in packing 'plain'; dgraph",
        ),
        (
            torchao_by("Float8DynamicActivationInt4WeightConfig", "PRESHUFFLED"),
            torch.int8,
            "by Float8DynamicActivationInt4WeightConfig in packing 'preshuffled'; dgraph reads",
        ),
        (
            {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 8}}}},
            torch.uint8,
            "by Int4WeightOnlyConfig; dgraph reads .* Int4WeightOnlyConfig in packing 'plain'. Quantise the model by",
        ),
        ({"quant_type": "int4_weight_only"}, torch.uint8, "by int4_weight_only; dgraph reads"),
        ({"quant_type": None}, torch.uint8, "by a class that config.json does not name; dgraph reads"),
    ],
)
def test_what_torchao_packs_in_another_way_is_named(
    settings: dict[str, Any], dtype: torch.dtype, message: str, tmp_path: Path
) -> None:
    folder, _ = folders(tmp_path, CASES["torchao int4"], shards=1, **settings)

    def repack(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items() if name.endswith("_weight_qdata")}

    change_tensors(folder, repack)
    with pytest.raises(CheckpointError, match=f"proj._weight_qdata .*{message}"):
        resolve(folder, opened=True)


def damage(leaf: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[dict[str, Tensor]], None]:
    """Change or drop a tensor of the first projection of keys."""

    def apply(tensors: dict[str, Tensor]) -> None:
        name = f"model.layers.0.self_attn.k_proj.{leaf}"
        if name in tensors:
            found = change(tensors.pop(name))
            if found is not None:
                tensors[name] = found

    return apply


BAD: dict[str, tuple[str, Callable[[dict[str, Tensor]], None], str]] = {
    "no scale": (
        "compressed fp8 by rows",
        damage("weight_scale", lambda t: None),
        r"k_proj\.weight_scale is missing, without which weight of this layer",
    ),
    "no weight": ("awq", damage("qweight", lambda t: None), r"k_proj\.qweight is missing"),
    "no zeros": ("gptq", damage("qzeros", lambda t: None), r"k_proj\.qzeros is missing"),
    "a scale too few": (
        "fp8 by block",
        damage("weight_scale_inv", lambda t: t[:, 1:].contiguous()),
        r"k_proj\.weight_scale_inv is float32 \[1, 1\], expected .* \[1, 2\], as the settings of fp8 in config.json",
    ),
    "a scale of words": (
        "compressed int4",
        damage("weight_scale", lambda t: t.to(torch.int32)),
        r"k_proj\.weight_scale is int32",
    ),
    "values of another kind": (
        "compressed int8",
        damage("weight", lambda t: t.to(torch.uint8)),
        r"k_proj\.weight is uint8 \[16, 32\], expected int8",
    ),
    "half of the words": (
        "compressed int4",
        damage("weight_packed", lambda t: t[:, ::2].contiguous()),
        r"k_proj\.weight_packed is int32 \[16, 2\], expected int32 \[16, 4\]",
    ),
    "another order": (
        "gptq",
        damage("g_idx", lambda t: t.flip(0)),
        r"k_proj\.g_idx puts inputs into groups in the order of their activations",
    ),
    "another shape": (
        "torchao int8",
        damage("_weight_qdata", lambda t: t[:, :24].contiguous()),
        r"wrong shape: model\.layers\.0\.self_attn\.k_proj\.weight is \(16, 24\), expected \(16, 32\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_tensor_is_named(name: str, tmp_path: Path) -> None:
    layout, change, message = BAD[name]
    folder, _ = folders(tmp_path, CASES[layout], shards=1)
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=f"checkpoint .*quantised: .*{message}"):
        resolve(folder, opened=True)


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("awq", {"quant_method": "bitsandbytes"}, "quantised by 'bitsandbytes', .* reads awq, compressed-tensors, fp8"),
        ("awq", {"version": "gemv"}, "version of awq is 'gemv', expected 'gemm'"),
        ("awq", {"group_size": "all"}, "group_size is 'all', expected a number of columns, or -1 for all"),
        ("gptq", {"bits": 3}, "bits of gptq is 3, expected 4 or 8"),
        (
            "gptq",
            {"dynamic": {"+:.*mlp.*": {"bits": 2}}},
            r"mlp\.\w+, of which `dynamic` says \{'bits': 2\}: bits of gptq is 2, expected 4 or 8",
        ),
        ("gptq", {"dynamic": {"+:.*": 8}}, "quantization_config is not as 'gptq' writes it"),
        (
            "gptq",
            {"checkpoint_format": "marlin"},
            "checkpoint_format of gptq is 'marlin', expected 'gptq' or 'gptq_v2'",
        ),
        (
            "compressed int4",
            {"format": "marlin-24"},
            "compressed-tensors as marlin-24; dgraph reads",
        ),
        ("compressed int4", {"config_groups": {}}, "compressed-tensors as no group of layers"),
        ("compressed int4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, "as sparse-24-bitmask; dgraph reads"),
        (
            "compressed int4",
            {"config_groups": {"a": {"targets": ["Linear"], "weights": {"num_bits": 3, "type": "int"}}}},
            "proj has weights of type 'int' in 3 bits by tensor, which dgraph does not read",
        ),
        (
            "compressed int4",
            {"config_groups": {"a": {"targets": ["re:.*mlp.*"]}}},
            "no group of config_groups says how",
        ),
        (
            "compressed int4",
            {"config_groups": {"a": {"targets": ["re:*foo"], "weights": {"num_bits": 4, "type": "int"}}}},
            "quantization_config is not as 'compressed-tensors' writes it",
        ),
        (
            "compressed int4",
            {"config_groups": [1]},
            "quantization_config is not as 'compressed-tensors' writes it",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    layout: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder, _ = folders(tmp_path, CASES[layout], **changes)
    with pytest.raises(CheckpointError, match=message):
        resolve(folder, opened=True)


def tokens_of(model: Any, recipe: str = "dense", **how: Any) -> list[list[int]]:
    opt = dgraph.optimize(model, recipe, backend="eager", **how)
    return opt.generate(input_ids=[[5, 6, 7, 8, 9], [11, 12]], max_new_tokens=2 * BLOCK, threshold=0.6).token_ids


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in SOME else pytest.mark.release) for n in CASES])
def test_a_quantised_checkpoint_decodes_as_the_weights_that_it_stands_for(name: str, tmp_path: Path) -> None:
    quantised, plain = folders(tmp_path, CASES[name])
    assert tokens_of(quantised) == tokens_of(plain)
    graph = dgraph.capture(quantised)
    assert len(graph.find("dequantise")) == 7 * LAYERS
    assert sum(t.nbytes for t in graph.tensors.values()) < sum(t.nbytes for t in dgraph.capture(plain).tensors.values())


@pytest.mark.parametrize(
    "recipe", ["focus", *(pytest.param(recipe, marks=pytest.mark.release) for recipe in ("dyllm", "dllm_serve"))]
)
def test_recipes_take_a_quantised_checkpoint(recipe: str, tmp_path: Path) -> None:
    quantised, plain = folders(tmp_path, CASES["compressed int4 with zeros"])
    assert tokens_of(quantised, recipe) == tokens_of(plain, recipe)


@pytest.mark.parametrize("name", ["compressed fp8 by tensor", "compressed int4 with zeros", "gptq"])
@pytest.mark.release
def test_ranks_read_their_parts_of_a_quantised_checkpoint(name: str, tmp_path: Path) -> None:
    folder, _ = folders(tmp_path, CASES[name])
    whole, opened = dgraph.capture(folder), resolve(folder, opened=True)
    graph, _ = capture_or_load(opened.module, opened.spec, opened.prefix, weights=opened.weights)
    for rank in range(2):
        mine, expected = graph.copy(), whole.copy()
        run_passes(mine, [ShardTensorParallel(2, rank=rank, weights=opened.weights)])
        run_passes(expected, [ShardTensorParallel(2, rank=rank)])
        assert mine.tensors.keys() == expected.tensors.keys()
        assert all(torch.equal(mine.tensors[name], tensor) for name, tensor in expected.tensors.items())


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    folder, _ = folders(tmp_path, CASES["compressed int8"])
    with pytest.raises(InputError, match="quantised already, and what is rounded twice is worse: leave weights="):
        dgraph.optimize(folder, "dense", weights="int4", backend="eager")


def test_ranks_of_a_quantised_checkpoint_say_what_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dgraph.parallel.divide, "of", lambda mesh: Sharding(2))
    folder, _ = folders(tmp_path, CASES["compressed int4 with zeros"])

    def tokens(rank: int) -> list[list[int]]:
        mesh: Any = object()
        return tokens_of(folder, mesh=mesh)

    alone = tokens_of(folder)
    assert ranks(2, tokens) == [alone, alone]
