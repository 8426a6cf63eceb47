"""The request of a caller, and the check that an engine can serve it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dgraph.engine.core import EngineCore
from dgraph.engine.io.tickets import Sink
from dgraph.errors import InputError
from dgraph.errors.former import former_names
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.request_checks import check_canvases, check_request
from dgraph.runtime.requests import Request
from dgraph.runtime.sampling.adjustments import with_ids

__getattr__ = former_names(__name__, {"Submission": "RequestSpec"})


@dataclass(frozen=True, kw_only=True)
class RequestSpec:
    """One request of a caller; see `Engine.submit`.

    number: of its prompt, in messages; None for `index`. shown: special tokens that are written out in the text.
    """

    prompt: str | Sequence[int]
    decoding: Decoding
    sink: Sink
    canvas: Sequence[int | None] | None = None
    request_id: str | None = None
    priority: int = 0
    draft: bool = False
    index: int = 0
    number: int | None = None
    shown: Mapping[int, str] = field(default_factory=dict)

    def checked(self, core: EngineCore, encode: Callable[[str], list[int]]) -> Request:
        """Check the submission and make its request; compile what that needs, unless that was done.

        Args:
            core: serves it.
            encode: ids of a text.

        Raises:
            InputError: a prompt or a setting that cannot be used.
        """
        numbers = (("priority", self.priority), ("index", self.index))  # else they would fail in the engine's thread
        for what, number in numbers:
            if type(number) is not int or not -(1 << 31) <= number < 1 << 31:
                raise InputError(f"{what} must be a whole number of 32 bits, got {number!r}.")
        if not callable(self.sink):
            raise InputError(f"sink is a function that is called with every event, got {self.sink!r}.")
        if self.request_id is not None and not isinstance(self.request_id, str):
            raise InputError(f"request_id is a text, or None to make one, got {self.request_id!r}.")
        spec, block, room = core.session.spec, core.shape.block, core.max_tokens
        chosen = with_ids(self.decoding.for_model(spec, block), core.tokenizer)
        if chosen.stop and core.tokenizer is None:
            raise InputError(
                "the model came without a tokenizer, so texts in stop mean nothing; leave them out.", field="stop"
            )
        if chosen.block_length not in (None, block):
            raise InputError(
                f"this engine decodes blocks of {block} tokens, got block_length={chosen.block_length}; make an engine "
                f"with that block_length, or leave it out.",
                field="block_length",
            )
        if chosen.open_blocks > core.shape.open:
            raise InputError(
                f"this engine opens up to {core.shape.open} blocks of a request, got open_blocks={chosen.open_blocks}; "
                f"make an engine with that many (EngineConfig.open_blocks), or ask for fewer.",
                field="open_blocks",
            )
        if chosen.sampling.cfg_scale > 0:
            raise InputError(
                f"cfg_scale={chosen.sampling.cfg_scale} runs every step twice, which an engine does not; use "
                f"CompiledModel.generate, or leave it at 0."
            )
        given = encode(self.prompt) if isinstance(self.prompt, str) else self.prompt
        first = self.index if self.number is None else self.number
        (ids,) = check_request(spec, [given], replace(chosen, block_length=block), None, first)
        (fixed,) = check_canvases(spec, [self.canvas], 1, chosen)
        if len(ids) + chosen.max_new_tokens > room:
            raise InputError(
                f"a prompt of {len(ids)} tokens and max_new_tokens={chosen.max_new_tokens} take "
                f"{len(ids) + chosen.max_new_tokens} positions, more than the {room} of this engine (max_tokens, as "
                f"far as kv_bytes holds them); shorten the prompt, or ask for fewer.",
                field="max_new_tokens",
            )
        core.check(chosen)
        return replace(Request.of(ids, chosen, self.index, fixed, spec), shown=tuple(self.shown.items()))
