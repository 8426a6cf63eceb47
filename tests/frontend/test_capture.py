"""Capture: native classes and plain modules, bit for bit; what cannot be captured names op, module and line."""

from __future__ import annotations

import copy
import inspect
import operator
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dgraph
from dgraph.errors import CaptureError, InputError
from dgraph.frontend.capture import capture_module
from dgraph.frontend.places import split_layer
from dgraph.ir.graph import Graph
from tests.plain import Block, Plain, capture_plain
from tests.tiny import MASK, VOCAB, interpret, ops_of, tiny_spec

LAYERS = 4
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
CASES: list[Any] = [
    ("Llama", False, torch.float32),
    ("Qwen2", True, torch.float32),
    ("Qwen3", False, torch.bfloat16),
]
CASES += [
    pytest.param(
        (name, not tied, torch.bfloat16 if dtype == torch.float32 else torch.float32), marks=pytest.mark.release
    )
    for name, tied, dtype in CASES
]


def native(name: str, tied: bool, dtype: torch.dtype, **config: Any) -> Any:
    """A native transformers model with random weights, norms and biases included."""
    import transformers

    settings = getattr(transformers, f"{name}Config")(**{**SIZES, "tie_word_embeddings": tied, **config})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(settings).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape).to(dtype))
    return model


@dataclass(frozen=True)
class Case:
    name: str
    tied: bool
    dtype: torch.dtype
    model: Any
    graph: Graph


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"{c[0]}-{'tied' if c[1] else 'untied'}-{c[2]}"[:24])
def case(request: pytest.FixtureRequest) -> Case:
    name, tied, dtype = request.param
    model = native(name, tied, dtype)
    return Case(name, tied, dtype, model, dgraph.capture(model, mask_id=MASK))


