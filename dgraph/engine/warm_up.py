"""The first request of an engine, so that no client waits for its compilations."""

from __future__ import annotations

from dgraph.engine.engine import Engine
from dgraph.runtime.decoding import Decoding


def warm_up(engine: Engine) -> None:
    """Serve one request. The CUDA graphs of others are recorded where the engine is made (`EngineConfig.record`).

    Called on every rank; rank 0 asks.
    """
    if not engine.leads:
        return
    spec, block = engine.spec, engine.block_length
    special = {spec.mask_id, spec.pad_id, *spec.eos_ids}
    plain = next(token for token in range(spec.vocab) if token not in special)
    length = min(block, engine.max_tokens // 2)
    decoding = Decoding(max_new_tokens=min(length, engine.max_tokens - length), ignore_eos=True)
    engine.generate([[plain] * length], decoding)
