"""Autoregressive classes of transformers as they are: they judge the responses of diffusion models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dgraph.errors import CheckpointError
from dgraph.families.causal import Causal
from dgraph.families.hub import folder_of_id, is_id
from dgraph.models.objects import read_config
from dgraph.models.tokenizer import FileTokenizer, read_tokenizer


class Logits(nn.Module):
    """A causal class of transformers as `forward(input_ids i64[b, t]) -> logits [b, t, vocab]`."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model.eval().requires_grad_(False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False, return_dict=True).logits


def causal(name: str, model: Any, tokenizer: FileTokenizer, files: list[Path]) -> Causal:
    """A causal class of transformers, with its tokenizer and the files that it was read from."""
    config = model.config
    return Causal(
        name, Logits(model), tokenizer, config.vocab_size, config.max_position_embeddings, model.dtype, tuple(files)
    )


def checkpoint(name: str, dtype: torch.dtype | None, device: torch.device) -> Causal | None:
    """A folder of any causal class that transformers has, or the id of one; see `dgraph.families.causal.Loader`.

    Code that comes with a checkpoint is not run.

    Raises:
        CheckpointError: transformers cannot read it, tensors are missing, or it has no tokenizer.
    """
    folder = folder_of_id(name) if is_id(name) else Path(name).absolute()
    if not (folder / "config.json").is_file():
        return None
    read_config(folder)
    tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        raise CheckpointError(f"{folder} has no tokenizer.json, so it cannot read a response; add one.")
    import transformers

    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype or "auto", local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{folder} is no autoregressive model that transformers reads: {reason}") from error
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise CheckpointError(f"{folder} lacks {len(missing)} tensors, as {', '.join(missing[:3])}; fetch it again.")
    files = [folder / "config.json", *sorted(p for p in folder.iterdir() if p.suffix in {".safetensors", ".bin"})]
    return causal(folder.name, model.to(device), tokenizer, files)
