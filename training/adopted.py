"""A causal class of transformers as the trainer sees a model: the attention mask comes from outside."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from .model import Mask


class Adopted(nn.Module):
    """A causal class of transformers (Llama, Qwen2, Qwen3 and others that take a mask of four dimensions).

    Its own causal mask is replaced by the caller's: that is all that makes it a diffusion model. Its parameters are
    trained in place; the class, its config and the names of its parameters stay.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def lm_head(self) -> nn.Linear:
        """The output weights; with tied embeddings these, too."""
        return self.model.get_output_embeddings()

    def hidden(self, input_ids: Tensor, positions: Tensor, mask: Mask) -> Tensor:
        """Final normed hidden states [R, T, hidden] of input_ids and positions, both i64 [R, T]."""
        kernel = "flex_attention" if isinstance(mask, BlockMask) else "sdpa"
        if self.model.config._attn_implementation != kernel:
            self.model.set_attn_implementation(kernel)
        result = self.model.model(
            input_ids=input_ids, position_ids=positions, attention_mask=mask, use_cache=False, return_dict=True
        )
        return result.last_hidden_state
