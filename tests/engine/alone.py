"""That an engine gives several requests what each gets alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dgraph.compiler.compiled_model import CompiledModel
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
        kv, slots = run._session.kv, settings["max_sequences"]
        rings = [slots * each for each in kv.ring_pages(settings["max_tokens"], 2 * run.spec.block_length)]
        settings |= {"kv_bytes": kv.pool_bytes(pages, rings), "pages": "block"}
    with run.engine(**settings) as engine:
        assert [one.token_ids for one in engine.generate(prompts, decodings)] == alone
        assert engine.stats.free_pages == engine.stats.pages
