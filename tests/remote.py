"""What tests of families with remote code share: weights, checkpoint folders, stand-in objects, rewritten programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import dgraph
from dgraph.ir.graph import Graph
from dgraph.models.files import INDEX
from dgraph.passes import CacheKV, ChunkLMHead, FuseProjections, PackRows
from tests.tiny import MASK, caches_of, draw, interpret, rewritten, rows_of

SEQUENCES = [draw(9, 1), [*draw(4, 2), *[MASK] * 3], draw(12, 3)]

# What every row's logits are after, one sequence alone.
Oracle = Callable[[Sequence[int]], Tensor]


def random_weights(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    """fp32 weights: norms around one, biases around zero, matrices that keep a row's scale."""
    generator = torch.Generator().manual_seed(seed)

    def make(name: str, shape: tuple[int, ...]) -> Tensor:
        drawn = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            return drawn / shape[1] ** 0.5
        return 0.3 * drawn if name.endswith("bias") else 1 + 0.1 * drawn

    return {name: make(name, shape) for name, shape in shapes.items()}


def write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Tensor], shards: int = 1) -> Path:
    """A checkpoint folder: one file, or shards and their index."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(dict(weights), folder / "model.safetensors")
        return folder
    places = {}
    for i in range(shards):
        shard = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = {name: weights[name] for name in sorted(weights)[i::shards]}
        save_file(part, folder / shard)
        places |= dict.fromkeys(part, shard)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Rewrite every shard of a folder."""
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard)


class _Config:
    def __init__(self, values: Mapping[str, Any]):
        self.values = values

    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def stand_in(kind: str, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> nn.Module:
    """What remote code would give: an object of a class of that name, with modules of those names."""
    model: nn.Module = type(kind, (nn.Module,), {})()
    model.config = _Config(config)  # type: ignore[assignment]
    for name, tensor in weights.items():
        *path, leaf = name.split(".")
        owner = model
        for part in path:
            if part not in dict(owner.named_children()):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(leaf, nn.Parameter(tensor.clone()))
    return model


def logits_of(model: dgraph.Model, tokens: Sequence[int]) -> Tensor:
    """Logits [t, vocab] of the model's own module."""
    ids = torch.tensor([list(tokens)])
    with torch.no_grad():
        return model.module(ids, torch.arange(len(tokens))[None])[0]


def check_against(model: dgraph.Model, oracle: Oracle) -> None:
    """The module, its captured graph, and the graph after each pass give the oracle's logits.

    After CacheKV: a whole sequence at once; then one block of it again, over the keys of all the others, which is how
    a bidirectional model is decoded with a cache.
    """
    expected = [oracle(tokens) for tokens in SEQUENCES]
    assert min(e.std() for e in expected) > 0.5
    for tokens, logits in zip(SEQUENCES, expected, strict=True):
        close(logits_of(model, tokens), logits)

    graph = dgraph.capture(model)
    ids = torch.tensor([SEQUENCES[0], SEQUENCES[0][::-1]])
    batch = {"input_ids": ids, "positions": torch.arange(9).expand(2, 9)}
    close(interpret(graph, batch)["logits"], torch.stack([oracle(row.tolist()) for row in ids]))

    packed = rewritten(graph, PackRows())
    rows = rows_of(SEQUENCES)
    close(interpret(packed, rows)["logits"], torch.cat(expected))

    fused = rewritten(packed, FuseProjections())
    layers = model.spec.layers
    assert len([name for name in fused.tensors if "q_proj+k_proj+v_proj.weight" in name]) == layers
    assert len([name for name in fused.tensors if "gate_proj+up_proj.weight" in name]) == layers
    close(interpret(fused, rows)["logits"], torch.cat(expected))

    cached = rewritten(fused, CacheKV())
    inputs = {**rows, **caches_of(model.spec, [len(s) for s in SEQUENCES])}
    close(interpret(cached, inputs)["logits"], torch.cat(expected))
    block = rows_of([s[2:6] for s in SEQUENCES], [2, 2, 2])
    block["limit"] = torch.tensor([len(s) for s in SEQUENCES for _ in range(4)], dtype=torch.int32)
    close(interpret(cached, {**inputs, **block})["logits"], torch.cat([e[2:6] for e in expected]))

    check_head(rewritten(cached, ChunkLMHead(2)), {**inputs, **rows}, torch.cat(expected))


def check_head(graph: Graph, inputs: Mapping[str, Tensor], logits: Tensor) -> None:
    """Token and confidence of the masked rows are argmax and softmax of those logits without the mask's."""
    out, masked = interpret(graph, inputs), inputs["candidate"]
    assert masked.sum() == 3
    logits[:, MASK] = -torch.inf
    assert torch.equal(out["token"][masked], logits[masked].argmax(-1))
    close(out["confidence"][masked], logits[masked].softmax(-1).amax(-1))


def close(got: Tensor, expected: Tensor) -> None:
    """Equal in fp32 but for the order of sums."""
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
