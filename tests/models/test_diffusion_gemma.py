"""DiffusionGemma against the class of transformers: both modes, folders, model objects."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dgraph
from dgraph.errors import CheckpointError, InputError
from dgraph.families.weights import read_all, weights_of
from dgraph.frontend.capture import capture_module
from dgraph.ir.graph import Graph
from dgraph.ir.verifier import verify
from dgraph.models.diffusion_gemma import CLASS, FACTS, FULL, Router, build, family
from dgraph.models.shapes import random_model
from dgraph.passes import CacheKV, EvictTokens, FuseProjections, PackRows, PartialAttention, ReuseRows, SparseKV
from tests.amounts import first_cases
from tests.models.gemma import (
    CANVAS,
    EOS,
    HIDDEN,
    TEXT,
    VOCAB,
    WINDOW,
    adopted,
    caches_of,
    draw,
    published,
    rows_of,
    run,
)
from tests.remote import change_tensors, write
from tests.tiny import ops_of, read_cache, report_of, rewritten

PROMPT = draw(11, 1)
"""Longer than the window, and no multiple of a canvas."""
CONFIG: dict[str, Any] = {
    "architectures": [CLASS],
    "model_type": "diffusion_gemma",
    "canvas_length": CANVAS,
    "eos_token_id": [1, EOS],
    "tie_word_embeddings": True,
    "text_config": {**TEXT, "model_type": "diffusion_gemma_text", "use_bidirectional_attention": "vision"},
}
OF_VISION = re.compile(r"model\.encoder\.(?!language_model\.layers\.\d+\.layer_scalar)")


@pytest.fixture(scope="module")
def model() -> dgraph.Model:
    return adopted(published())


@pytest.fixture(scope="module")
def captured(model: dgraph.Model) -> Graph:
    graph = capture_module(model.module, model.spec, model.prefix)
    verify(graph)
    return graph


@pytest.fixture(scope="module")
def cached(captured: Graph) -> Graph:
    return rewritten(captured, PackRows(), FuseProjections(), CacheKV())


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-5)


def projected(hidden: Tensor) -> Tensor:
    """Logits of last hidden states [t, hidden], as transformers makes them."""
    return 30 * torch.tanh(published().lm_head(hidden).float() / 30)


@torch.no_grad()
def both_modes(prompt: list[int], canvas: list[int], soft_logits: Tensor | None) -> tuple[Tensor, Tensor, Any]:
    """Logits of an encoded prompt and of a canvas after it, and the cache, by transformers."""
    found = published()(
        input_ids=torch.tensor([prompt]),
        decoder_input_ids=torch.tensor([canvas]),
        self_conditioning_logits=None if soft_logits is None else soft_logits[None],
    )
    return projected(found.encoder_last_hidden_state[0]), found.logits[0], found.past_key_values


def soft_of(logits: Tensor) -> Tensor:
    """The mean embedding that logits predict."""
    return logits.softmax(-1) @ published().model.decoder.embed_tokens.weight.detach()


# -- numbers -----------------------------------------------------------------------------------------------------


def test_both_modes_equal_the_class_of_transformers(cached: Graph) -> None:
    canvas, before = draw(CANVAS, 2), 5 * torch.randn(CANVAS, VOCAB, generator=torch.Generator().manual_seed(3))
    for given in (None, before):
        encoded, denoised, cache = both_modes(PROMPT, canvas, given)
        caches = caches_of(cached, [len(PROMPT) + CANVAS])
        close(run(cached, rows_of([PROMPT], [0], [True]), caches), encoded)
        for layer in (1, 3):  # the sliding ones of transformers drop what is behind their window
            for kind, wanted in (("k", cache.layers[layer].keys), ("v", cache.layers[layer].values)):
                found = read_cache(caches, f"{kind}_cache_{layer}", 0, len(PROMPT))
                close(found, wanted[0].transpose(0, 1)[: len(PROMPT)])
        soft = None if given is None else soft_of(given)
        close(run(cached, rows_of([canvas], [len(PROMPT)], [False]), caches, soft), denoised)
    assert denoised.std() > 0.1


def test_one_step_holds_rows_of_both_modes(cached: Graph) -> None:
    """Rows of a sequence are what they are alone, whatever mode those of the others are in."""
    first, second, canvas = PROMPT, draw(3, 5), draw(CANVAS, 6)
    caches = caches_of(cached, [len(first) + CANVAS, len(second) + CANVAS])
    run(cached, rows_of([[], second], [0, 0], [True, True]), caches)
    found = run(cached, rows_of([first, canvas], [0, len(second)], [True, False]), caches)
    close(found[: len(first)], both_modes(first, canvas, None)[0])
    close(found[len(first) :], both_modes(second, canvas, None)[1])


def test_prompts_are_encoded_in_parts(cached: Graph) -> None:
    wanted, _, _ = both_modes(PROMPT, draw(CANVAS, 2), None)
    caches = caches_of(cached, [len(PROMPT)])
    spans = itertools.pairwise([0, 4, 5, len(PROMPT)])
    parts = [run(cached, rows_of([PROMPT[a:b]], [a], [True]), caches) for a, b in spans]
    close(torch.cat(parts), wanted)


def test_every_row_of_a_canvas_sees_the_same_window(cached: Graph) -> None:
    """The last WINDOW - 1 cached keys and the whole canvas, whatever the row: seen by gradients of the logits."""
    model = adopted(published())
    graph = rewritten(capture_module(model.module, model.spec), PackRows())
    tokens = draw(WINDOW + CANVAS, 7)
    mode = torch.tensor([True] * WINDOW + [False] * CANVAS)
    at = torch.arange(len(tokens))
    rows = {
        **rows_of([tokens], [0], [True]),
        "encoded": mode,
        "limit": torch.where(mode, at + 1, len(tokens)).int(),
        "origin": torch.where(mode, at, WINDOW).int(),
    }
    (first,) = graph.find("packed_attention", 0)
    graph.set_outputs({"logits": first})
    base = run(graph, rows, {})
    for key in range(len(tokens)):
        changed = run(graph, {**rows, "input_ids": rows["input_ids"].index_fill(0, torch.tensor([key]), 3)}, {})
        reached = ((base - changed).abs().flatten(1).amax(1) > 1e-6)[WINDOW:]
        assert reached.tolist() == [key > 0] * CANVAS


def test_every_layer_has_its_own_window_heads_and_rotation(model: dgraph.Model, captured: Graph, cached: Graph) -> None:
    assert [args[4] if len(args) > 4 else 0 for n in captured.find("attention") for args in [n.args]] == [6, 0, 6, 0]
    assert [tuple(cached.inputs[f"k_cache_{layer}"].shape[2:]) for layer in range(4)] == [(2, 8), (1, 16)] * 2
    assert ops_of(cached, 1).count("linear") == ops_of(cached, 0).count("linear")  # one product for q|k, or q|k|v
    for other in ({"sliding_window": 5}, {"num_global_key_value_heads": 2}, {"global_head_dim": 8}):
        with pytest.raises(AssertionError):
            assert build({**TEXT, **other}, "").config == model.module.config


def test_the_scalars_of_both_modes_count(cached: Graph) -> None:
    """A checkpoint has 60 of them: neither mode reads the other's."""
    layers = published().model.encoder.language_model.layers
    assert not torch.equal(layers[0].layer_scalar, published().model.decoder.layers[0].layer_scalar)
    rows, canvas = rows_of([PROMPT], [0], [True]), rows_of([PROMPT], [0], [False])
    names = [name for name in cached.tensors if name.endswith("layer_scalar")]
    assert len(names) == 2 * len(layers)
    for read, left in ((rows, "decoder"), (canvas, "encoder")):
        other = cached.copy()
        for name in names:
            if left in name:
                other.tensors[name] = torch.full((1,), torch.nan)
        assert torch.equal(
            run(other, read, caches_of(other, [len(PROMPT)])), run(cached, read, caches_of(cached, [len(PROMPT)]))
        )


