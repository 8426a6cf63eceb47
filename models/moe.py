"""Mixtures of experts: the layer, and families whose checkpoints keep each expert's matrices apart.

The layer holds its experts stacked, [experts, ...], so that `dgraph::experts` can multiply all of them in one call. A
checkpoint's tensors are read one by one to their places in the stacks. A model object's experts are stacked layer by
layer, and its own parameters become views of the stacks. No weight is in memory twice but, for a moment, one layer's.
The norm is that of families with a module of their own.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dgraph.ops  # noqa: F401  (registers dgraph::route and dgraph::experts)
from dgraph.families import Model
from dgraph.models.checkpoint import WithOwnKeys, open_weights, read_folder, restore_buffers
from dgraph.models.matching import as_named, match
from dgraph.models.native import config_of, native_spec
from dgraph.models.objects import architectures_of, describing, source_of
from dgraph.models.tiny import FACTS as TINY_FACTS
from dgraph.models.tiny import build_tiny


@dataclass(frozen=True)
class Routing:
    """Routing of rows to experts; see `dgraph::route`.

    Attributes:
        experts, topk: number of experts, and number of them that a row goes to.
        score: "sigmoid" or "softmax".
        groups, top_groups: number of groups of experts, and number of them that a row may choose from.
        renormalise, scale: True divides the weights by their sum; then they are multiplied by the scale.
        biased: True if a bias takes part in the choice.
        wide: True if the router's product is in fp32, and not in the dtype of the model.
        capacity: experts that the rows of a block share, of which each row chooses; 0 for any. See
            `dgraph::block_experts`.
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
    capacity: int = 0


class Router(nn.Module):
    """The router: rows to experts and weights."""

    expert_bias: Tensor | None

    def __init__(self, hidden: int, routing: Routing):
        super().__init__()
        self.routing = routing
        self.weight = nn.Parameter(torch.empty(routing.experts, hidden))
        self.register_buffer("expert_bias", torch.zeros(routing.experts) if routing.biased else None)

    def forward(self, rows: Tensor, blocks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[n, hidden], with a capacity i64[n] -> choice i64[n, topk], weight f32[n, topk]."""
        r = self.routing
        logits = F.linear(rows.float(), self.weight.float()) if r.wide else F.linear(rows, self.weight)
        rules = (r.score, r.groups, r.top_groups, r.topk, r.renormalise, r.scale)
        if not r.capacity:
            return torch.ops.dgraph.route(logits, self.expert_bias, *rules)
        allowed = torch.ops.dgraph.block_experts(logits, self.expert_bias, blocks, r.capacity)
        return torch.ops.dgraph.route(logits, self.expert_bias, *rules, allowed)


def identity_of(forward: str) -> str:
    """Identity of a forward with this file's layers: its own, and a hash of sources (`dgraph.frontend.frozen`)."""
    sources = b"".join(Path(file).read_bytes() for file in (__file__, inspect.getfile(native_spec)))
    return f"{forward} {hashlib.sha256(sources).hexdigest()}"


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension, in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.dgraph.rms_norm(x, self.weight, self.eps)


class RoutedExperts(nn.Module):
    """The experts of a layer, stacked."""

    def __init__(self, experts: int, hidden: int, intermediate: int, activation: str = "silu"):
        super().__init__()
        self.activation = () if activation == "silu" else (activation,)
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate))

    def forward(self, rows: Tensor, choice: Tensor, weight: Tensor) -> Tensor:
        """[n, hidden] -> [n, hidden]: the weighted sum of each row's experts."""
        return torch.ops.dgraph.experts(rows, choice, weight, self.gate_up_proj, self.down_proj, *self.activation)


class MoE(nn.Module):
    """A mixture-of-experts feed-forward: routed experts and, where there is one, an expert for all rows."""

    def __init__(self, hidden: int, intermediate: int, routing: Routing, shared: nn.Module | None = None):
        super().__init__()
        self.gate = Router(hidden, routing)
        self.experts = RoutedExperts(routing.experts, hidden, intermediate)
        self.shared_experts = shared

    def forward(self, x: Tensor, blocks: Tensor | None = None) -> Tensor:
        """[b, t, hidden] -> [b, t, hidden]; blocks i64[b, t]: numbers of the rows' blocks, see `Routing.capacity`."""
        rows = x.reshape(-1, x.shape[-1])
        routed = self.experts(rows, *self.gate(rows, None if blocks is None else blocks.reshape(-1))).view(x.shape)
        return routed if self.shared_experts is None else routed + self.shared_experts(x)


