"""Conversion of a causal model to a diffusion model: objective, length and state of a run.

Every batch and every mask is a function of the seed and the step. So a run that is stopped and continued makes the
weights that it would have made at once, unless its end is one of time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dgraph.errors import InputError
from dgraph.families.causal import load_causal
from dgraph.models import difference
from dgraph.models.native import NATIVE, config_of
from dgraph.models.tokenizer import FileTokenizer
from dgraph.ranks.groups import Alone, Group

from . import low_rank
from .adopted import Adopted
from .checkpoint import write_folder
from .data import BLOCK, RESPONSE, Batch, Document
from .masked_diffusion import masked_diffusion
from .objective import BLOCKWISE_SHARE, Inputs, Noise, block_diffusion, learning_prompts
from .pairs import Pair, Pairs, Passes, chat_document, read_pairs, text_documents
from .trainer import Trainer

FORMS = ("block_causal", "bidirectional")
MORE_BLOCKS = 4
"""Most blocks of stop tokens after a response that a bidirectional model learns from."""
HELD_OUT_ROWS = 8
"""Rows of a held-out batch."""
SMALLEST_BLOCK = 4
"""First length of an annealed block."""


@dataclass(frozen=True)
class Settings:
    """Settings of a run, from its first step to its last.

    Attributes:
        form: "block_causal" (SDAR, arXiv 2510.06303: a block sees itself and the ones before it) or "bidirectional"
            (LLaDA, arXiv 2502.09992: every row sees every row).
        steps: updates in all, over however many sessions.
        allowed: minutes of training in all, after which it ends before its last step; 0 for no such end. The learning
            rate falls by what is closer to its end, so that weights then depend on the device's speed.
        rank: rank of the product beside each weight (see `low_rank`); 0 trains all weights.
        block: tokens of a block of the form "block_causal", which divides 32.
        anneal: share of the steps over which the block length doubles from 4 up to `block`, as the warm-up of LLaDA2.0
            grows it (arXiv 2512.15745); 0 for the same length throughout.
        learn_prompts: prompts are masked and learnt, too (see `learning_prompts`).
        by_rate, complementary, shift, smallest_rate, padding_weight, blockwise, later_weight: see `Noise`.
        rows, length: size of a batch, in rows and tokens; a document that is longer is left out.
        learnt: tokens of a row that are masked in a step of the form "block_causal", clean copies aside.
        rate: peak of the learning rate, reached after 100 steps; it falls to zero at the last.
        decay: weight decay of matrices.
        held_out: documents that are not trained on, at most a tenth.
        seed: seed of data, masks and low-rank factors.
    """

    form: str = "block_causal"
    steps: int = 4000
    allowed: float = 0.0
    rank: int = 0
    block: int = BLOCK
    anneal: float = 0.0
    learn_prompts: bool = False
    by_rate: bool = False
    complementary: bool = False
    shift: int = 0
    smallest_rate: float = 0.05
    padding_weight: float = 0.2
    blockwise: float = BLOCKWISE_SHARE
    later_weight: float = 1.0
    rows: int = 48
    length: int = 1024
    learnt: int = 512
    rate: float = 1e-3
    decay: float = 0.1
    held_out: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        causal = self.form == "block_causal"
        learnt = f"a multiple of {BLOCK} up to length, {self.length}"
        checks = {
            "form": (self.form in FORMS, f"one of {', '.join(FORMS)}"),
            "block": (self.block > 0 and BLOCK % self.block == 0, f"a divisor of {BLOCK}"),
            "anneal": (0 <= self.anneal <= 1 and (causal or not self.anneal), "in [0, 1], and 0 without blocks"),
            "shift": (self.shift in (0, 1), "0 or 1"),
            "blockwise": (0 <= self.blockwise <= 1, "in [0, 1]"),
            "later_weight": (self.later_weight >= 0, "at least 0"),
            "length": (self.length > 0 and self.length % BLOCK == 0, f"a multiple of {BLOCK}"),
            "learnt": (0 < self.learnt <= self.length and self.learnt % BLOCK == 0, learnt),
            "steps": (self.steps > 0, "at least 1"),
            "allowed": (self.allowed >= 0, "at least 0 minutes"),
            "rows": (self.rows > 0, "at least 1"),
            "rank": (self.rank >= 0, "at least 0"),
        }
        for name, (right, expected) in checks.items():
            if not right:
                raise InputError(f"{name} must be {expected}, got {getattr(self, name)!r}.")

    def noise(self, mask_id: int, fraction: float = 1.0) -> Noise:
        """Noise when `fraction` of the run is over."""
        size, grown = self.block, self.anneal
        if grown and fraction < grown and size > SMALLEST_BLOCK:
            doublings = (size // SMALLEST_BLOCK).bit_length() - 1
            size = SMALLEST_BLOCK << int(fraction / grown * doublings)
        others = (field.name for field in fields(Noise) if field.name not in ("mask_id", "block"))
        return Noise(mask_id, size, **{name: getattr(self, name) for name in others})


@dataclass(frozen=True, eq=False)
class Base:
    """A causal model to be converted.

    Attributes:
        name: name that it was loaded by.
        model: a class of transformers, of `dgraph.models.native.NATIVE`.
        tokenizer: with a mask token.
        mask_id, eos_ids: the first of `eos_ids` ends a response.
        factors: the two factors of the difference that was added to a weight, by name; see `low_rank.add_low_rank`.
    """

    name: str
    model: Any
    tokenizer: FileTokenizer
    mask_id: int
    eos_ids: tuple[int, ...]
    factors: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


def load_base(name: str, mask: str | None = None, device: str = "cpu", begin: Path | None = None) -> Base:
    """The model of a folder, or "base" (SmolLM2-135M-Instruct), in fp32.

    Args:
        mask: the mask token as it is written: one that no text has, or a new one if the embedding has a free row; None
            for the tokenizer's own.
        begin: a folder that `training.compress` wrote, whose weights are taken; None for the base's own.

    Raises:
        InputError: a class that cannot be captured, no stop token, or no mask token.
        CheckpointError: a damaged folder, or one to begin with that is no difference from this base.
    """
    loaded = load_causal(name, torch.float32, device)
    model: Any = loaded.module.model
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    if begin is not None:
        begun, factors = difference.read_factors(begin, loaded)
        model.load_state_dict(begun, strict=False)  # what is tied is not named
    kind = type(model).__name__
    if kind not in NATIVE:
        raise InputError(f"{name} is a {kind}; expected one of {', '.join(NATIVE)}.")
    eos = config_of(model).get("eos_token_id")
    if eos is None:
        raise InputError(f"{name} names no stop token; set eos_token_id in its config.json.")
    tokenizer: Any = loaded.tokenizer
    tokenizer = tokenizer.with_mask(mask) if mask else tokenizer
    if tokenizer.mask_id is None or tokenizer.mask_id >= loaded.vocab:
        free = ", ".join(repr(token) for token in sorted(tokenizer.special)[:8])
        got = "none" if tokenizer.mask_id is None else f"id {tokenizer.mask_id} for {mask!r}"
        raise InputError(
            f"{name} needs a mask token below {loaded.vocab}, got {got}; give --mask-token, a special token that no "
            f"text has (of {free}), or a new one where the embedding has more rows than the tokenizer tokens."
        )
    eos_ids = (eos,) if isinstance(eos, int) else tuple(eos)
    return Base(name, model, tokenizer, tokenizer.mask_id, eos_ids, factors)


def documents_of(base: Base, pairs: Sequence[Pair], settings: Settings, task: int = 0) -> list[Document]:
    """Make documents of pairs; drop those of which no whole block has a token of the response.

    task: the number of the file that they are from.
    """
    rng, stop = random.Random(f"blocks {settings.seed}"), base.eos_ids[0]
    found: list[Document] = []
    framed = [pair for pair in pairs if pair.prompt]
    prompts = base.tokenizer.encode_prompts([pair.prompt for pair in framed])
    responses = base.tokenizer.encode_parts([pair.response for pair in framed])
    encoded = zip(prompts, responses, strict=True)
    for prompt, response, ended in pairs:
        if prompt:
            more = rng.randint(0, MORE_BLOCKS) if settings.form == "bidirectional" else 0
            found.append(chat_document(*next(encoded), stop, task, more=more, ended=ended))
        else:
            found += text_documents(base.tokenizer, response, stop, settings.length, task)
    return [document for document in found if RESPONSE in document.kinds]


def documents_of_files(base: Base, files: Sequence[Path], settings: Settings) -> list[Document]:
    """The documents of files as `read_pairs` reads them, each with the number of its file as `task`."""
    return [item for n, path in enumerate(files) for item in documents_of(base, read_pairs(path), settings, n)]


def divide(documents: Sequence[Document], count: int, seed: int) -> tuple[list[Document], list[Document]]:
    """Divide documents into (training, held-out) ones.

    At most `count` and a tenth of the distinct ones are held out, one at least. No copy of them is trained on.
    """
    distinct = list({tuple(item.ids): item for item in documents}.values())
    count = min(count, max(1, len(distinct) // 10))
    held_out = random.Random(f"held out {seed}").sample(distinct, count) if len(distinct) > 1 else []
    apart = {tuple(item.ids) for item in held_out}
    return [item for item in documents if tuple(item.ids) not in apart], held_out


def seeded(generator: torch.Generator, what: str, seed: int, number: int) -> None:
    """Let a generator draw what depends on these alone. Hashed, since that of a CPU looks at 32 bits of a seed."""
    generator.manual_seed(random.Random(f"{what} {seed} {number}").getrandbits(63))


def learnt_from(batch: Batch, settings: Settings, noise: Noise, generator: torch.Generator) -> Inputs:
    """Inputs and targets that a model learns from a batch by the objective of `settings`."""
    if settings.learn_prompts:
        batch = learning_prompts(batch)
    if settings.form == "bidirectional":
        return masked_diffusion(batch, generator, noise)
    return block_diffusion(batch, settings.learnt // noise.block, generator, noise)


def write_model(base: Base, settings: Settings, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Write the model as a checkpoint folder that `dgraph.load` takes: the base's class, with what a diffusion model
    needs to know in its config.json.
    """
    tensors = low_rank.weights(base.model)
    if base.model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    config = {name: value for name, value in base.model.config.to_dict().items() if not name.startswith("_")}
    stored = str(dtype).removeprefix("torch.")
    config |= {
        "architectures": [type(base.model).__name__],
        "eos_token_id": list(base.eos_ids),
        "mask_token_id": base.mask_id,
        "block_length": settings.block,
        "attention": settings.form,
        "logit_shift": settings.shift,
        "next_token": settings.form == "block_causal" and settings.shift == 1,
        "dtype": stored,
    }
    write_folder(folder, tensors, config, dtype=dtype)
    base.tokenizer.save(folder)


