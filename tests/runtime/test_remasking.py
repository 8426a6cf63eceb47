"""Rules that mask decoded tokens again, in sessions: against plain lists, and where they cannot be used."""

from __future__ import annotations

import random

import pytest

from dgraph.errors import InputError
from dgraph.runtime import BlockSession
from dgraph.runtime.policies import HierarchicalRemask
from tests.runtime.fake import MASK, FakeProgram, fake_spec, random_prompts
from tests.runtime.simulate import Model

POLICY = HierarchicalRemask(0.9, 0.5, 0.5)
STOP = 3


def decided(found: dict[int, tuple[int, int]], doubtful: set[int], policy: HierarchicalRemask) -> list[int]:
    """Positions that are committed, of those that are masks or in doubt; confidences are in 32nds."""
    sure = {p: c / 32 for p, (_, c) in found.items()}
    chosen, stretch = {p for p, c in sure.items() if c > policy.threshold}, []
    for p in range(min(found), max(found) + 2):
        if p in found:
            stretch.append(p)
            continue
        best = max(stretch, key=lambda p: (sure[p], -p), default=None)
        if best is not None and sure[best] > policy.low_threshold:
            chosen.add(best)
        stretch = []
    rest = sorted(found.keys() - chosen, key=lambda p: (-sure[p], p))
    return [*chosen, *rest[: max(0, len(doubtful) + 1 - len(chosen))]]


def simulate(prompt: list[int], new: int, block: int, causal: bool) -> tuple[list[int], int, int]:
    """Tokens, steps, and how often one was masked again."""
    end = len(prompt) + new
    room = -(-end // block) * block if causal else end
    canvas = prompt + [MASK] * (room - len(prompt))
    steps, again = 0, 0
    for start in range(len(prompt) // block * block if causal else len(prompt), end, block):
        stop = min(start + block, room)
        open_ = set(range(max(start, len(prompt)), stop))
        masks = set(open_)
        while masks:
            limits = {p: (p // block + 1) * block for p in range(stop)} if causal else dict.fromkeys(range(end), end)
            # All of a block is looked at again, also what lies past the response where its last block is cut short.
            found = Model(room).forward(canvas, limits, sorted(open_))[1]
            doubtful = {p for p in open_ - masks if p in found and found[p][1] / 32 < POLICY.remask_threshold}
            chosen = decided({p: found[p] for p in masks | doubtful}, doubtful, POLICY)
            for p in chosen:
                canvas[p] = found[p][0]
            for p in doubtful.difference(chosen):
                canvas[p] = MASK
            masks = (masks | doubtful).difference(chosen)
            steps, again = steps + 1, again + len(doubtful.difference(chosen))
        if STOP in canvas[max(start, len(prompt)) : stop]:
            break
    said = canvas[len(prompt) : end]
    return said[: said.index(STOP) if STOP in said else len(said)], steps, again


@pytest.mark.parametrize("block", [4, 8])
@pytest.mark.parametrize("attention", ["bidirectional", "block_causal"])
def test_tokens_and_steps_are_those_of_plain_lists(attention: str, block: int) -> None:
    causal = attention == "block_causal"
    programs = {"prefill": FakeProgram("prefill"), "step": FakeProgram("step")}
    session = BlockSession(fake_spec(block, attention=attention), programs if causal else {"step": programs["step"]})
    prompts = random_prompts(random.Random(block), 12, 2 * block + 3)
    found = session.generate(prompts, max_new_tokens=2 * block + 3, policy=POLICY)
    wanted = [simulate(prompt, 2 * block + 3, block, causal) for prompt in prompts]
    assert found.token_ids == [tokens for tokens, _, _ in wanted]
    assert found.stats.sequence_steps == [steps for _, steps, _ in wanted]
    assert sum(again for _, _, again in wanted) > 10
    one = session.generate(prompts, max_new_tokens=2 * block + 3, policy=POLICY, max_batch=1)
    assert (one.token_ids, one.stats.sequence_steps) == (found.token_ids, found.stats.sequence_steps)
    assert sum(found.stats.sequence_decoded) == found.stats.decoded


def test_what_is_decoded_counts_once() -> None:
    """However often a token was taken back; a sequence that does not stop decodes all of its response."""
    session = BlockSession(fake_spec(4, attention="bidirectional", eos_ids=()), {"step": FakeProgram("step")})
    found = session.generate([[1, 2], [4, 5, 6]], max_new_tokens=11, policy=POLICY)
    assert found.stats.sequence_decoded == [11, 11]


def test_where_decoded_tokens_are_not_recomputed() -> None:
    spec = fake_spec(4, attention="bidirectional")
    with pytest.raises(InputError, match="HierarchicalRemask replaces decoded tokens, but block_cache='dc' does not"):
        BlockSession(spec, {"step": FakeProgram("step")}, block_cache="dc").generate(
            [[1]], max_new_tokens=4, policy=POLICY
        )
    with pytest.raises(InputError, match="HierarchicalRemask replaces decoded tokens, but this recipe evicts rows"):
        BlockSession(spec, {"step": FakeProgram("evict")}).generate([[1]], max_new_tokens=4, policy=POLICY)
