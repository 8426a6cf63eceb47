"""Facts that dgraph must know about a model beyond its forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from dgraph.errors import InputError

ATTENTION_KINDS = ("block_causal", "bidirectional")
ENCODINGS = ("block", "causal")
NOISES = ("mask", "uniform")
FACTS = (
    "mask_id",
    "eos_ids",
    "pad_id",
    "image_id",
    "block_length",
    "attention",
    "encoding",
    "next_token",
    "noise",
    "logit_shift",
    "max_positions",
    "layer_importance",
    "attention_similarity",
    "adapter",
)
"""Fields of `ModelSpec` that a caller may give: facts that no shape of a weight shows."""


def given_as(name: str, example: object = "") -> str:
    """Syntax by which a caller gives a fact, in Python and on the command line; for messages."""
    return f"{name}={example} (--fact {name}={example} on the command line)"


@dataclass(frozen=True)
class ModelSpec:
    """A diffusion language model as its decode loop sees it.

    Attributes:
        family: name under which the model registered, e.g. "sdar".
        layers, hidden, heads, kv_heads, head_dim, vocab: sizes of the transformer; of most layers, where they
            differ.
        mask_id: id of the mask token; -1 of a model that has none (see noise).
        eos_ids: ids that end a response (may be empty).
        pad_id: id that fills unused positions.
        block_length: rows denoised together, in tokens; the length the model was trained for.
        attention: "block_causal" (a row sees its own block and earlier ones) or "bidirectional".
        logit_shift: 0 if the logits of row i predict position i, 1 if they predict position i + 1 (Dream).
        encoding: the keys that a row sees where keys are written for good, which are those of prompts and of finished
            blocks. "block": its whole block and all before it. "causal": itself and all before it; then a block begins
            after the last known token, and tokens can be decoded one by one.
        next_token: True if the forward that writes the keys of a finished block also predicts the token after it. The
            next block begins with that token. Such a model works in two modes: it denoises a block, then encodes it.
        noise: content of positions that are not decoded: "mask", the mask token, or "uniform", tokens drawn from the
            whole vocabulary. With "uniform" a step draws a block anew, and the block is decoded when it does not change
            any more.
        max_positions: the model's window in tokens, prompt and response together.
        dtype: dtype of the weights.
        layer_importance: per layer, its change of the hidden states (1 - mean cosine; `dgraph calibrate` measures it,
            MaskKV, section 3.3); empty if it was not measured.
        attention_similarity: per layer, the mean cosine of the hidden states before and after its attention (`dgraph
            calibrate`; SqueezeAttention, section 3); empty if it was not measured.
        image_id: id that stands for an image; -1 of a model that has none. No image is read, so prompts and canvases
            that have it are refused.
        adapter: the folder of a low-rank adapter by which the model drafts, and does not verify; in the checkpoint's
            folder or anywhere. Empty: it drafts by its own weights.
        rule: names and values of the decoding rule that came with the checkpoint, as `policy_of` takes them; it
            holds where a caller chooses none. Empty: dgraph's default.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    mask_id: int
    eos_ids: tuple[int, ...]
    pad_id: int
    block_length: int
    attention: str
    logit_shift: int
    max_positions: int
    dtype: torch.dtype
    layer_importance: tuple[float, ...] = ()
    encoding: str = "block"
    next_token: bool = False
    noise: str = "mask"
    adapter: str = ""
    image_id: int = -1
    attention_similarity: tuple[float, ...] = ()
    rule: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "max_positions"):
            if type(size := getattr(self, name)) is not int or size < 1:
                raise InputError(f"{self.family}: {name} must be a whole number, at least 1, got {size!r}.")
        if not isinstance(self.dtype, torch.dtype):
            raise InputError(f"{self.family}: dtype must be a torch.dtype, as torch.float32, got {self.dtype!r}.")
        if not isinstance(self.eos_ids, (tuple, list)):
            raise InputError(f"{self.family}: eos_ids must be a tuple of token ids, got {self.eos_ids!r}.")
        if self.noise not in NOISES:
            raise InputError(f"{self.family}: noise must be one of {NOISES}, got {self.noise!r}.")
        if self.noise == "uniform":
            self._check_uniform()
        elif not isinstance(self.mask_id, int) or not 0 <= self.mask_id < self.vocab:
            raise InputError(
                f"{self.family}: a diffusion model needs a mask token; got mask_id={self.mask_id!r} with a vocabulary "
                f"of {self.vocab}. Set `mask_token_id` in config.json, or give {given_as('mask_id')}."
            )
        if self.attention not in ATTENTION_KINDS:
            raise InputError(f"{self.family}: attention must be one of {ATTENTION_KINDS}, got {self.attention!r}.")
        if self.encoding not in ENCODINGS:
            raise InputError(f"{self.family}: encoding must be one of {ENCODINGS}, got {self.encoding!r}.")
        if self.next_token and self.attention != "block_causal":
            raise InputError(
                f"{self.family}: next_token says what the keys of a finished block come with, but its attention is "
                f"{self.attention}, whose keys are never final; leave it out."
            )
        if self.encoding == "causal" and not self.next_token and self.noise == "mask":
            raise InputError(
                f"{self.family}: a model with encoding='causal' predicts the token after a block where it encodes it; "
                f"give {given_as('next_token', True)}, too."
            )
        if self.adapter and self.encoding != "causal":
            raise InputError(
                f"{self.family}: adapter={self.adapter!r} is for drafts, which a model verifies by rows that see what "
                f"comes before them, but this one encodes each {self.encoding} as a whole; leave it out."
            )
        if self.heads % self.kv_heads:
            raise InputError(f"{self.family}: {self.heads} heads are not a multiple of {self.kv_heads} KV heads.")
        if type(self.block_length) is not int or self.block_length < 1:
            raise InputError(f"{self.family}: block_length must be at least 1, got {self.block_length!r}.")
        if not all(type(token) is int for token in self.eos_ids):
            raise InputError(f"{self.family}: eos_ids must be token ids, got {self.eos_ids!r}.")
        for name in ("layer_importance", "attention_similarity"):
            if (count := len(getattr(self, name))) not in (0, self.layers):
                raise InputError(
                    f"{self.family}: {name} has {count} values for {self.layers} layers; give one for each, or none."
                )
        if not self.dtype.is_floating_point:
            raise InputError(f"{self.family}: weights must be of a floating dtype, got {self.dtype}.")

    def _check_uniform(self) -> None:
        """Refuse facts that contradict noise="uniform": its blocks follow the known tokens, and no position is decided
        twice.
        """
        wanted = {
            "mask_id": -1,
            "attention": "block_causal",
            "encoding": "causal",
            "next_token": False,
            "logit_shift": 0,
        }
        for name, value in wanted.items():
            if getattr(self, name) != value:
                raise InputError(
                    f"{self.family}: a model with noise='uniform' has {name}={value!r}, got {getattr(self, name)!r}."
                )

    @property
    def aligned(self) -> bool:
        """True if blocks begin at multiples of their length; else they begin after the last known token."""
        return self.attention == "block_causal" and self.encoding == "block"

    @property
    def two_modes(self) -> bool:
        """True if it denoises a block, and then encodes it by a forward of another kind.

        That forward is causal, or also predicts the next token. So a step forwards rows of one block of a sequence
        alone.
        """
        return self.encoding == "causal" or self.next_token

    def check_keys(self, recommit: bool, kept: object | None) -> None:
        """Refuse a use of keys that a model cannot serve, since it forwards a finished block again to write them.

        Args:
            recommit: True if all rows of a finished block are forwarded again.
            kept: the plan of the keys that stay; None for all.

        Raises:
            InputError: a finished block is not forwarded, or not all keys stay of a model without a mask token.
        """
        if self.noise == "uniform" and not recommit:
            raise InputError(
                f"{self.family}: a canvas that is done is forwarded again, causally, before anything comes after it, "
                f"and recommit=False leaves that out; use recommit=True."
            )
        if self.noise == "uniform" and kept is not None:
            raise InputError(
                f"{self.family}: {kept} keeps the keys that rows which hold a mask attend to, and no row does; use the "
                f"recipe 'dense'."
            )
        if self.next_token and not recommit:
            raise InputError(
                f"{self.family}: the forward of a finished block predicts the next token, and recommit=False leaves it "
                f"out; use recommit=True."
            )

    def check_masks(self, what: str) -> None:
        """Raise `InputError` for a use of masks on a model that has no mask token."""
        if self.noise == "uniform":
            raise InputError(
                f"{what} forwards mask tokens, but {self.family} has none: nothing stands where it decodes but random "
                f"tokens (noise='uniform')."
            )

    def to_json(self) -> dict[str, Any]:
        """Plain values only, in field order."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        out["eos_ids"] = list(self.eos_ids)
        out["layer_importance"] = list(self.layer_importance)
        out["attention_similarity"] = list(self.attention_similarity)
        out["rule"] = [list(pair) for pair in self.rule]
        out["dtype"] = str(self.dtype).removeprefix("torch.")
        return out

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ModelSpec:
        """The facts that `to_json` described; equal to those that wrote it.

        Raises:
            InputError: a field is missing, unknown or out of range.
        """
        lists: dict[str, Any] = {name: tuple(item) for name, item in value.items() if isinstance(item, list)}
        lists |= {"rule": tuple(map(tuple, value.get("rule", ())))}
        try:
            return cls(**{**value, **lists, "dtype": getattr(torch, str(value.get("dtype")), None)})
        except TypeError as error:
            raise InputError(f"facts of a model: {error}; give what ModelSpec.to_json wrote.") from None
