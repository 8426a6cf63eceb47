"""Capture: a module's forward as a graph, through `torch.export`.

The module maps `input_ids` i64[b, t] and `position_ids` i64[b, t] to logits [b, t, vocab]. Its attribute `inputs`
declares any other input per token. Its attention is either one `dgraph::attention` call (as the families in
`dgraph.models` arrange) or `scaled_dot_product_attention`; both become the anchor of every later pass. Weights and
buffers become inputs of the graph, by name.
"""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from dgraph.errors import CaptureError, VerifyError
from dgraph.frontend.canonicalise import canonicalise
from dgraph.frontend.places import Place, module_path, places_of
from dgraph.ir.graph import Graph
from dgraph.ir.verifier import reads_host
from dgraph.ops import op_of
from dgraph.private.torch import OpOverload
from dgraph.spec import ModelSpec
from dgraph.types.nodes import args_of, op_name
from dgraph.types.shapes import InputSpec
from dgraph.types.texts import package_path

INPUT_IDS = InputSpec("input_ids", torch.int64, ("b", "t"))
POSITIONS = InputSpec("positions", torch.int64, ("b", "t"))


def capture_module(module: nn.Module, spec: ModelSpec, prefix: str = "") -> Graph:
    """Capture a module's forward in canonical form.

    Args:
        module: `forward(input_ids i64[b, t], position_ids i64[b, t]) -> logits [b, t, vocab]`; in eval mode. With an
            attribute `inputs`, a tuple of `InputSpec` of shapes ("b", "t", ...), it takes these, too, in that order.
        spec: the model's facts.
        prefix: dotted path before every weight's name, to be left out of the graph.

    Returns:
        A graph over symbols b and t with inputs `input_ids`, `positions`, the module's own, and output `logits`,
        canonicalised.

    Raises:
        CaptureError: the forward cannot be traced, or does something a diffusion model's forward may not (attention
            masks, control flow on data); the message names the op, the module and the line.
    """
    program = _export(module, spec)
    graph = Graph(spec)
    mapping: dict[Node, Node] = {}
    signature = program.graph_signature
    names = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    tensors = {**program.state_dict, **program.constants}
    inputs = iter((INPUT_IDS, POSITIONS, *inputs_of(module)))
    for node in program.graph.nodes:
        if node.op == "call_function":
            _check_callable(node)
    nodes = list(program.graph.nodes)
    tokens = next((node for node in nodes if node.op == "placeholder" and node.name not in names), None)
    places = places_of(nodes, tokens, prefix)
    for node in nodes:
        if node.op == "placeholder":
            if node.name in names:
                name = names[node.name]
                mapping[node] = graph.add_weight(name.removeprefix(prefix), _tensor(module, name, tensors))
            else:
                mapping[node] = graph.add_input(next(inputs))
        elif node.op == "call_function":
            mapping[node] = graph.fx.node_copy(node, lambda n: mapping[n])
            mapping[node].meta = _tags(node, places[node])
        elif node.op == "output":
            logits = node.args[0][0]
            output = graph.fx.output((mapping[logits],))
            graph.outputs = ("logits",)
            output.meta = {"layer": None, "role": "", "by": "", "val": None}
        else:
            raise CaptureError(f"{node.op} node {node.name} ({node.target}) has no place in a straight-line forward.")
    try:
        canonicalise(graph)
    except VerifyError as error:
        raise CaptureError(f"the captured forward cannot be typed: {error}") from error
    _check_facts(graph, type(module).__name__)
    return graph


def _check_facts(graph: Graph, module: str) -> None:
    """Hold the sizes that a spec says to those of the forward; heads may differ between layers.

    Keys and values may have more heads than the spec says, where a forward repeats them.

    Raises:
        CaptureError: naming the fact, with the value that the forward has.
    """
    attentions = [node for node in graph.calls if (op := op_of(node.target)) is not None and op.name == "attention"]
    shapes = [args_of(node)[0].meta["val"].shape for node in attentions]
    found: dict[str, set[int]] = {
        "layers": {len(attentions)},
        "heads": {int(shape[1]) for shape in shapes},
        "head_dim": {int(shape[-1]) for shape in shapes},
        "vocab": {int(graph.result("logits").meta["val"].shape[-1])},
    }
    for name, sizes in found.items():
        said = getattr(graph.spec, name)
        if attentions and said not in sizes:
            got = ", ".join(map(str, sorted(sizes)))
            raise CaptureError(
                f"the spec of {graph.spec.family} says {name}={said}, but the forward of {module} has {got}; write "
                f"{name}={min(sizes)} into its ModelSpec, or capture the module that it describes."
            )


