"""Calibration: the change that each layer makes to its hidden states, measured once and ahead (MaskKV, section 3.3).

The captured model runs on each prompt as it does in the first step of a response: the prompt, and a response that is
masked throughout. Every row is forwarded through every layer.
"""

from __future__ import annotations

import math
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
from dgraph.ir.verifier import verify
from dgraph.lowering.buckets import Buckets
from dgraph.lowering.executor import LoweredProgram
from dgraph.lowering.regions import RegionCompiler
from dgraph.passes.manager import run_passes
from dgraph.passes.pack_rows import PackRows
from dgraph.plans.calibration import Calibration
from dgraph.runtime.checks import check_request
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.state.packed_rows import first_limits
from dgraph.settings import DtypeLike
from dgraph.spec import ModelSpec

aten = torch.ops.aten

DIGITS = 6
"""Significant digits of a measurement; further ones depend on the order of sums."""


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

    MaskKV, Eq. 8. Cosines are taken in fp32, and their mean over all positions of a sequence, prompt and response
    alike. The importance of a layer is the mean of that over the prompts (appendix A.1), which are run one by one.
    Rows of a block-causal model see their own block and the earlier ones, as in decoding.

        found = dgraph.calibrate("./LLaDA-8B", prompts)
        found.write("./LLaDA-8B/calibration.json")  # where `dgraph.load` finds it

    For a model object: `dgraph.adopt(model, layer_importance=found.importance)`.

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
    program = LoweredProgram(graph, RegionCompiler("eager"), Buckets.of("exact"))
    measured = []
    for i, prompt in enumerate(checked):
        inputs = first_step(spec, prompt, max_new_tokens, graph.device)
        outputs = program(inputs, len(prompt) + max_new_tokens).outputs
        measured.append([_importance(outputs[_name(layer)]) for layer in range(spec.layers)])
        if progress is not None:
            progress(i + 1, len(checked))
    by_layer = list(zip(*measured, strict=True))
    return Calibration(
        family=spec.family,
        layers=spec.layers,
        hidden=spec.hidden,
        prompts=len(checked),
        max_new_tokens=max_new_tokens,
        seed=seed,
        importance=tuple(_rounded(math.fsum(values) / len(values)) for values in by_layer),
        spread=tuple(_rounded(statistics.pstdev(values)) for values in by_layer),
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
    """A program over packed rows that gives `similarity_l` f32[N] for each layer l instead of logits.

    Raises:
        CaptureError: a layer does not read and hand on one residual stream.
    """
    graph = captured.copy()
    run_passes(graph, [PackRows()])
    streams = [_around(graph, layer) for layer in range(graph.spec.layers)]
    results = {}
    for layer, (before, after) in enumerate(streams):
        at, states = after.next, []
        for stream in (before, after):
            states.append(graph.call(aten.to.dtype, (stream, torch.float32), before=at, by="calibrate", like=after))
        args = (*states, -1)
        results[_name(layer)] = graph.call(aten.cosine_similarity.default, args, before=at, by="calibrate", like=after)
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


def _is_stream(graph: Graph, node: Node) -> bool:
    value = node.meta["val"]
    if not isinstance(value, Tensor) or not value.dtype.is_floating_point or graph.row_set(node) is None:
        return False
    return value.dim() == 2 and value.shape[1] == graph.spec.hidden


def _name(layer: int) -> str:
    return f"similarity_{layer}"


def _importance(similarity: Tensor) -> float:
    """Importance of a layer for one sequence. similarity: f32[t], cosines, which may be above 1 by rounding."""
    return max(0.0, 1 - float(similarity.double().mean()))


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