class Conversion:
    """A base in training.

    Args:
        base: whose model is changed in place; it must be as it was loaded.
        settings: settings of the run.
        documents: all of them; see `divide`.
        dense, compiled: see `Trainer`.
        autocast: dtype of products.
        times: see `Passes`.
        ranks: processes that train it together, each on a part of every batch's rows. Weights are those of one rank,
            but for the order of sums.

    Attributes:
        trainer: its `done` is the number of steps so far.
    """

    def __init__(
        self,
        base: Base,
        settings: Settings,
        documents: Sequence[Document],
        dense: bool = True,
        compiled: bool = False,
        autocast: torch.dtype = torch.bfloat16,
        times: Mapping[int, float] = MappingProxyType({}),
        ranks: Group | None = None,
    ) -> None:
        self.base, self.settings, self.ranks = base, settings, ranks or Alone()
        training, held_out = divide(documents, settings.held_out, settings.seed)
        self.data = Passes(training, settings.rows, settings.length, settings.seed, times)
        self.held_out = Pairs(held_out, HELD_OUT_ROWS, settings.length, settings.seed)
        base.model.requires_grad_(True)
        if settings.rank:
            generator = torch.Generator().manual_seed(settings.seed)
            low_rank.add_low_rank(base.model, settings.rank, base.mask_id, generator, base.factors)
        if compiled:
            for layer in base.model.model.layers:
                layer.compile(dynamic=False)
        decay = 0.0 if settings.rank else settings.decay
        self.trainer = Trainer(
            Adopted(base.model),
            settings.steps,
            settings.rate,
            0.0,
            dense,
            compiled,
            minutes=settings.allowed or float("inf"),
            decay=decay,
            autocast=autocast,
            ranks=self.ranks,
        )
        self.generator = torch.Generator(self.trainer.device)

    def steps(self, until: float = float("inf"), workers: int = 0) -> Iterator[float]:
        """Train up to the end of the run, or until `time.monotonic()` is `until` on rank 0; the loss of each step."""
        if self.over:  # as it was when the last session ended
            return
        sampler = range(self.trainer.done, self.settings.steps)
        batches = DataLoader(self.data, batch_size=None, sampler=sampler, num_workers=workers)
        for step, batch in zip(sampler, batches, strict=True):
            noise = self.settings.noise(self.base.mask_id, step / self.settings.steps)
            loss, _ = self.trainer.step(self._inputs(batch, self.settings, noise, step))
            late = self.ranks.exchange(time.monotonic() >= until)[0]
            yield float(loss)
            if self.over or late:
                return

    @property
    def over(self) -> bool:
        """True if the run has come to its end."""
        return self.trainer.fraction >= 1

    @torch.no_grad()
    def held_out_loss(self) -> float | None:
        """Mean cross entropy (nats) of the masked tokens of held-out responses, padding and prompts left out.

        Mask rates are spread evenly: the measure is the same whatever is trained for. None without held-out documents.
        """
        plain = replace(
            self.settings,
            by_rate=False,
            complementary=False,
            padding_weight=0.0,
            blockwise=BLOCKWISE_SHARE,
            later_weight=1.0,
            learn_prompts=False,
        )
        total = count = 0.0
        for number in range(self.ranks.rank, len(self.held_out), self.ranks.world):
            inputs = self._inputs(self.held_out[number], plain, plain.noise(self.base.mask_id), (1 << 31) + number)
            total += float((self.trainer.forward(inputs) * inputs.weights).sum())
            count += float(inputs.weights.sum())
        total, count = (sum(parts) for parts in zip(*self.ranks.exchange((total, count)), strict=True))
        return total / count if count else None

    def _inputs(self, batch: Batch, settings: Settings, noise: Noise, number: int) -> Inputs:
        """Inputs and targets of a batch, its masks drawn by the seed and the number."""
        seeded(self.generator, "masks", settings.seed, number)
        return learnt_from(batch.to(self.trainer.device), settings, noise, self.generator)
