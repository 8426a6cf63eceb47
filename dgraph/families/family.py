"""Model families: found through the entry-point group `dgraph.models`, never imported by name.

An entry point is a `Family` or an `Embedded` model. A family adopts model objects and loads checkpoint folders. An
embedded model is a name for a folder that is installed with its package. Another project adds a family by declaring an
entry point of that group.

A new family takes one file. If a class of transformers computes the same function as the model, the file states the
differences. From then on checkpoint folders load and model objects are adopted:

    from dgraph.models.remote_code import RemoteCodeFamily, require

    FACTS = {"mask_id": 5, "eos_ids": (2,), "pad_id": 0, "block_length": 32,
             "attention": "bidirectional", "logit_shift": 0}  # hold where the folder is silent; None: ask

    def translate(config, folder):                            # config.json in the native config's keys
        require(config, "norm", ("rms",), "LlamaForCausalLM") # or refused, by the key's name
        return {**config, "hidden_size": config["width"], "num_hidden_layers": config["depth"]}

    def stored(name):                                         # a parameter's name in the checkpoint
        return name.replace("model.layers.", "net.").replace("self_attn.", "attention.")

    family = RemoteCodeFamily("mine", "one line for `dgraph models`", "MineForDiffusion", "LlamaForCausalLM",
                              FACTS, translate, stored)

and in the package's pyproject.toml: `[project.entry-points."dgraph.models"]`, `mine = "package.mine:family"`.
For a model that no class of transformers computes, write the two methods of `Family` instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from dgraph.errors import PluginError, warn
from dgraph.families.adapters import Adapter
from dgraph.families.weights import WeightSource
from dgraph.plugins import entry_points, refusal
from dgraph.plugins import load as load_entry
from dgraph.settings import dtype_name
from dgraph.spec import ModelSpec
from dgraph.types.card import Card, Described, counted
from dgraph.types.texts import check_text as check_text

GROUP = "dgraph.models"
DIFFERENCE = "difference.safetensors"
"""File of a checkpoint folder with weights as a difference from an autoregressive model.

That model's tokenizer is the folder's, too, unless the folder has its own.
"""


class Tokenizer(Protocol):
    """Text to ids and back, in the model's chat form."""

    def encode(self, prompt: str) -> list[int]:
        """Ids of a user's prompt, framed as the model was trained to read it; empty only for an empty prompt."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of response ids, special tokens left out."""
        ...


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer for a server, whose clients have conversations and texts without a frame.

    It may also have `bytes_of(token) -> bytes | None`, the bytes in UTF-8 that an id stands for, from which clients
    read parts of characters. Further `longest_token_bytes`, the most bytes of a text that one id stands for, None for
    no bound; `prepare()`, which a server calls before it has clients; and `encode_part(text)`, see `encode_part`. Its
    `encode_chat` may take more by name, such as tools; see `dgraph.models.tokenizer.FileTokenizer`.
    """

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of messages {"role", "content"}, up to where the assistant's next turn begins.

        A message that contains the text of a special token is encoded as text. Raises `InputError` for a conversation
        that has no form.
        """
        ...

    def encode_text(self, text: str) -> list[int]:
        """Ids of a text as it is, after the ids that begin every text; a special token's text is encoded as text."""
        ...


def encode_part(tokenizer: ChatTokenizer, text: str) -> list[int]:
    """Ids of a text that follows other ids: without the ids that begin every text, if the tokenizer separates them."""
    return list(getattr(tokenizer, "encode_part", tokenizer.encode_text)(text))


@dataclass(frozen=True, eq=False, repr=False)
class Model(Described):
    """A model that can be captured.

    Attributes:
        name: for messages and dumps.
        module: `forward(input_ids i64[b, t], position_ids i64[b, t]) -> logits [b, t, vocab]`.
        spec: its facts.
        tokenizer: None for a model that was given as an object.
        prefix: dotted path before the weights' names within `module`.
        hints: roles of weights in tensor parallelism that their layers do not declare, by a pattern of the name in the
            graph; see `dgraph.passes.ShardTensorParallel`.
        weights: source of parameters of `module` that only stand for stored ones: all of them, see `Family.open`; or
            those that a checkpoint stores quantised, which a captured graph reads as they are.
        adapter: by which it drafts, see `ModelSpec.adapter`; None: by its own weights.
        stored_dtype: of the weights in the checkpoint that it was loaded from; None where no checkpoint says.
        source: what it was loaded from: the name of an embedded model, an id, or an absolute folder; "" for an object.
    """

    name: str
    module: nn.Module
    spec: ModelSpec
    tokenizer: Tokenizer | None = None
    prefix: str = ""
    hints: Mapping[str, str] = field(default_factory=dict)
    weights: WeightSource | None = None
    adapter: Adapter | None = None
    stored_dtype: torch.dtype | None = None
    source: str = ""

    def card(self) -> Card:
        """See `Described`."""
        spec, weight = self.spec, next(self.module.parameters(), None)
        facts = (
            ("weights", self.weights_text),
            ("device", "" if weight is None else str(weight.device)),
            ("blocks", f"{spec.block_length} tokens, {spec.attention}"),
            ("positions", f"{spec.max_positions:,}"),
            ("tokenizer", "none: give tokenizer=" if self.tokenizer is None else type(self.tokenizer).__name__),
            ("use", "dgraph.optimize(model, recipe), dgraph.capture(model)"),
        )
        return Card(f"Model {self.name}: {spec.family}, {counted(spec.layers, 'layer')} of {spec.hidden}", facts)

    @property
    def weights_text(self) -> str:
        """The dtype of its weights, and that of the checkpoint where it is another one; for display."""
        here, there = dtype_name(self.spec.dtype), dtype_name(self.stored_dtype)
        same = self.stored_dtype in (None, self.spec.dtype)
        return here if same else f"{here} (the checkpoint has {there}; dtype='auto' keeps that)"