def padded_batch(b: int, t: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(b)
    ids = torch.randint(0, VOCAB, (b, t), generator=generator)
    return {"input_ids": ids, "positions": (torch.arange(t) + torch.arange(b)[:, None] * 5).contiguous()}


def test_the_graph_is_bit_for_bit_the_module(case: Case) -> None:
    module = dgraph.adopt(case.model, mask_id=MASK).module
    for b, t in ((1, 5), (3, 11)):
        batch = padded_batch(b, t)
        with torch.no_grad():
            expected = module(batch["input_ids"], batch["positions"])
        got = interpret(case.graph, batch)["logits"]
        assert got.dtype == case.dtype
        assert torch.equal(got, expected)
        assert expected.float().std() > 0.01


def test_the_module_attends_in_both_directions(case: Case) -> None:
    """Against transformers' own eager attention with a mask that hides nothing."""
    reference = copy.deepcopy(case.model).float()
    reference.set_attn_implementation("eager")
    batch = padded_batch(2, 9)
    visible = torch.zeros(2, 1, 9, 9)
    with torch.no_grad():
        expected = reference(batch["input_ids"], attention_mask=visible, position_ids=batch["positions"]).logits
        causal = reference(batch["input_ids"], position_ids=batch["positions"]).logits
    got = interpret(case.graph, batch)["logits"].float()
    close = 1e-5 if case.dtype == torch.float32 else 0.05
    assert (got - expected).abs().max() < close * expected.abs().max()
    assert (got - causal)[:, :-1].abs().max() > 4 * (got - expected).abs().max()


def test_each_layer_has_one_attention_two_ropes_and_its_norms(case: Case) -> None:
    norms = 4 if case.name == "Qwen3" else 2
    for layer in range(LAYERS):
        counts = Counter(ops_of(case.graph, layer))
        assert counts["dgraph.attention"] == 1
        assert counts["dgraph.rope"] == 2
        assert counts["dgraph.rms_norm"] == norms
        assert counts["linear"] == 7
    outside = Counter(ops_of(case.graph, None))
    assert outside["dgraph.rms_norm"] == outside["linear"] == outside["embedding"] == 1
    assert outside["dgraph.attention"] == outside["dgraph.rope"] == 0
    everything = set(ops_of(case.graph))
    assert not everything & {"pow", "rsqrt", "mean", "view", "clone", "alias", "scaled_dot_product_attention"}
    assert not any("assert" in op for op in everything)


def test_attention_is_over_unrepeated_heads_after_rope(case: Case) -> None:
    head = 128 if case.name == "Qwen3" else 8  # Qwen3's config has a head_dim of its own
    for node in case.graph.find("attention"):
        q, k, v, scale = node.args
        assert [case.graph.type_text(x).split("[")[1] for x in (q, k, v)] == [
            f"b, 4, t, {head}]",
            f"b, 2, t, {head}]",
            f"b, 2, t, {head}]",
        ]
        assert scale == pytest.approx(head**-0.5)
        assert all(x in case.graph.find("rope") for x in (q, k))
        assert v not in case.graph.find("rope")


def test_layers_and_roles(case: Case) -> None:
    graph = case.graph
    roles = {n.meta["role"] for n in graph.calls if n.meta["layer"] == 2 and n.target is torch.ops.aten.linear.default}
    attention = {f"self_attn.{x}_proj" for x in "qkvo"}
    assert roles == attention | {f"mlp.{x}_proj" for x in ("gate", "up", "down")}
    assert [n.meta["layer"] for n in graph.find("attention")] == list(range(LAYERS))
    assert {n.meta["role"] for n in graph.find("attention")} == {"self_attn"}
    layers = [n.meta["layer"] for n in graph.calls if n.meta["layer"] is not None]
    assert layers == sorted(layers)
    tail = [(n.meta["layer"], n.meta["role"]) for n in graph.calls[-2:]]
    assert tail == [(None, "model.norm"), (None, "lm_head")]
    assert all(n.meta["source"].rpartition(":")[2].isdigit() for n in graph.find("attention") + graph.find("rms_norm"))
    assert all(n.meta["by"] == "" for n in graph.nodes)


def test_equal_layers_are_equal_nodes(case: Case) -> None:
    def text(layer: int) -> list[tuple[str, str, str]]:
        of_layer = [n for n in case.graph.calls if n.meta["layer"] == layer]
        return [(str(n.target), n.meta["role"], case.graph.type_text(n)) for n in of_layer]

    assert text(0) == text(1) == text(2) == text(3)


def test_weights_are_inputs_and_the_models_own_tensors(case: Case) -> None:
    parameters = dict(case.model.named_parameters(remove_duplicate=False))
    if case.tied:  # one weight, and it goes by one name
        assert parameters.pop("model.embed_tokens.weight") is parameters["lm_head.weight"]
    tensors = case.graph.tensors
    assert set(tensors) == {*parameters, "model.rotary_emb.inv_freq"}
    assert tensors["model.rotary_emb.inv_freq"] is case.model.model.rotary_emb.inv_freq
    for name, parameter in parameters.items():
        assert tensors[name] is parameter, name
    assert list(case.graph.weight_nodes()) == [n.meta["weight"] for n in case.graph.nodes if "weight" in n.meta]
    assert set(case.graph.weight_nodes()) == set(tensors)
    embedding = next(n for n in case.graph.calls if n.target is torch.ops.aten.embedding.default)
    shared = embedding.args[0] is case.graph.result("logits").args[1]
    assert shared == case.tied
    assert not any(n.op == "get_attr" for n in case.graph.nodes)


def test_inputs_outputs_and_spec(case: Case) -> None:
    graph = case.graph
    assert [(s.name, s.dtype, s.shape) for s in graph.inputs.values()] == [
        ("input_ids", torch.int64, ("b", "t")),
        ("positions", torch.int64, ("b", "t")),
    ]
    assert graph.outputs == ("logits",)
    assert graph.type_text(graph.result("logits")).endswith(f"[b, t, {VOCAB}]")
    spec = graph.spec
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.vocab) == (LAYERS, 32, 4, 2, VOCAB)
    assert (spec.family, spec.dtype, spec.mask_id) == (f"{case.name}ForCausalLM", case.dtype, MASK)


def test_two_captures_are_alike(model: dgraph.Model, captured: Graph) -> None:
    again = capture_module(model.module, model.spec, model.prefix)

    def text(graph: Graph) -> list[Any]:
        names = {n: i for i, n in enumerate(graph.nodes)}
        return [
            (n.op, str(n.target) if n.op == "call_function" else n.meta.get("weight", n.meta.get("input")),
             str(torch.fx.map_arg(n.args, lambda a: f"%{names[a]}")), n.meta["layer"], n.meta["role"])
            for n in graph.nodes
        ]  # fmt: skip

    assert text(again) == text(captured)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_callers_model_is_left_as_it_was(implementation: str) -> None:
    model = native("Qwen3", False, torch.float32, num_hidden_layers=1, attn_implementation=implementation)
    model.train()
    batch = padded_batch(2, 6)
    config = model.config.to_dict()
    tensors = {name: (p, p.clone(), p.data_ptr(), p.requires_grad) for name, p in model.named_parameters()}
    with torch.no_grad():
        expected = model(batch["input_ids"]).logits
    dgraph.capture(model, mask_id=MASK)
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == config
    assert all(m.training for m in model.modules()), "capture left the model in eval mode"
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    for name, parameter in model.named_parameters():
        object_before, value, address, grad = tensors[name]
        assert parameter is object_before
        assert torch.equal(parameter, value)
        assert (parameter.data_ptr(), parameter.requires_grad) == (address, grad)
    with torch.no_grad():
        assert torch.equal(model(batch["input_ids"]).logits, expected)


