"""Training few numbers of a large model: weights stay as they are, each with a small part beside it.

The parts are parametrizations of torch, so the class and its forward stay. Training changes exactly the weights that
`weights` gives. A model whose parts are new computes what it did without them, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize


class LowRank(nn.Module):
    """A weight plus a product of two small ones, which is zero at first (LoRA, arXiv 2106.09685).

    weight: [out, in]; rank: columns of the one and rows of the other factor.
    """

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        out, into = weight.shape
        drawn = torch.randn(rank, into, generator=generator).to(weight) * into**-0.5
        self.down = nn.Parameter(drawn)
        self.up = nn.Parameter(weight.new_zeros(out, rank))

    @torch.no_grad()
    def take_over(self, weight: Tensor, left: Tensor, right: Tensor) -> None:
        """Let the product begin as the strongest components of `left` [out, r] @ `right` [r, in], which `weight` has in
        it and gives up; what the rank has no room for stays there. Rows of `down` have the length of drawn ones.
        """
        count = min(len(self.down), len(right))
        left, right = left[:, :count].to(weight), right[:count].to(weight)
        length = right.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
        self.down[:count] = right / length[:, None]
        self.up[:, :count] = left * length
        weight -= self.up @ self.down

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):  # the sum is what a checkpoint gets
            return weight + self.up @ self.down


class OneRow(nn.Module):
    """A weight of which one row is trained: the embedding of a mask token that no text has."""

    def __init__(self, weight: Tensor, row: int) -> None:
        super().__init__()
        self.row = nn.Parameter(weight[row].clone())
        self.at: Tensor
        self.register_buffer("at", torch.tensor([row], device=weight.device), persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        return weight.index_copy(0, self.at, self.row[None])


def add_low_rank(
    model: Any,
    rank: int,
    mask_id: int,
    generator: torch.Generator,
    factors: Mapping[str, tuple[Tensor, Tensor]] = MappingProxyType({}),
) -> None:
    """Train only parts of `model`, a causal class of transformers: a product of `rank` beside the weight of each linear
    map of the layers, all vectors (norms, biases), and the embedding of the mask.

    factors: by name, products that a weight has in it already, and that its own begins as. Without them the sum of old
        and new products would have twice the rank.
    """
    vectors = [p for p in model.parameters() if p.dim() == 1]
    model.requires_grad_(False)
    for vector in vectors:
        vector.requires_grad_(True)
    inside = model.model.layers.named_modules(prefix="model.layers")
    linears = {name: module for name, module in inside if isinstance(module, nn.Linear)}
    for name, module in linears.items():
        part = LowRank(module.weight, rank, generator)
        if f"{name}.weight" in factors:
            part.take_over(module.weight, *factors[f"{name}.weight"])
        parametrize.register_parametrization(module, "weight", part)
    of_one_class(list(linears.values()))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    row = OneRow(embedding.weight.detach(), mask_id)
    for module in (embedding, head) if tied else (embedding,):
        parametrize.register_parametrization(module, "weight", row)


def of_one_class(modules: list[nn.Linear]) -> None:
    """Give modules with a parametrized weight the class of the first.

    Torch makes a class for each, all alike. Layers whose modules are of other classes are not taken for the same code.
    So each would be compiled by itself, and after the eighth no other is compiled.
    """
    for module in modules[1:]:
        module.__class__ = modules[0].__class__


@torch.no_grad()
def weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter of a model by the name that its class gives it, parts added."""
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        if "parametrizations" in path.split("."):
            continue
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if parametrize.is_parametrized(module):
            own += list(module.parametrizations)  # type: ignore[arg-type]
        found |= {f"{path}.{name}": getattr(module, name).detach() for name in own}
    return found