# -- where the tensors of a checkpoint or a model object go --------------------------------------------------------


def parts_of(path: str, experts: int) -> tuple[list[str], list[str]]:
    """Names of a layer's tensors in the order in which they are stacked: those of gate and up, and those of down."""
    both = [f"{path}.{e}.{kind}_proj.weight" for e in range(experts) for kind in ("gate", "up")]
    return both, [f"{path}.{e}.down_proj.weight" for e in range(experts)]


def layout(model: nn.Module, there: Container[str]) -> dict[str, list[str]]:
    """The names of a model's tensors, see `dgraph.models.matching.Layout`: those of experts apart, or stacked."""
    found = as_named(model, there)
    for path, module in model.named_modules():
        if isinstance(module, RoutedExperts) and f"{path}.gate_up_proj" not in there:
            both, down = parts_of(path, module.down_proj.shape[0])
            found |= {f"{path}.gate_up_proj": both, f"{path}.down_proj": down}
    return found


def share(model: nn.Module, tensors: Mapping[str, Tensor], names: Mapping[str, Sequence[str]]) -> None:
    """Let a model on the meta device hold the tensors of another, by the names that `match` found.

    Experts are stacked, and become views.
    """
    trained = {name: tensor.requires_grad for name, tensor in tensors.items()}
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    state = {}
    for name, parts in names.items():
        if len(parts) == 1:
            state[name] = tensors[parts[0]]
        else:
            stacked = stack([tensors[part] for part in parts]).view(shapes[name])
            state[name] = nn.Parameter(stacked, requires_grad=False)
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
        classes: names of its class in config.json's `architectures` and in model objects.
        facts: fields of `ModelSpec` of the published checkpoints; see `RemoteCodeFamily`.
        build: a model on the meta device from its config's keys and what they were read from; it has the attribute
            `config`. Raises CheckpointError for a config that describes none.
        translate: its config (and its folder's path, "" for a model object) with what the name says.
        wrap: a built model as a module that can be captured.
        prefix: path at which `wrap` keeps the model, before every weight's name.
        tiny: keys of the config in which a tiny model of the family differs from others'.
        hints: see `dgraph.families.Model`.
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
    hints: Mapping[str, str] = field(default_factory=dict)

    @property
    def architectures(self) -> tuple[str, ...]:
        """See `Family.architectures`."""
        return self.classes

    def adopt(self, model: Any, **facts: Any) -> Model | None:
        """See `Family.adopt`."""
        kind = type(model).__name__
        if kind not in self.classes or not isinstance(model, nn.Module):
            return None
        with describing(f"this {kind}'s config", kind):
            config = self.translate(config_of(model), "")
            built = self.build(config, f"this {kind}'s config")
        tensors = model.state_dict(keep_vars=True)
        advice = "Its config and its parameters do not belong together."
        names = match(built, layout(built, tensors), tensors, f"this {kind} does not fit {self.name}", advice)
        share(built, tensors, names)
        built.tie_weights()
        first = next(model.parameters())
        restore_buffers(built, built.config, first.device)
        return self.model(self.name, built, config, first.dtype, **facts)

    def random(self, seed: int = 0) -> Model:
        """See `Family.random`."""
        built = build_tiny(self.build, self.tiny, seed)
        return self.model(f"tiny random {self.name}", built, {}, torch.float32, **TINY_FACTS)

    def open(self, folder: Path, dtype: torch.dtype | None, device: torch.device, **facts: Any) -> Model | None:
        """See `Family.open`."""
        if not set(self.architectures) & set(architectures_of(folder)):
            return None
        found = read_folder(folder)
        with describing(source_of(folder), self.classes[0]):
            config = self.translate(found.config, str(folder))
            built = self.build(config, source_of(folder))
        weights, dtype = open_weights(built, folder, found.base, dtype, device, layout)
        model = self.model(folder.name, built, config, dtype, **facts)
        return replace(model, tokenizer=found.tokenizer, weights=weights)

    def model(self, name: str, built: Any, config: Mapping[str, Any], dtype: torch.dtype, **facts: Any) -> Model:
        """A built and filled model with its facts."""
        spec = native_spec(WithOwnKeys(built.config, config), self.name, dtype, self.facts, **facts)
        return Model(name, self.wrap(built.eval()), spec, None, self.prefix, self.hints)
