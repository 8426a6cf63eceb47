"""Model classes that config.json files name and no family loads: their kinds, and the classes that are loaded."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_AUTOREGRESSIVE = (
    "an autoregressive model, which was not trained to fill masks: dgraph decodes diffusion language models. Load one "
    "that was made of it, if there is one"
)
_ENCODER = "an encoder: it reads texts, and writes none"
_IMAGES = "a model of images and text: dgraph decodes text alone"

_NOT_COMPUTED = {
    "WeDLMForCausalLM": "a WeDLM (arXiv 2512.22737): its masks see what comes before them, in an order that changes in "
    "each step, and dgraph's blocks see all of themselves",
    "PanguEmbeddedForCausalLM": "an openPangu: no public config says how its diffusion checkpoints shift and cache, so "
    "there is nothing to check a family against",
    "IDLMForCausalLM": "an I-DLM (arXiv 2604.11035): its masks see only what comes before them, and dgraph has no "
    "strictly causal blocks",
}
"""Diffusion language models that dgraph does not compute, by their classes, and why."""

# Kinds of models by the end of their class names, in transformers and in remote code; the first match holds.
_KINDS = {
    "VisionModel": "a model of images: dgraph decodes text",
    "VLForConditionalGeneration": _IMAGES,
    "ForImageTextToText": _IMAGES,
    "ForVision2Seq": _IMAGES,
    "ForConditionalGeneration": "a model with an encoder of texts, images or sounds beside what writes: dgraph decodes "
    "models that are one stack",
    "ForImageClassification": "a model of images: dgraph decodes text",
    "CLIPModel": _IMAGES,
    "ViTModel": "a model of images: dgraph decodes text",
    "ForSequenceClassification": "a classifier: it writes no text",
    "ForTokenClassification": "a classifier: it writes no text",
    "ForQuestionAnswering": "a model that marks answers in a text: it writes none",
    "ForMaskedLM": "an encoder that was trained to fill single gaps, not to write answers",
    "ForPreTraining": _ENCODER,
    "BertModel": _ENCODER,
    "ForCausalLM": _AUTOREGRESSIVE,
    "LMHeadModel": _AUTOREGRESSIVE,
}


def unsupported(config: Path, families: Iterable[Any]) -> str:
    """Reason why no family loads a folder, from its config.json (read before, so valid) and the families asked.

    Returns:
        Sentences that name the folder's classes, what they are where that is known, and the classes that are loaded.
    """
    said = json.loads(config.read_text(encoding="utf-8"))
    named = [str(name) for name in said.get("architectures") or []]
    known: dict[str, None] = {}
    for family in families:
        known |= dict.fromkeys(getattr(family, "architectures", (family.name,)))
    if not named:
        kind = f", and says model_type {said['model_type']!r}" if said.get("model_type") else ""
        return f"its config.json names no architectures{kind}; expected one of {', '.join(known)}."
    close = [match for name in named for match in difflib.get_close_matches(name, known, n=1, cutoff=0.7)]
    hint = f" Did you mean {close[0]}?" if close else ""
    reasons = (_NOT_COMPUTED.get(name) or _kind_of(name) for name in named)
    what = next(filter(None, reasons), "")
    it_is = f" {named[0]} is {what}." if what else ""
    return f"architectures in its config.json is {named!r}, not one of {', '.join(known)}.{hint}{it_is}"


def _kind_of(name: str) -> str:
    """The kind of a model by the end of its class's name; "" for one that is not known."""
    return next((kind for ending, kind in _KINDS.items() if name.endswith(ending)), "")
