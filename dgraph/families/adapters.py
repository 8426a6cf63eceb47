"""Low-rank adapters: weights that are not the model's, added to those of its linear layers.

A model that verifies what it drafts reads one on the rows of drafts alone. Any other has it added to its weights, once
(`merged`), so that every recipe, every rank and every format of weights sees plain weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from dgraph.families.weights import WeightSource, hollow, weights_of

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, eq=False)
class LowRank:
    """Low-rank addend of one weight: scale * up @ down.

    Attributes:
        down, up: [r, inputs] and [outputs, r].
        scale: a factor.
    """

    down: Tensor
    up: Tensor
    scale: float

    @torch.no_grad()
    def added(self, weight: Tensor) -> Tensor:
        """The weight and the product, summed in at least fp32 and not rounded."""
        dtype = torch.promote_types(weight.dtype, torch.float32)
        return torch.addmm(weight.to(dtype), self.up.to(dtype), self.down.to(dtype), alpha=self.scale)


@dataclass(frozen=True, eq=False)
class Adapter:
    """A low-rank adapter by which a model drafts, and by which it does not verify.

    Attributes:
        name: for messages.
        weights: by the name that each weight has in a graph, what drafts add to it.
    """

    name: str
    weights: Mapping[str, LowRank]


Read = Callable[[Mapping[str, Tensor]], Mapping[str, LowRank]]
"""Reader of products, given the weights [outputs, inputs] that they may be for, by the checkpoint's own names."""


def merged(
    module: Module, prefix: str, source: WeightSource | None, own: Callable[[str], str], read: Read
) -> tuple[Module, WeightSource | None]:
    """A copy of a module with products added to its linear layers; it shares all other tensors, and is left as it is.

    Embeddings, and heads that are one, take none.

    Args:
        module, prefix: see `dgraph.families.Model`.
        source: source of the parameters, if these are not read yet; products are added where weights are read.
        own: the checkpoint's own name of a parameter, by its name in a graph; a source knows names itself.
        read: see `Read`. Products are asked for in fp32.
    """
    parameters = weights_of(module, prefix)
    embeds = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    flat = [name for name, p in parameters.items() if p.dim() == 2 and id(p) not in embeds]
    here = [(n, own(n), parameters[n]) for n in flat] if source is None else source.named()
    linear = {o: (n, w) for n, o, w in here if len(w.shape) == 2 and id(parameters.get(n)) not in embeds}
    there = {o: w.device if isinstance(w, Tensor) else torch.device("cpu") for o, (_, w) in linear.items()}
    products = read({o: hollow(w.shape, torch.float32, there[o]) for o, (_, w) in linear.items()})
    memo = {id(tensor): tensor for tensor in parameters.values()}
    if source is not None:
        return copy.deepcopy(module, memo), source.changed({o: product.added for o, product in products.items()})
    for name, product in products.items():
        weight = parameters[linear[name][0]]
        made_of = product.added(weight.detach()).to(weight.dtype)
        memo[id(weight)] = nn.Parameter(made_of, requires_grad=False)
    return copy.deepcopy(module, memo), None