def test_passes_that_think_all_keys_are_seen_leave_windows_alone(cached: Graph) -> None:
    for step in (SparseKV(), PartialAttention(), ReuseRows(), EvictTokens()):
        report = report_of(cached, step)
        assert {found.layer for found in report.applied} <= {None, 1, 3}, step
        expected = "no row is decoded before" if isinstance(step, EvictTokens) else "a window of 6 positions"
        assert any(expected in skip.reason for skip in report.skipped), step


# -- loading and adopting ----------------------------------------------------------------------------------------


def text_weights() -> dict[str, Tensor]:
    """What a checkpoint has of the text model."""
    weights = {n: w.contiguous() for n, w in published().state_dict().items() if n != "lm_head.weight"}
    return {n: w for n, w in weights.items() if not OF_VISION.match(n)}


@pytest.mark.parametrize("shards", [1, 2])
def test_an_official_folder(tmp_path: Path, shards: int, captured: Graph) -> None:
    """Its vision tower is not read, nor is what is tied."""
    weights = {n: w.contiguous() for n, w in published().state_dict().items() if n != "lm_head.weight"}
    stored = {n: w for n, w in weights.items() if not OF_VISION.match(n) or "vision" in n}
    assert any("vision_tower" in name for name in stored)
    folder = write(tmp_path / "diffusiongemma", CONFIG, stored, shards)
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 94, 50], "pad_token_id": 0}')
    loaded = family.open(folder, torch.float32, torch.device("cpu"))
    assert loaded is not None
    assert loaded.weights is not None
    read_all(weights_of(loaded.module, loaded.prefix), loaded.weights)
    for name, tensor in weights_of(loaded.module, loaded.prefix).items():
        if name in stored:
            assert torch.equal(tensor, stored[name]), name
    spec = loaded.spec
    assert (spec.family, spec.noise, spec.mask_id, spec.encoding) == ("diffusion_gemma", "uniform", -1, "causal")
    assert (spec.block_length, spec.eos_ids, spec.pad_id, spec.max_positions) == (CANVAS, (1, 94, 50, EOS), 0, 256)
    assert (spec.heads, spec.kv_heads, spec.head_dim) == (4, 2, 8)
    assert spec.image_id == FACTS["image_id"] == published().config.image_token_id


