"""Mixtures of experts: the layer, and families whose checkpoints keep each expert's matrices apart.

The layer holds its experts stacked, [experts, ...], so that `dgraph::experts` can multiply all of them in one call. A
checkpoint's tensors are copied one by one to their places in the stacks. A model object's experts are stacked layer by
layer, and its own parameters become views of the stacks: no weight is in memory twice but, for a moment, one layer's.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dgraph.ops  # noqa: F401  (registers dgraph::route and dgraph::experts)
from dgraph.families import Model
from dgraph.models.checkpoint import (
    WithOwnKeys,
    match_shapes,
    read_config,
    read_folder,
    read_tensors,
    restore_buffers,
    source_of,
)
from dgraph.models.native import config_of, native_spec
from dgraph.models.tiny import FACTS as TINY_FACTS
from dgraph.models.tiny import build_tiny
from dgraph.weights import hollow


@dataclass(frozen=True)
class Routing:
    """How rows are routed; see `dgraph::route`.

    Attributes:
        experts, topk: how many there are, and how many a row goes to.
        score: "sigmoid" or "softmax".
        groups, top_groups: of experts, and how many of them a row may choose from.
        renormalise, scale: whether the weights are divided by their sum, and what they are multiplied by then.
        biased: whether a bias takes part in the choice.
        wide: whether the router's product is in fp32, and not in the dtype of the model.
    """

    experts: int
    topk: int
    score: str
    groups: int = 1
    top_groups: int = 1
    renormalise: bool = True
    scale: float = 1.0
    biased: bool = False
    wide: bool = False


class Router(nn.Module):
    """Rows to experts and weights."""

    expert_bias: Tensor | None

    def __init__(self, hidden: int, routing: Routing):
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.experts, hidden))
        self.register_buffer("expert_bias", torch.zeros(routing.experts) if routing.biased else None)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[n, hidden] -> choice i64[n, topk], weight f32[n, topk]."""
        r = self.routing
        logits = F.linear(rows.float(), self.weight.float()) if r.wide else F.linear(rows, self.weight)
        rules = (r.score, r.groups, r.top_groups, r.topk, r.renormalise, r.scale)
        return torch.ops.dgraph.route(logits, self.expert_bias, *rules)


def identity_of(forward: str) -> str:
    """What a forward with this file's layers depends on besides tensors (`dgraph.frontend.frozen`), beside the rest."""
    sources = b"".join(Path(file).read_bytes() for file in (__file__, inspect.getfile(native_spec)))
    return f"{forward} {hashlib.sha256(sources).hexdigest()}"


class RoutedExperts(nn.Module):
    """The experts of a layer, stacked."""

    def __init__(self, experts: int, hidden: int, intermediate: int):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate))

    def forward(self, rows: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden]: the weighted sum of each row's experts."""
        return torch.ops.dgraph.experts(rows, choice, weight, self.gate_up_proj, self.down_proj)


class MoE(nn.Module):
    """A mixture-of-experts feed-forward: routed experts and, where there is one, an expert for all rows."""

    def __init__(self, hidden: int, intermediate: int, routing: Routing, shared: nn.Module | None = None):
        super().__init__()
        self.gate = Router(hidden, routing)
        self.experts = RoutedExperts(routing.experts, hidden, intermediate)
        self.shared_experts = shared

    def forward(self, x: Tensor) -> Tensor:
        """[b, t, hidden] -> [b, t, hidden]."""
        rows = x.reshape(-1, x.shape[-1])
        routed = self.experts(rows, *self.gate(rows)).view(x.shape)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)


# -- where the tensors of a checkpoint or a model object go --------------------------------------------------------


def parts_of(path: str, experts: int) -> tuple[list[str], list[str]]:
    """Names of a layer's tensors in the order in which they are stacked: those of gate and up, and those of down."""
    both = [f"{path}.{e}.{kind}_proj.weight" for e in range(experts) for kind in ("gate", "up")]
    return both, [f"{path}.{e}.down_proj.weight" for e in range(experts)]