# -- plain modules -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kv_heads", "options"), [(4, {}), (2, {"enable_gqa": True}), (4, {"scale": 0.7})])
def test_a_plain_module_is_captured_through_sdpa(kv_heads: int, options: dict[str, Any]) -> None:
    module = Plain(kv_heads, **options)
    graph = capture_plain(module)
    nodes = graph.find("attention")
    assert [n.meta["layer"] for n in nodes] == [0, 1]
    assert graph.type_text(nodes[0].args[1]) == f"f32[b, {kv_heads}, t, 4]"
    assert nodes[0].args[3] == options.get("scale", 0.5)
    batch = padded_batch(3, 7)
    with torch.no_grad():
        expected = module(batch["input_ids"], batch["positions"])
    assert torch.equal(interpret(graph, batch)["logits"], expected)
    assert graph.tensors["blocks.1.qkv.weight"] is module.blocks[1].qkv.weight


class Branch(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if positions.max() > 5:  # here
            x = x * 2
        return x


class Item(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x * positions.max().item()  # here


class InPlace(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        y = x * 2
        y += 1  # here
        return y


class Autocast(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return x @ x.transpose(1, 2) @ x  # here


class Nonzero(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + positions.nonzero().shape[0]  # here


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Identity(), Branch()])

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return self.inner[1](self.inner[0](x), positions)


def line_of(cls: type, text: str = "# here") -> str:
    source, first = inspect.getsourcelines(cls)
    (offset,) = (i for i, line in enumerate(source) if text in line)
    return f"{Path(inspect.getfile(cls)).name}:{first + offset}"


def message_of(module: nn.Module) -> str:
    with pytest.raises(CaptureError) as caught:
        capture_plain(module)
    return str(caught.value)


@pytest.mark.parametrize(
    ("twist", "op", "module", "owner"),
    [
        (Branch, "max", "twist", Branch),
        (Outer, "max", "twist.inner.1", Branch),
        (Item, "item", "twist", Item),
        (Nonzero, "nonzero", "twist", Nonzero),
        (InPlace, "add_", "twist", InPlace),
        (Autocast, "wrap_with_autocast", "twist", Autocast),
    ],
)
def test_what_cannot_be_captured_names_op_module_and_line(
    twist: type[nn.Module], op: str, module: str, owner: type
) -> None:
    plain = Plain(blocks=1, twist=twist())
    message = message_of(plain)
    assert f"op {op} " in message
    assert f"in module {module} " in message.replace("'", "")
    assert "straight line" in message
    if owner is not Autocast:  # torch records no line for a context
        assert line_of(owner) in message
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in plain.modules())


class Masked(Block):
    def forward(self, x: Tensor) -> Tensor:
        q = x[:, None]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=x.new_zeros(x.shape[1], x.shape[1]))[:, 0]  # here


@pytest.mark.parametrize("options", [{"is_causal": True}, {"dropout_p": 0.1}, None])
def test_an_attention_that_is_not_plain_is_refused(options: dict[str, Any] | None) -> None:
    module = Plain(**(options or {}))
    if options is None:
        module.blocks[1] = Masked(4)
    message = message_of(module)
    assert message.startswith("op scaled_dot_product_attention in module the layer ")
    if options is None:
        assert "layer 1" in message
        assert "attn_mask=" in message
        assert line_of(Masked) in message
    else:
        ((name, value),) = options.items()
        assert "layer 0" in message
        assert f"{name}={value};" in message
        assert line_of(Block, "F.scaled_dot_product_attention") in message


class Biased(Block):
    """ALiBi: scores fall with the distance."""

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        bias = -(at[:, None] - at).abs().to(x.dtype)
        q = x[:, None]
        return F.scaled_dot_product_attention(q, q, q, attn_mask=bias)[:, 0]  # here


class WrittenOut(Block):
    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1) @ x  # here


