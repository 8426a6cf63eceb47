"""The first requests of an engine, so that no client waits for what they compile and record."""

from __future__ import annotations

from dgraph.engine.engine import Engine
from dgraph.runtime.decoding import Decoding


def warm_up(engine: Engine, sequences: int = 1) -> None:
    """Serve so many requests at the same time: one compiles, and CUDA graphs are recorded for each number of them.

    Called on every rank; rank 0 asks.
    """
    if not engine.leads:
        return
    spec, block = engine.spec, engine.block_length
    special = {spec.mask_id, spec.pad_id, *spec.eos_ids}
    plain = next(token for token in range(spec.vocab) if token not in special)
    length = min(block, engine.max_tokens // 2)
    decoding = Decoding(max_new_tokens=min(length, engine.max_tokens - length), ignore_eos=True)
    engine.generate([[plain] * length] * sequences, decoding)
