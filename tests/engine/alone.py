"""That an engine gives several requests what each gets alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dgraph.compiler.compiled_model import CompiledModel
from dgraph.engine.memory.pools import PoolSizes
from dgraph.runtime import BlockSession
from dgraph.runtime.decoding import Decoding


def check_as_alone(
    run: CompiledModel, prompts: Sequence[list[int]], decodings: Sequence[Decoding], pages: int = 0, **settings: Any
) -> None:
    """Each request gets the tokens that `generate` gives it alone, and all pages come back.

    pages: of the engine's pool, which requests take as they grow, beside rings for every slot; 0 for enough of them for
        their whole life.
    settings: as for `CompiledModel.engine`.
    """
    alone = [run.generate(input_ids=[p], decoding=d).token_ids[0] for p, d in zip(prompts, decodings, strict=True)]
    if pages:
        session, slots, tokens = run._session, settings["max_sequences"], settings["max_tokens"]
        settings |= {"kv_bytes": bytes_of(session, pages, slots, tokens), "usual_prompt": 1, "pages": "block"}
    with run.engine(**settings) as engine:
        assert [one.token_ids for one in engine.generate(prompts, decodings)] == alone
        assert engine.stats.free_pages == engine.stats.pages


def bytes_of(session: BlockSession, pages: int, slots: int, tokens: int) -> int:
    """Bytes of that many pages, beside what so many requests of any length hold in the other pools."""
    rings = [slots * each for each in session.kv.ring_pages(tokens, 2 * session.spec.block_length)]
    entries = [slots * each for each in session.packed.needs(tokens)] if session.packed is not None else []
    return PoolSizes(pages, tuple(rings), tuple(entries)).bytes(session, slots)
