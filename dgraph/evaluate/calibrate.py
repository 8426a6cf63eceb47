"""Calibration: the change that each layer and its attention make to hidden states, measured once and ahead.

The captured model runs on each prompt as it does in the first step of a response: the prompt, and a response that is
masked throughout. Every row is forwarded through every layer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from dgraph.cache.store import open_store
from dgraph.compiler.phases import lowerable
from dgraph.errors import CaptureError, InputError
from dgraph.families import Model, resolve
from dgraph.frontend.frozen import capture_or_load
from dgraph.ir.graph import Graph
from dgraph.ir.layers import FeedForward, Layer, Mixing, layers_of
from dgraph.ir.verifier import verify
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.passes.manager import run_passes
from dgraph.passes.pack_rows import PackRows
from dgraph.plans.calibration import Calibration
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.request_checks import check_request
from dgraph.runtime.state.packed_rows import first_limits
from dgraph.settings import DtypeLike
from dgraph.spec import ModelSpec

aten = torch.ops.aten

DIGITS = 6
"""Significant digits of a measurement; further ones depend on the order of sums."""
LAYER, ATTENTION = "similarity_{}", "attention_{}"
"""Names of a measuring program's outputs, by layer."""


def calibrate(
    model: Any,
    prompts: Sequence[str] | None = None,
    *,
    input_ids: Sequence[Sequence[int]] | None = None,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    dtype: DtypeLike = None,
    device: str | torch.device | None = None,
    facts: Mapping[str, Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Measure the importance of every layer: 1 - the mean cosine of the hidden states before it and after it.

    MaskKV (arXiv 2510.09309), section 3.3, Eq. 8. Cosines are taken in fp32, and their mean over all positions of a
    sequence, prompt and response alike. The importance of a layer is the mean of that over the prompts (appendix A.1),
    which are run one by one. Rows of a block-causal model see their own block and the earlier ones, as in decoding.

    The same forward gives the similarity of every layer: the mean cosine of the hidden states before its attention and
    after the sum that adds the attention (SqueezeAttention, arXiv 2404.04793, section 3). The authors measure it for
    each prompt while that is prefilled.

        found = dgraph.calibrate("./LLaDA-8B", prompts)
        found.write("./LLaDA-8B/calibration.json")  # where `dgraph.load` finds it

    For a model object: `dgraph.adopt(model, **found.facts)`.

    Args:
        model: the name of an embedded model, a checkpoint folder, a model object, or a `Model`.
        prompts: texts, framed by the model's chat template. The paper takes 60, ten from each of six tasks.
        input_ids: instead of texts, ids per prompt, used as they are.
        max_new_tokens: masks after each prompt; None for a block of a block-causal model, 128 of a bidirectional one.
        seed: seed with which the prompts were drawn; it is only recorded in the result.
        dtype, device: dtype and device of a model that is loaded by name or folder; see `load`.
        facts: fields of the spec that a model object does not know.
        progress: called with (prompts done, prompts in all).

    Raises:
        InputError: no prompt, or one that cannot be used; raised before anything runs.
        CaptureError: the model cannot be captured, or its layers do not hand on one residual stream.
        UnknownName, CheckpointError: as `load`.
    """
    if (prompts is None) == (input_ids is None):
        raise InputError("give either prompts (texts) or input_ids, not both and not neither.")
    found = resolve(model, dtype, device, **dict(facts or {}))
    ids = [list(row) for row in input_ids] if input_ids is not None else encoded(found, prompts or ())
    if not ids:
        raise InputError("no prompt to calibrate on; give at least one.")
    spec = found.spec
    if max_new_tokens is None:
        max_new_tokens = response_length(spec)
    checked = check_request(spec, ids, Decoding(max_new_tokens=max_new_tokens), None)
    graph = measuring(capture_or_load(found.module, spec, found.prefix, open_store(), found.weights)[0])
    names = [name for name in (LAYER, ATTENTION) if name.format(0) in graph.outputs]
    program = LoweredProgram(graph, RegionCompiler("eager"), Buckets.of("exact"))
    measured: dict[str, list[list[float]]] = {name: [] for name in names}
    for i, prompt in enumerate(checked):
        inputs = first_step(spec, prompt, max_new_tokens, graph.device)
        outputs = program(inputs, len(prompt) + max_new_tokens).outputs
        for name, of_prompts in measured.items():
            of_prompts.append([_mean(outputs[name.format(layer)]) for layer in range(spec.layers)])
        if progress is not None:
            progress(i + 1, len(checked))
    changes = [[max(0.0, 1 - cosine) for cosine in cosines] for cosines in zip(*measured[LAYER], strict=True)]
    return Calibration(
        family=spec.family,
        layers=spec.layers,
        hidden=spec.hidden,
        prompts=len(checked),
        max_new_tokens=max_new_tokens,
        seed=seed,
        importance=tuple(_rounded(statistics.fmean(values)) for values in changes),
        spread=tuple(_rounded(statistics.pstdev(values)) for values in changes),
        similarity=tuple(_rounded(statistics.fmean(v)) for v in zip(*measured.get(ATTENTION, ()), strict=True)),
    )


def response_length(spec: ModelSpec) -> int:
    """Default number of masks after a prompt.

    It is one block for a block-causal model, as its first step sees no more. For any other model it is 128, or the
    positions after a prompt of one token, if these are fewer.
    """
    return spec.block_length if spec.attention == "block_causal" else min(128, spec.max_positions - 1)


def first_step(spec: ModelSpec, prompt: Sequence[int], masks: int, device: torch.device) -> dict[str, Tensor]:
    """Inputs of a packed program that forwards one sequence as a whole: a prompt and masks after it."""
    spec.check_masks("a calibration")
    count = len(prompt) + masks
    positions = torch.arange(count, device=device)
    limit = first_limits(spec, positions, len(prompt), spec.block_length)
    return {
        "input_ids": torch.tensor([*prompt, *[spec.mask_id] * masks], dtype=torch.int64, device=device),
        "positions": positions,
        "limit": limit.int(),
        "cu_rows": torch.tensor([0, count], dtype=torch.int32, device=device),
    }


def measuring(captured: Graph) -> Graph:
    """A program over packed rows that gives cosines for each layer l instead of logits.

    `similarity_l` f32[N] compares the residual stream before and after the layer. `attention_l` f32[N] compares the
    stream before the layer with that and the attention. It is left out of all layers if one adds no attention.

    Raises:
        CaptureError: a layer does not read and hand on one residual stream.
    """
    graph = captured.copy()
    run_passes(graph, [PackRows()])
    streams = [_around(graph, layer) for layer in range(graph.spec.layers)]
    mixed = {
        layer.index: _mixed(layer, streams[layer.index][1]) for layer in layers_of(graph) if layer.index is not None
    }
    results = {}
    for layer, (before, after) in enumerate(streams):
        results[LAYER.format(layer)] = _cosine(graph, before, after, after)
        if all(mixed.values()) and len(mixed) == len(streams):
            added = graph.call(aten.add.Tensor, (before, mixed[layer]), before=after.next, by="calibrate", like=after)
            results[ATTENTION.format(layer)] = _cosine(graph, before, added, after)
    graph.set_outputs(results)
    graph.sweep()
    verify(graph, "calibrate")
    return lowerable(graph)


def _around(graph: Graph, layer: int) -> tuple[Node, Node]:
    """The residual stream before a layer and after it.

    It is the value that the layer reads and hands on, has the hidden size for each row, and depends on the tokens.
    Rotary tables do not depend on them.
    """
    of_tokens = {graph.input("input_ids")}
    for node in graph.calls:
        if not of_tokens.isdisjoint(node.all_input_nodes):
            of_tokens.add(node)
    mine = [node for node in graph.calls if node.meta["layer"] == layer]
    read = dict.fromkeys(a for n in mine for a in n.all_input_nodes if a.meta["layer"] != layer and a in of_tokens)
    given = [n for n in mine if any(u.meta["layer"] != layer for u in n.users)]
    before, after = ([n for n in found if _is_stream(graph, n)] for found in (read, given))
    if len(before) != 1 or len(after) != 1:
        raise CaptureError(
            f"layer {layer} of {graph.spec.family} reads {len(before)} and hands on {len(after)} values of "
            f"{graph.spec.hidden} per row; expected one residual stream. Its importance cannot be measured; give "
            f"layer_importance yourself."
        )
    return before[0], after[0]


def _mixed(layer: Layer, after: Node) -> Node | None:
    """The value that a layer's attention adds to the residual stream; None if there is no such sum."""
    network = layer.feed_forward
    found = layer.mixing(network.attended if isinstance(network, FeedForward) else after)
    return found.result if isinstance(found, Mixing) else None


def _cosine(graph: Graph, a: Node, b: Node, like: Node) -> Node:
    """f32[N]: cosines of the rows of two values, after both and after `like`."""
    at = max(a, b, like).next
    states = [graph.call(aten.to.dtype, (x, torch.float32), before=at, by="calibrate", like=like) for x in (a, b)]
    return graph.call(aten.cosine_similarity.default, (*states, -1), before=at, by="calibrate", like=like)


def _is_stream(graph: Graph, node: Node) -> bool:
    value = node.meta["val"]
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point or graph.row_set(node) is None:
        return False
    return value.dim() == 2 and value.shape[1] == graph.spec.hidden


def _mean(cosines: Tensor) -> float:
    """Mean over the rows of a sequence, f32[t], in double precision."""
    return float(cosines.double().mean())


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def encoded(model: Model, prompts: Sequence[str]) -> list[list[int]]:
    """Ids of prompts, framed by the model's chat template.

    Raises:
        InputError: no tokenizer, or one text instead of a list.
    """
    if model.tokenizer is None:
        raise InputError(f"{model.name} came without a tokenizer; pass input_ids instead of texts.")
    if isinstance(prompts, str):
        raise InputError("prompts must be a list of texts, got one text; wrap it in a list.")
    return [model.tokenizer.encode(text) for text in prompts]