def test_the_token_of_an_image_is_refused_among_ids(tmp_path: Path) -> None:
    """By the id that the folder names."""
    folder = write(tmp_path / "m", {**CONFIG, "image_token_id": 93}, text_weights())
    program = dgraph.optimize(dgraph.load(folder), "dense", backend="eager")
    said = r"prompt 0: token 1 stands for an image \(id 93\), and no image is read here; leave it out, and say in words"
    with pytest.raises(InputError, match=said):
        program.generate(input_ids=[[5, 93, 7]], max_new_tokens=4)
    with program.engine(max_sequences=1, max_tokens=64) as engine, pytest.raises(InputError, match=said):
        engine.generate([[5, 93]])
    assert program.generate(input_ids=[[5, 92]], max_new_tokens=4).token_ids


def test_a_model_object_is_adopted_without_a_copy(model: dgraph.Model) -> None:
    theirs = dict(published().named_parameters(remove_duplicate=False))
    for name, parameter in model.module.named_parameters():
        assert parameter is theirs[name]
    assert family.adopt(torch.nn.Linear(1, 1)) is None


def test_the_published_facts() -> None:
    assert (FACTS["block_length"], FACTS["eos_ids"], FACTS["noise"]) == (256, (1, 106, 50), "uniform")


def test_the_published_sizes() -> None:
    """Without memory: the weights only stand for themselves."""
    model = random_model("diffusion-gemma-26b-a4b", "cpu", torch.bfloat16, opened=True)
    spec, config = model.spec, model.module.config
    assert (spec.layers, spec.hidden, spec.vocab, spec.block_length) == (30, 2816, 262144, 256)
    assert [at for at, kind in enumerate(config.layer_types) if kind == FULL] == [5, 11, 17, 23, 29]
    assert {(k.kv_heads, k.head_dim, k.window) for k in config.kinds.values()} == {(8, 256, 1024), (2, 512, 0)}
    weights = {id(p): p.numel() for p in model.module.parameters()}
    assert round(sum(weights.values()) / 1e9, 2) == 25.25
    assert {p.dtype for p in model.module.parameters()} == {torch.bfloat16}