class Family(Protocol):
    """A family of models: how it is adopted and opened.

    A family may also have `read_tokenizer(given: object) -> Tokenizer | None`: the tokenizer that a folder (a `Path`)
    or an object of another library is; None where it knows neither. See `tokenizer_of`.

    It may also have `architectures: tuple[str, ...]`, the classes that config.json names of what it opens: messages
    list them.

    It may also have `stored(name) -> str`, the checkpoint's own name of a weight that has this one in a graph; without
    it both are the same. And `read_products(folder, weights) -> dict[str, LowRank]`, which reads the folder of a
    low-rank adapter of any family; see `dgraph.families.adapters`.

    It may also have `alike: str`, the name of a family whose graphs its own are, up to facts that decode loops read:
    `dgraph.testing.models` leaves it out by default, since what is checked on one is checked on both.
    """

    name: str
    summary: str

    def adopt(self, model: Any, **facts: Any) -> Model | None:
        """A model object of this family, sharing its tensors; None if it is of another family.

        `facts` override fields of the spec (mask_id, block_length, ...).
        """
        ...

    def open(self, folder: Path, dtype: torch.dtype | None, device: torch.device, **facts: Any) -> Model | None:
        """A checkpoint folder (an absolute path) of this family; None if its config names another family.

        Its parameters are `dgraph.families.weights.hollow`, of this dtype (None: that of the checkpoint) and on this
        device. They stand for the weights in `Model.weights`: a caller that loads the model reads all of them, a rank
        its parts. A family may also give parameters that are read already, and no `Model.weights`. `facts` are as in
        `adopt`.
        """
        ...

    def random(self, seed: int = 0) -> Model:
        """A model of this family with few random weights, in fp32 on the CPU, whose decoding is not trivial: what
        `dgraph.testing` checks methods on."""
        ...


class Exam(Protocol):
    """Tasks with one right answer that an embedded model was trained on, and prompts of them that it never saw.

    Attributes:
        names: the tasks.
        hard: further tasks, by names of their own: harder than those of the training, so that methods can be told
            apart.
        new_tokens: length of a response that every answer fits into.
    """

    @property
    def names(self) -> tuple[str, ...]: ...

    @property
    def hard(self) -> tuple[str, ...]: ...

    @property
    def new_tokens(self) -> int: ...

    def draw(self, task: str, count: int, seed: int) -> list[tuple[str, str]]:
        """Distinct held-out prompts and their answers, the same for the same seed.

        Raises:
            ValueError: an unknown task, or one that has fewer held-out prompts.
        """
        ...


@dataclass(frozen=True)
class Embedded:
    """A trained model that is installed with a package.

    Attributes:
        name: the name by which it is loaded.
        folder: its checkpoint, with stored held-out prompts in held_out.jsonl.
        summary: one line for `dgraph models`.
        exam: the tasks that it can solve; None for a model without tasks.
    """

    name: str
    folder: Path
    summary: str
    exam: Exam | None = None


def _entries() -> dict[str, Family | Embedded]:
    """Usable entries of the group by name; warns of each entry that cannot be used."""
    found: dict[str, Family | Embedded] = {}
    for name in entry_points(GROUP):
        try:
            entry = load_entry(GROUP, name)
            if isinstance(entry, type) or not (isinstance(entry, Embedded) or _is_family(entry)):
                raise refusal(GROUP, name, f"is no Family and no Embedded (an object, not a class), got {entry!r}")
        except PluginError as error:
            warn(str(error))
        else:
            found[name] = entry
    return found


def _is_family(entry: Any) -> bool:
    named = all(isinstance(getattr(entry, name, None), str) for name in ("name", "summary"))
    return named and all(callable(getattr(entry, name, None)) for name in ("adopt", "open"))


def families() -> dict[str, Family]:
    """Every family by name."""
    return {name: e for name, e in _entries().items() if not isinstance(e, Embedded)}


def embedded() -> dict[str, Embedded]:
    """Every embedded model by name."""
    return {name: e for name, e in _entries().items() if isinstance(e, Embedded)}