def stacks(model: nn.Module, names: Mapping[str, Any]) -> dict[str, list[str]]:
    """The name of each stack of a model -> the names of its parts; empty if `names` has the stacks themselves."""
    found: dict[str, list[str]] = {}
    for path, module in model.named_modules():
        if isinstance(module, RoutedExperts) and f"{path}.gate_up_proj" not in names:
            both, down = parts_of(path, module.down_proj.shape[0])
            found |= {f"{path}.gate_up_proj": both, f"{path}.down_proj": down}
    return found


def check_names(model: nn.Module, tensors: Mapping[str, Tensor], what: str, advice: str) -> None:
    """Raise CheckpointError, in the words of `match_shapes`, if the tensors are not those of the model."""
    state = model.state_dict()
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    for name, parts in stacks(model, tensors).items():
        experts, rows, width = shapes.pop(name)
        shapes |= dict.fromkeys(parts, (experts * rows // len(parts), width))
    tied = {"lm_head.weight"} if cast(Any, model).config.tie_word_embeddings else set()
    match_shapes(shapes, tied, tensors, str, what, advice)


@torch.no_grad()
def fill(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy tensors into a model, taking each from the dict as it is copied."""
    stacked = stacks(model, tensors)
    for name, place in model.state_dict().items():
        parts = stacked.get(name, [name])
        pieces = place.flatten(0, 1).tensor_split(len(parts)) if name in stacked else (place,)
        for part, piece in zip(parts, pieces, strict=True):
            if part in tensors:  # what is tied to another may be missing
                piece.copy_(tensors.pop(part))


def open_parts(
    model: Any, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> dict[str, list[Tensor]]:
    """Let a model on the meta device have hollow tensors, and say which stored ones each stands for. Buffers are fp32,
    see `materialise`.
    """
    stacked, places = stacks(model, tensors), model.state_dict()
    stored = {name: [tensors[part] for part in stacked.get(name, [name]) if part in tensors] for name in places}
    parameters = dict(model.named_parameters())
    state = {
        name: hollow(value.shape, dtype if name in parameters else torch.float32, device)
        for name, value in places.items()
    }
    model.load_state_dict(state, assign=True, strict=False)
    restore_buffers(model, model.config, device)
    for module in model.modules():
        if isinstance(module, Router) and module.expert_bias is not None:
            module.expert_bias = torch.zeros_like(module.expert_bias, memory_format=torch.contiguous_format)
    return {name: blocks for name, blocks in stored.items() if blocks}


def share(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Let a model on the meta device hold the tensors of another; experts are stacked, and become views."""
    stacked = stacks(model, tensors)
    trained = {name: tensor.requires_grad for name, tensor in tensors.items()}
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    state = {name: tensor for name, tensor in tensors.items() if name in shapes}
    for name, parts in stacked.items():
        state[name] = nn.Parameter(stack([tensors[part] for part in parts]).view(shapes[name]), requires_grad=False)
    model.load_state_dict(state, assign=True, strict=False)
    for name, tensor in tensors.items():  # a parameter that is assigned asks for gradients
        tensor.requires_grad_(trained[name])


@torch.no_grad()
def stack(parts: Sequence[Tensor]) -> Tensor:
    """The parts as one tensor along dimension 0, of which they become views, unless they already lie so."""
    head, offset, adjacent = parts[0], parts[0].storage_offset(), True
    for part in parts:
        adjacent &= part.is_contiguous() and part.storage_offset() == offset
        adjacent &= part.untyped_storage().data_ptr() == head.untyped_storage().data_ptr()
        offset += part.numel()
    sizes = [part.shape[0] for part in parts]
    if adjacent:
        return head.detach().as_strided((sum(sizes), *head.shape[1:]), head.stride(), head.storage_offset())
    whole = torch.cat([part.detach() for part in parts])
    for part, piece in zip(parts, whole.split(sizes), strict=True):
        part.data = piece
    return whole


# -- families ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MoEFamily:
    """One family of mixtures of experts.

    Attributes:
        name, summary: of the family.
        classes: how config.json's `architectures` and model objects may name its class.
        facts: fields of `ModelSpec` of the published checkpoints; see `RemoteCodeFamily`.
        build: a model on the meta device from its config's keys and what they were read from; it has the attribute
            `config`. Raises CheckpointError for a config that describes none.
        translate: its config (and its folder's path, "" for a model object) with what the name says.
        wrap: a built model as a module that can be captured.
        prefix: where `wrap` keeps the model, before every weight's name.
        tiny: keys of the config in which a tiny model of the family differs from others'.
    """

    name: str
    summary: str
    classes: tuple[str, ...]
    facts: Mapping[str, Any]
    build: Callable[[Mapping[str, Any], str], Any]
    translate: Callable[[dict[str, Any], str], dict[str, Any]] = lambda config, folder: config
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module
    prefix: str = ""
    tiny: Mapping[str, Any] = field(default_factory=dict)

    def adopt(self, model: Any, **facts: Any) -> Model | None:
        """See `Family.adopt`."""
        kind = type(model).__name__
        if kind not in self.classes or not isinstance(model, nn.Module):
            return None
        config = self.translate(config_of(model), "")
        built = self.build(config, f"this {kind}'s config")
        tensors = model.state_dict(keep_vars=True)
        advice = "Its config and its parameters do not belong together."
        check_names(built, tensors, f"this {kind} does not fit {self.name}", advice)
        share(built, tensors)
        built.tie_weights()
        first = next(model.parameters())
        restore_buffers(built, built.config, first.device)
        return self.model(self.name, built, config, first.dtype, **facts)

    def random(self, seed: int = 0) -> Model:
        """See `Family.random`."""
        built = build_tiny(self.build, self.tiny, seed)
        return self.model(f"tiny random {self.name}", built, {}, torch.float32, **TINY_FACTS)

    def load(self, folder: Path, dtype: torch.dtype | None, device: torch.device, **facts: Any) -> Model | None:
        """See `Family.load`."""
        return self._load(folder, dtype, device, facts, opened=False)

    def open(self, folder: Path, dtype: torch.dtype | None, device: torch.device, **facts: Any) -> Model | None:
        """See `Family`."""
        return self._load(folder, dtype, device, facts, opened=True)

    def _load(
        self, folder: Path, dtype: torch.dtype | None, device: torch.device, facts: Mapping[str, Any], opened: bool
    ) -> Model | None:
        if not set(self.classes) & set(read_config(folder).get("architectures") or []):
            return None
        config, tokenizer = read_folder(folder)
        config = self.translate(config, str(folder))
        built = self.build(config, f"{folder}/config.json")
        tensors = read_tensors(folder)
        belong = "Its config.json and its shards do not belong together; fetch or export the checkpoint again."
        check_names(built, tensors, f"checkpoint {folder}", belong)
        dtype = dtype or next(t.dtype for name, t in tensors.items() if name.endswith("weight"))
        if opened:
            stored = open_parts(built, tensors, dtype, device)
        else:
            built = materialise(built, device, dtype)
            fill(built, tensors)
        built.tie_weights()
        source = source_of(built, stored) if opened else None
        return replace(self.model(folder.name, built, config, dtype, **facts), tokenizer=tokenizer, weights=source)

    def model(self, name: str, built: Any, config: Mapping[str, Any], dtype: torch.dtype, **facts: Any) -> Model:
        """A built and filled model with its facts."""
        spec = native_spec(WithOwnKeys(built.config, config), self.name, dtype, self.facts, **facts)
        return Model(name, self.wrap(built.eval()), spec, None, self.prefix)


def materialise(model: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A model from the meta device with parameters that are not set yet, and with its buffers.

    Buffers stay fp32: what biases a choice, and the frequencies of a rotation, need all of their bits.
    """
    model.to(dtype).to_empty(device=device)
    for module in model.modules():
        for name, _ in list(module.named_buffers(recurse=False)):
            if isinstance(module, Router):
                module.expert_bias = torch.zeros(module.routing.experts, device=device)
            else:
                setattr(module, name, torch.empty(0, device="meta"))
    restore_buffers(model, model.config, device)
    return model
