"""Build an engine over a session, with defaults for what its caller leaves open."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from dgraph.engine.core import EngineCore
from dgraph.engine.engine import Engine
from dgraph.engine.io.label_questions import Questions
from dgraph.engine.memory.pools import pool_sizes
from dgraph.engine.memory.prefix_cache import PrefixCache
from dgraph.engine.memory.profile import Profile
from dgraph.engine.scheduling.cost_model import CostModel
from dgraph.engine.scheduling.jobs import MIXED_ROWS, Budgets
from dgraph.engine.scheduling.scheduler import Scheduler
from dgraph.engine.scheduling.schedulers import SchedulingStrategy, scheduler_of
from dgraph.errors import InputError, UnknownName
from dgraph.errors.former import former_fields, former_names
from dgraph.lowering.program import Program
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.loop.label_scoring import Scorer
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.request_checks import room_of
from dgraph.runtime.requests import Request, Shape
from dgraph.runtime.sampling.stops import Decoder
from dgraph.spec import ModelSpec

PAGES = ("block", "life")
SEQUENCES = {"cpu": 16, "cuda": 64}
"""Default number of slots, by kind of device."""
TOKENS = 4096
"""Default limit on the positions of a sequence, where the model has more."""
ROWS = 8192
"""Default limit on the rows of a step, where no request needs more."""
PROMPT_ROWS = {"cpu": 512}
"""Default limit on the rows of prompts in a step, by kind of device, where it is lower than `ROWS`. All streams wait
while prompts are forwarded, and a CPU gains nothing by more rows at a time.
"""
CPU_BYTES = 1 << 30
"""Default bytes of keys and values on a CPU."""


__getattr__ = former_names(__name__, {"EngineSettings": "EngineConfig"})


@former_fields(policy="scheduler")
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Size of an engine, and the scheduler by which its requests run.

    Attributes:
        max_sequences: requests that run at the same time; default 16 on a CPU and 64 on a GPU.
        max_tokens: positions of a request, prompt and response together; default 4096, or the model's if it has fewer.
        max_batched_rows: rows of one step, of all requests together; default 8192, or max_tokens if that is more. By
            default a forward of prompts has at most 512 rows on a CPU. So has a step there of a model that forwards
            prompts with responses, or max_tokens if that is more.
        max_mixed_rows: rows of prompts in one step, of all requests together, at most what max_batched_rows leaves
            beside two blocks; 0 for none; default 512. Waiting prompts of a block-causal model are encoded with their
            first steps, in the forward that all requests share. That holds if they are no more rows than this, and
            steps have room for them. Else they get a forward of their own, as all do where steps cannot encode them
            (see `BlockSession.mixes`). Other models forward a prompt with its response anyway.
        max_logit_rows: rows whose logits exist at a time; default the recipe's. The memory of other logits goes to keys
            and values.
        kv_bytes: memory of all caches together: pages, rings and packed keys. They are allocated when the engine opens
            and never grow. They never take more than max_sequences of max_tokens need. Default 1 GiB on a CPU; on a GPU
            the memory that weights, activations and graphs leave (see `dgraph.engine.memory.profile`; the first time,
            measuring it takes some steps).
        usual_prompt: tokens of a usual prompt. Memory that cannot hold max_sequences of max_tokens is divided among
            pages, rings and packed keys as such prompts need, with responses of `decoding`. Default: with packed keys,
            a request of half of max_tokens; else pages get half of the memory or more.
        scheduler: which requests run: "look_ahead", "fcfs", "prefill_first", "static", or an object; see
            `dgraph.engine.scheduling.schedulers`.
        pages: "block": a request of a block-causal model gets pages as it grows. When no page is left, the youngest
            request gives way and comes back later, with the same tokens. "life": a request gets all of its pages at
            admission. Other models, and recipes that keep packed keys, always get all.
        prefix_cache: keep the keys of prompts for others that begin alike; block-causal models alone. Default: unless
            layers with a window let keys go (see `CacheKV`).
        queue: requests that may wait; None for any number.
        block_length: tokens that are denoised together; default the model's.
        open_blocks: blocks of a request that may be open together, at most; requests say how many of them are
            (`Decoding.open_blocks`). Default: those of `decoding`.
        decoding: how most requests will be decoded. On a GPU the code between their steps is compiled before the pool
            takes the memory; other requests work as well.
        record: record the CUDA graphs that such requests can need before the engine opens, so that none waits while
            one is recorded; False: each when it is first met. It takes seconds, and buckets of another kind than
            "exact"; without CUDA graphs there is nothing to record.

    Raises:
        InputError: a value out of range.
        UnknownName: an unknown scheduler, or way of giving out pages.
    """

    max_sequences: int | None = None
    max_tokens: int | None = None
    max_batched_rows: int | None = None
    max_mixed_rows: int | None = None
    max_logit_rows: int | None = None
    kv_bytes: int | None = None
    usual_prompt: int | None = None
    scheduler: str | SchedulingStrategy = "look_ahead"
    pages: str = "block"
    prefix_cache: bool | None = None
    queue: int | None = None
    block_length: int | None = None
    open_blocks: int | None = None
    decoding: Decoding | None = None
    record: bool = False

    def __post_init__(self) -> None:
        counts = ("max_sequences", "max_tokens", "max_batched_rows", "max_logit_rows", "kv_bytes", "queue")
        for name in (*counts, "usual_prompt", "block_length", "open_blocks"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InputError(f"{name} must be a whole number, at least 1, got {value!r}.")
        mixed = self.max_mixed_rows
        if mixed is not None and (type(mixed) is not int or mixed < 0):
            raise InputError(
                f"max_mixed_rows must be a whole number, at least 0 (every prompt gets a forward of its own), "
                f"got {mixed!r}."
            )
        for name in ("prefix_cache", "record"):
            value = getattr(self, name)
            if value is not None and type(value) is not bool:
                raise InputError(f"{name} is true or false, got {value!r}.")
        if self.pages not in PAGES:
            raise UnknownName("way of giving out pages", str(self.pages), PAGES)
        scheduler_of(self.scheduler)

    def slots(self, kind: str) -> int:
        """Requests that run at the same time on a kind of device ("cpu", "cuda")."""
        return self.max_sequences or SEQUENCES.get(kind, 16)


def build_engine(
    session: BlockSession,
    settings: EngineConfig,
    *,
    model: str,
    recipe: str,
    tokenizer: Decoder | None,
    encode: Callable[[str], list[int]],
    prepare: Callable[[Sequence[Decoding]], None],
    occupied: Callable[[], AbstractContextManager[object]],
    profiled: Callable[[int, int], Profile],
    scoring: Callable[[], Program],
) -> Engine:
    """Build an engine over a session's programs and memory; see `build_core` and `Engine`."""
    core = build_core(session, settings, tokenizer=tokenizer, prepare=prepare, profiled=profiled)
    questions = Questions(lambda: Scorer(session.spec, scoring, core.shape.block, session.device))
    return Engine(core, questions, encode, occupied, model=model, recipe=recipe, tokenizer=tokenizer)


def build_core(
    session: BlockSession,
    settings: EngineConfig,
    *,
    tokenizer: Decoder | None,
    prepare: Callable[[Sequence[Decoding]], None],
    profiled: Callable[[int, int], Profile],
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    """Build the core of an engine, which runs without the engine's thread.

    Args:
        session: the programs and memory; no other caller may use it while the engine is open.
        settings: see `EngineConfig`.
        tokenizer: makes text of ids; None for no text.
        prepare: see `EngineCore`; called with the decoding of most requests.
        profiled: where the memory goes, for a number of rows and of sequences; asked on a GPU alone.
        clock: seconds.

    Raises:
        InputError: settings that the model or the memory cannot serve.
    """
    spec, kind = session.spec, session.device.type
    block, slots = settings.block_length or spec.block_length, settings.slots(kind)
    decoding = (settings.decoding or Decoding()).for_model(spec, block)
    open = settings.open_blocks or decoding.open_blocks
    own = 2 * block * open
    room = room_of(spec, block)
    if room < 2:
        raise InputError(
            f"block_length={block} leaves no room for a prompt and a response in the {spec.max_positions} positions of "
            f"{spec.family}; give a shorter one."
        )
    tokens = settings.max_tokens or min(TOKENS, room)
    if tokens > spec.max_positions:
        raise InputError(f"max_tokens={tokens} is more than the {spec.max_positions} positions of {spec.family}.")
    tokens = min(tokens, room)
    causal = spec.attention == "block_causal"
    rows = settings.max_batched_rows or max(ROWS if causal else PROMPT_ROWS.get(kind, ROWS), tokens, own)
    if rows < own:
        raise InputError(
            f"max_batched_rows={rows} is less than {own // block} blocks of {block}, which a step may need: with those "
            f"that are open as many that are done."
        )
    kv_bytes, costs = settings.kv_bytes, None
    if kv_bytes is None and kind == "cuda":
        found = profiled(rows, slots)
        costs = CostModel.fit(found.steps) if found.steps else None
        every = session.ranks.exchange((found.kv, costs))
        kv_bytes, costs = min(bytes for bytes, _ in every), every[0][1]  # the times that rank 0 has measured
    if settings.usual_prompt is not None and settings.usual_prompt >= tokens:
        raise InputError(
            f"usual_prompt={settings.usual_prompt} leaves no response in the {tokens} positions of a request."
        )
    if settings.prefix_cache and (windows := session.kv.windows):
        raise InputError(
            f"prefix_cache=True: the layers of {spec.family} with a window of {', '.join(map(str, windows))} "
            f"positions let keys behind it go, so prompts cannot share theirs; leave it out."
        )
    mixed = MIXED_ROWS if settings.max_mixed_rows is None else settings.max_mixed_rows
    mixed = min(mixed, rows - own) if session.mixes else 0
    prepare([decoding])
    session.declare(decoding)
    longest, usual = _longest(tokens, spec, open), _usual(settings, session, tokens, decoding)
    whole = causal and session.paged
    by_block = settings.pages == "block" and whole
    sizes = pool_sizes(session, slots, longest, usual, block, kv_bytes or CPU_BYTES, by_block, mixed)
    budgets = Budgets(rows, slots, sizes.pages, sizes.rings, sizes.entries)
    scheduler = Scheduler(budgets, settings.scheduler, queue=settings.queue, costs=costs)
    columns = -(-(tokens + (open - spec.aligned) * block) // block) * block
    shape = Shape(slots, columns, session.kv.pages_for(columns), block, rows, mixed, open)
    alike = block if spec.aligned else 1
    shares = whole and not session.lasting and not session.kv.windows and settings.prefix_cache is not False
    prefix = PrefixCache(session.kv, alike) if shares else None
    if kind == "cuda":
        session.compile_transition(shape, decoding)
    if prefix is not None:
        session.kv.reclaim = prefix.reclaim
    sizes.allocate(session)
    if settings.record and session.pool is not None:
        session.record(shape, decoding)
    return EngineCore(
        session,
        shape,
        scheduler,
        clock,
        prompt_rows=settings.max_batched_rows or PROMPT_ROWS.get(kind, rows),
        by_block=by_block,
        prefix=prefix,
        tokenizer=tokenizer,
        prepare=prepare,
    )


def _longest(tokens: int, spec: ModelSpec, open: int) -> list[Request]:
    """Requests of `tokens` positions: one with most of a prompt, one with most of a response."""
    ids = [spec.mask_id] * (tokens - 1)
    prompts = (ids[:count] for count in {tokens - 1, 1})
    return [Request(one, Decoding(max_new_tokens=tokens - len(one), open_blocks=open)) for one in prompts]


def _usual(settings: EngineConfig, session: BlockSession, tokens: int, decoding: Decoding) -> Request | None:
    """The request that `settings` expect; None if they do not say, and pages are given out by need."""
    if settings.usual_prompt is None and session.paged:
        return None
    new = min(decoding.max_new_tokens, tokens - settings.usual_prompt if settings.usual_prompt else tokens // 4)
    prompt = settings.usual_prompt or tokens // 2 - new
    return Request([session.spec.mask_id] * max(1, prompt), Decoding(max_new_tokens=max(1, new)))
