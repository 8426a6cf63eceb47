"""An engine for a session, with defaults for what its caller leaves open."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from dgraph.engine.driver import Driver
from dgraph.engine.engine import Engine
from dgraph.engine.jobs import Budgets
from dgraph.engine.policies import SchedulePolicy
from dgraph.engine.prefix import PrefixCache
from dgraph.engine.scheduler import Scheduler
from dgraph.errors import InputError, UnknownName
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.requests import Shape
from dgraph.runtime.session import BlockSession
from dgraph.runtime.stops import Decoder

PAGES = ("block", "life")
SEQUENCES = {"cpu": 16, "cuda": 64}
"""Slots of an engine whose caller does not say, by kind of device."""
TOKENS = 4096
"""Positions of a sequence at most, if the caller does not say and the model has more."""
ROWS = 8192
"""Rows of a step at most, if the caller does not say and no request needs more."""
CPU_BYTES = 1 << 30
"""Memory of keys and values on a CPU, if the caller does not say."""
GPU_SHARE = 0.85
"""Of the memory that is free on a GPU, what keys and values may take if the caller does not say."""


def build_engine(
    session: BlockSession,
    *,
    tokenizer: Decoder | None,
    encode: Callable[[str], list[int]],
    prepare: Callable[[Sequence[Decoding]], None],
    occupied: Callable[[], AbstractContextManager[object]],
    max_sequences: int | None = None,
    max_tokens: int | None = None,
    max_batched_rows: int | None = None,
    kv_bytes: int | None = None,
    policy: str | SchedulePolicy = "look_ahead",
    pages: str = "block",
    prefix_cache: bool = True,
    queue: int | None = None,
    block_length: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Engine:
    """See `dgraph.Optimized.engine`, which has the meaning of the settings and the errors."""
    spec, kind = session.spec, session.device.type
    for name, value in (
        ("max_sequences", max_sequences),
        ("max_tokens", max_tokens),
        ("max_batched_rows", max_batched_rows),
        ("kv_bytes", kv_bytes),
        ("queue", queue),
        ("block_length", block_length),
    ):
        if value is not None and (type(value) is not int or value < 1):
            raise InputError(f"{name} must be a whole number, at least 1, got {value!r}.")
    if pages not in PAGES:
        raise UnknownName("way of giving out pages", str(pages), PAGES)
    block = block_length or spec.block_length
    slots = max_sequences or SEQUENCES.get(kind, 16)
    tokens = min(max_tokens or TOKENS, spec.max_positions)
    if max_tokens is not None and max_tokens > spec.max_positions:
        raise InputError(f"max_tokens={max_tokens} is more than the {spec.max_positions} positions of {spec.family}.")
    causal = spec.attention == "block_causal"
    rows = max_batched_rows or max(ROWS, tokens, 2 * block)
    if rows < 2 * block:
        raise InputError(f"max_batched_rows={rows} is less than two blocks of {block}, which a step may need.")
    scheduler_settings: dict[str, Any] = {"policy": policy, "queue": queue}
    limit = _pool_pages(session, slots, tokens, kv_bytes)
    scheduler = Scheduler(Budgets(rows, slots, limit), **scheduler_settings)
    columns = -(-(tokens + (0 if causal else block)) // block) * block
    shape = Shape(slots, columns, session.kv.pages_for(columns), block, rows)
    whole = session.packed is None and not session.lasting
    by_block = pages == "block" and causal and session.packed is None
    prefix = PrefixCache(session.kv, block) if prefix_cache and causal and whole else None
    session.kv.limit = limit
    session.kv.reclaim = prefix.reclaim if prefix is not None else lambda count: None
    session.kv.reserve(limit)
    driver = Driver(
        session,
        shape,
        scheduler,
        clock,
        by_block=by_block,
        prefix=prefix,
        tokenizer=tokenizer,
        prepare=prepare,
    )
    return Engine(driver, spec, encode, occupied, has_text=tokenizer is not None, queue_limit=queue)


def _pool_pages(session: BlockSession, slots: int, tokens: int, kv_bytes: int | None) -> int:
    """Pages of the pool: as many as the memory holds, and no more than all slots can use."""
    kv = session.kv
    page_bytes = kv.position_bytes * kv.page_size
    most = slots * kv.pages_for(tokens + session.spec.block_length)
    if kv_bytes is None:
        if session.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(session.device)
            held = torch.cuda.memory_reserved(session.device) - torch.cuda.memory_allocated(session.device)
            kv_bytes = int((free + held) * GPU_SHARE) + kv.bytes
        else:
            kv_bytes = CPU_BYTES
    count = min(most, kv_bytes // max(page_bytes, 1)) if page_bytes else most
    if count < 1:
        raise InputError(
            f"kv_bytes={kv_bytes} does not hold one page of {kv.page_size} positions, which takes {page_bytes} bytes."
        )
    return count