@first_cases(1, "opened", [False, True])
def test_a_random_model_of_the_shape_passes_something_on(opened: bool) -> None:
    """Scalars of layers are 1: at 0 every row would go to the same experts, and a step would read few of them."""
    small = {key: TEXT[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "layer_types", "num_experts")}
    small |= {"intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8, "global_head_dim": 16}
    model = random_model(
        "diffusion-gemma-26b-a4b", "cpu", torch.float32, opened=opened, **small, top_k_experts=1, sliding_window=WINDOW
    )
    graph = dgraph.optimize(model, "dense", backend="eager", weights="fp8" if opened else None).graph("step")
    scalars = {name: tensor for name, tensor in graph.tensors.items() if name.endswith("layer_scalar")}
    assert len(scalars) == 8
    assert all(bool((tensor == 1).all()) for tensor in scalars.values())
    if not opened:
        chosen: list[Tensor] = []
        for module in model.module.modules():
            if isinstance(module, Router):
                module.register_forward_hook(lambda module, given, found: chosen.append(found[0]))
        ids = torch.arange(32)[None]
        model.module(ids, ids, torch.zeros(1, 32).bool(), torch.zeros(1, 32, TEXT["hidden_size"]))
        assert [len(choice.unique()) for choice in chosen] == [4] * 4


def test_a_missing_scalar(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", CONFIG, text_weights())
    name = "model.encoder.language_model.layers.2.layer_scalar"
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=rf"missing: {re.escape(name)}\. Its"):
        family.open(folder, None, torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts": None}, "missing num_experts"),
        ({"hidden_activation": "silu"}, "hidden_activation is 'silu', expected 'gelu_pytorch_tanh'"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all', expected 'vision'"),
        ({"attention_bias": True}, "attention_bias is True, expected False"),
        ({"top_k_experts": 9}, "topk must be between 1 and the 4 experts"),
        ({"layer_types": ["chunked_attention", *TEXT["layer_types"][1:]]}, "chunked_attention"),
    ],
)
def test_what_the_forward_does_not_do_is_refused_by_its_key(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"here does not describe a DiffusionGemma model: .*{message}"):
        build({**CONFIG, "text_config": {**CONFIG["text_config"], **change}}, "here")


def test_untied_weights_are_refused() -> None:
    with pytest.raises(CheckpointError, match="tie_word_embeddings is False, expected True"):
        build({**CONFIG, "tie_word_embeddings": False}, "here")


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"mask_id": 4}, r"noise='uniform' has mask_id=-1, got 4"),
        ({"logit_shift": 1}, r"noise='uniform' has logit_shift=0, got 1"),
        ({"next_token": True}, r"noise='uniform' has next_token=False, got True"),
        ({"noise": "normal"}, r"noise must be one of \('mask', 'uniform'\), got 'normal'"),
        ({"noise": "mask"}, "a diffusion model needs a mask token"),
    ],
)
def test_facts_that_do_not_fit(model: dgraph.Model, facts: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(model.spec, **facts)


def test_a_soft_embedding_has_the_width_of_the_stream(captured: Graph) -> None:
    assert captured.inputs["soft"].shape == ("b", "t", HIDDEN)
    assert captured.inputs["encoded"].dtype == torch.bool
