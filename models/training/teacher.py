"""What the base would have written, as a target: its distribution of each token beside the token that it drew.

A response of a dialogue that the base wrote is a draw of its distributions given all before, which are known, so that
learning these instead leaves the expectation of the loss as it is and takes the noise of the draw out of it (knowledge
distillation, arXiv 1503.02531). Exactly so where nothing to the right of the token is seen; elsewhere the token says
more than the distribution does, so that a mixture of both is learnt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .adopted import Adopted
from .data import RESPONSE
from .model import Mask
from .objective import Inputs, next_token


@dataclass(frozen=True, eq=False)
class Teacher:
    """An autoregressive model whose distributions are learnt.

    Attributes:
        model: its weights stay as they are.
        share: of the loss that is by its distributions; the rest is by the tokens.
        temperature: of its distributions: the one at which the responses were drawn.
        tasks: numbers of the files that it teaches, those that it wrote itself.
    """

    model: Adopted
    share: float
    temperature: float
    tasks: frozenset[int]

    @torch.no_grad()
    def hidden(self, inputs: Inputs, mask: Callable[[Inputs], Mask]) -> Tensor:
        """Of each target its final hidden state after all before that token of the clean batch, [R, P, hidden]."""
        clean = next_token(inputs.clean)
        hidden = self.model.hidden(clean.input_ids, clean.positions, mask(clean))
        before = (inputs.origin - 1).clamp_min(0)
        return hidden.gather(1, before[:, :, None].expand(-1, -1, hidden.shape[-1]))

    def shares(self, inputs: Inputs) -> Tensor:
        """f32 [R, P]: of each target, how much of its loss is by the distribution: none of it where the base did not
        write it, as the stop tokens that fill up a block.
        """
        wrote = inputs.clean.kinds.gather(1, inputs.origin) == RESPONSE
        taught = torch.zeros_like(wrote)
        for task in self.tasks:
            taught |= inputs.tasks == task
        return self.share * (wrote & taught & (inputs.origin > 0))


def taught_losses(
    hidden: Tensor, weight: Tensor, targets: Tensor, taught: Tensor, head: Tensor, shares: Tensor, temperature: float
) -> Tensor:
    """Cross entropy f32 [N] of rows hidden [N, d] under the output weight [V, d], mixed of that of the targets and that
    of a teacher's distributions.

    Args:
        targets: i64 [N].
        taught, head: the teacher's rows [N, d'] and output weight [V, d'].
        shares: f32 [N], of the distribution.
        temperature: of the teacher's.
    """
    log_probabilities = F.linear(hidden, weight).float().log_softmax(-1)
    soft = (F.linear(taught, head).float() / temperature).softmax(-1)
    by_token = -log_probabilities.gather(1, targets[:, None])[:, 0]
    by_teacher = -(soft * log_probabilities).sum(-1)
    return torch.lerp(by_token, by_teacher, shares)