def inputs_of(module: nn.Module) -> tuple[InputSpec, ...]:
    """Inputs of a module's forward for each token beside its id and position.

    Raises:
        CaptureError: an input that is not declared per token.
    """
    specs: tuple[InputSpec, ...] = getattr(module, "inputs", ())
    for spec in specs:
        if spec.shape[:2] != ("b", "t") or not all(isinstance(size, int) for size in spec.shape[2:]):
            raise CaptureError(
                f"input {spec.name!r} of {type(module).__name__} has the shape {spec.shape}, expected ('b', 't', ...) "
                f"with numbers after these: one value per token."
            )
    return specs


def _export(module: nn.Module, spec: ModelSpec) -> torch.export.ExportedProgram:
    device = next((p.device for p in module.parameters()), torch.device("cpu"))
    ids = torch.zeros(3, 7, dtype=torch.int64, device=device)
    positions = torch.arange(7, device=device).expand(3, 7).contiguous()
    dims = {0: torch.export.Dim("b", min=2), 1: torch.export.Dim("t", min=2)}
    given = inputs_of(module)
    more = [torch.zeros((3, 7, *map(int, spec.shape[2:])), dtype=spec.dtype, device=device) for spec in given]
    shapes = (dims,) * (2 + len(more))
    running: list[str] = []
    try:
        with torch.no_grad(), _module_stack(module, running):
            return torch.export.export(module, (ids, positions, *more), dynamic_shapes=shapes, strict=False)
    except CaptureError:
        raise
    except Exception as error:
        raise CaptureError(_explain(error, running, type(module).__name__)) from error


@contextlib.contextmanager
def _module_stack(module: nn.Module, running: list[str]) -> Iterator[None]:
    """Keep the names of the modules whose forward is running, so that an error can say where it was."""
    hooks: list[Any] = []

    def leave(*_: Any) -> None:  # a hook that returned the name would replace the module's output
        running.pop()

    for name, child in module.named_modules():
        hooks.append(child.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        hooks.append(child.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _explain(error: Exception, running: list[str], root: str) -> str:
    text = str(error).strip() or type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torch/" not in f.filename]
    frames = [f for f in frames if f.filename != __file__]
    line = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "unknown line"
    op = re.search(r"\b(aten|prims|dgraph)[.:]+(\w+)", text)
    if op is None and frames:
        op = re.search(r"()(\w+)\(", frames[-1].line or "")
    return (
        f"cannot capture {root}: op {op.group(2) if op else 'unknown'} in module {((running or [root])[-1] or root)!r} "
        f"at {line}\n  {text.splitlines()[0]}\n  A forward must be a straight line: no branch on tensor values, no "
        f"attention mask, no host reads."
    )


def _tensor(module: nn.Module, name: str, tensors: dict[str, Any]) -> torch.Tensor:
    """The module's own tensor, not the detached copy that an exported program holds."""
    with contextlib.suppress(AttributeError):
        return module.get_parameter(name)
    with contextlib.suppress(AttributeError):
        return module.get_buffer(name)
    return tensors[name]


def _check_callable(node: Node) -> None:
    reason = "is not a plain tensor op"
    if isinstance(node.target, OpOverload):
        if reads_host(node.target):
            reason = "reads values on the host"
        elif node.target._schema.is_mutable and op_name(node.target) != "detach_":
            reason = "writes in place"
        else:
            return
    elif getattr(node.target, "__module__", "") in ("_operator", "math"):
        return
    line = (node.meta.get("stack_trace") or "no source").strip().splitlines()[-1].strip()
    raise CaptureError(
        f"op {op_name(node.target)} ({node.name}) in module {module_path(node) or 'the model'} at "
        f"{_source(node) or 'unknown line'} ({line}) {reason}; a forward must be a straight line of plain tensor ops."
    )


def _source(node: Node) -> str:
    found = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    return f"{found[-1][0]}:{found[-1][1]}" if found else ""


def _tags(node: Node, place: Place) -> dict[str, Any]:
    layer, role = place
    path, colon, line = _source(node).rpartition(":")
    return {"layer": layer, "role": role, "by": "", "source": f"{package_path(path)}{colon}{line}" if path else ""}