class OverHeads(Block):
    def forward(self, x: Tensor) -> Tensor:
        q = x.view(*x.shape[:2], 4, 4)
        return F.scaled_dot_product_attention(q, q, q).flatten(2)  # here


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (Biased, "A bias that depends on positions (ALiBi, relative positions) cannot be compiled: use a model with"),
        (WrittenOut, "runs over tokens; write the attention as F.scaled_dot_product_attention(q, k, v)"),
        (OverHeads, "not [sequences, heads, tokens, size of a head]; bring queries, keys and values into that shape"),
    ],
)
def test_an_attention_that_cannot_be_compiled_says_what_to_do(block: type[Block], said: str) -> None:
    module = Plain()
    module.blocks[1] = block(4)
    message = message_of(module)
    assert said in message
    assert "layer 1" in message
    assert line_of(block) in message


class Multihead(nn.Module):
    """An attention of torch's own, which has tokens before sequences inside."""

    def __init__(self, weights: bool = False):
        super().__init__()
        self.attention, self.weights = nn.MultiheadAttention(16, 4, batch_first=True), weights

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        x = x + self.attention(x, x, x, need_weights=self.weights)[0]
        return x + x.view(b * t, d).relu().view(b, t, d)


def test_multihead_attention_is_captured_where_it_gives_no_weights() -> None:
    module = Plain()
    module.blocks[0], module.blocks[1] = Multihead(), nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    graph = capture_plain(module)
    assert [graph.type_text(n) for n in graph.find("attention")] == ["f32[b, 4, t, 4]"] * 2
    assert sum(op == "split_with_sizes" for op in ops_of(graph)) == 2
    batch = padded_batch(3, 7)
    with torch.no_grad():
        expected = module(batch["input_ids"], batch["positions"])
    torch.testing.assert_close(interpret(graph, batch)["logits"], expected, atol=1e-6, rtol=1e-5)
    module.blocks[0] = Multihead(weights=True)
    assert "need_weights=False" in message_of(module)


class Drop(nn.Module):
    def __init__(self, training: bool):
        super().__init__()
        self.on = training

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return F.dropout(x, 0.1, training=self.on)


def test_dropout_in_training_mode_is_refused() -> None:
    message = message_of(Plain(blocks=1, twist=Drop(True)))
    assert "dropout in training mode; call model.eval() before capture" in message
    assert "dropout" not in ops_of(capture_plain(Plain(blocks=1, twist=Drop(False))))


def test_a_sliding_window_is_refused() -> None:
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1, "num_hidden_layers": 2}
    model = native("Qwen3", False, torch.float32, **window)
    with pytest.raises(CaptureError, match=r"layer 1 has a sliding window of 4 positions"):
        dgraph.capture(model, mask_id=MASK)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("fact", ["layers", "heads", "head_dim", "vocab"])
def test_sizes_that_are_not_those_of_the_forward_are_named(fact: str) -> None:
    spec = tiny_spec(layers=2)
    wrong = replace(spec, **{fact: 2 * getattr(spec, fact)})
    said = rf"the spec of hand says {fact}={getattr(wrong, fact)}, but the forward of Plain has {getattr(spec, fact)}; "
    with pytest.raises(CaptureError, match=said):
        dgraph.capture(dgraph.Model("plain", Plain().eval(), wrong))


@pytest.mark.parametrize(
    ("fact", "value"), [("layers", "3"), ("heads", True), ("vocab", 0), ("dtype", "float32"), ("eos_ids", 5)]
)
def test_a_fact_of_another_type_is_named(fact: str, value: object) -> None:
    with pytest.raises(InputError, match=rf"^hand: {fact} must be a"):
        tiny_spec(**{fact: value})


class Constant(nn.Module):
    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + torch.tensor([1.0, 2.0] * 8)


def test_a_constant_of_the_forward_becomes_a_weight() -> None:
    module = Plain(blocks=1, twist=Constant())
    graph = capture_plain(module)
    batch = padded_batch(2, 5)
    with torch.no_grad():
        assert torch.equal(interpret(graph, batch)["logits"], module(batch["input_ids"], batch["positions"]))
    assert sum(t.tolist() == [1.0, 2.0] * 8 for t in graph.tensors.values()) == 1


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model.layers.3.mlp.act_fn", (3, "mlp.act_fn")),
        ("layers.12", (12, "")),
        ("model.norm", (None, "model.norm")),
        ("blocks.0.experts.7.up", (0, "experts.7.up")),
        ("conv2d", (None, "conv2d")),
        ("", (None, "")),
    ],
)
def test_split_layer(path: str, expected: tuple[int | None, str]) -> None:
    assert split_layer(path) == expected


def test_no_node_is_a_size_of_nothing(case: Case) -> None:
    """Every size that is left is read, and nothing but reshapes reads one."""
    sizes = [n for n in case.graph.calls if isinstance(n.meta["val"], int | torch.SymInt)]
    for node in sizes:
        assert node.users
        assert all(u.target is not operator.add for u in node.users)
