"""The rule that draws canvases again, against plain numbers; and the state that it decides for."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.runtime.policies import Candidates, PolicyMix, Renoise, policy_of
from dgraph.runtime.sampling.random_numbers import random_ids, sequence_keys
from dgraph.runtime.state.packed_rows import RowResults
from dgraph.runtime.state.state_init import StateInit
from dgraph.runtime.state.uniform_noise import UniformNoiseState
from tests.oracle.renoise import Canvas, heat

BLOCK, VOCAB = 6, 50


def candidates(best: Tensor, entropy: Tensor, forwards: Tensor, carried: dict[str, Tensor]) -> Candidates:
    """Of sequences whose canvases have no position decoded."""
    b = len(best)
    zero = torch.zeros(b, dtype=torch.int64)
    return Candidates(
        token=best,
        confidence=torch.full(best.shape, 0.5),
        masked=torch.ones_like(best, dtype=torch.bool),
        current=best,
        step=zero,
        decoded=zero,
        start=zero,
        prompt=zero,
        measured={"entropy": entropy},
        carried=carried,
        forwards=forwards,
        draw=best,
    )


@pytest.mark.parametrize("stability", [0, 1, 3])
def test_what_is_kept_and_when_a_canvas_is_done(stability: int) -> None:
    """Three sequences with settings of their own, in one batch; ties, and canvases that come and go."""
    generator = torch.Generator().manual_seed(stability)
    settings = [(0.0, 0.3, 9), (0.4, 1.0, 40), (3.0, 0.0, 12)]
    rules = [Renoise(bound, 0.4, 0.8, stability, confidence, steps) for bound, confidence, steps in settings]
    mixture = PolicyMix.of(rules)
    assert len(mixture.kinds) == 1
    named = {
        f"0.{name}": torch.tensor([getattr(rule, name) for rule in rules], dtype=torch.float64 if real else torch.int64)
        for name, real in [(name, name not in ("stability", "steps")) for name in Renoise.per_request]
    }
    plain = [Canvas(bound, stability, confidence, steps) for bound, confidence, steps in settings]
    carried = {each.name: each.begin(3, BLOCK, torch.device("cpu")) for each in mixture.carries}
    ended = set()
    best = torch.randint(0, 3, (3, BLOCK), generator=generator)
    for step in range(12):
        if step % 4 == 0:  # the most likely tokens change now and then
            best = torch.randint(0, 3, (3, BLOCK), generator=generator)
        entropy = torch.randint(0, 4, (3, BLOCK), generator=generator).float() * 0.2
        given = candidates(best, entropy, torch.full((3,), step), carried)
        given = Candidates(**{**vars(given), "settings": named, "kind": torch.zeros(3, dtype=torch.int64)})
        kept, chosen = mixture.keep(given), mixture.choose(given)
        carried = dict(mixture.carry(given, chosen))
        for s, canvas in enumerate(plain):
            wanted, done = canvas.step(best[s].tolist(), entropy[s].tolist())
            assert set(kept[s].nonzero()[:, 0].tolist()) == wanted
            assert chosen[s].tolist() == [done] * BLOCK
            if done:
                ended.add(s)
    assert 0 in ended
    heats = mixture.heat(torch.tensor([0, 5, 11]), torch.zeros(3, dtype=torch.int64), named)
    wanted_heats = [heat(0.4, 0.8, steps, step) for (_, _, steps), step in zip(settings, (0, 5, 11), strict=True)]
    torch.testing.assert_close(heats, torch.tensor(wanted_heats))


def test_at_least_one_draw_is_kept_and_ties_go_to_the_lower_position() -> None:
    best = torch.zeros(1, 4, dtype=torch.int64)
    carried = {each.name: each.begin(1, 4, torch.device("cpu")) for each in Renoise().carries}
    for entropies, bound, wanted in (
        ([5.0, 4.0, 4.0, 6.0], 0.0, [False, True, False, False]),
        ([1.0, 1.0, 1.0, 1.0], 1.0, [True, True, False, False]),
        ([0.0, 0.0, 0.0, 0.0], 0.0, [True] * 4),
    ):
        given = candidates(best, torch.tensor([entropies]), torch.tensor([0]), carried)
        assert Renoise(bound).keep(given).tolist() == [wanted]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bound": -1.0}, "bound is a finite number of nats, at least 0, got -1.0"),
        ({"t_min": 0.0}, "t_min is a finite temperature above 0, got 0.0"),
        ({"t_max": math.inf}, "t_max is a finite temperature above 0, got inf"),
        ({"confidence": "high"}, "confidence is a finite number of nats, at least 0, got 'high'"),
        ({"stability": 1.5}, "stability is a number of steps, at least 0, got 1.5"),
        ({"steps": 0}, "steps is a number of denoising steps per block, at least 1, got 0"),
    ],
)
def test_settings_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Renoise(**options)


def test_the_published_settings() -> None:
    assert policy_of("diffusion_gemma") == Renoise(0.1, 0.4, 0.8, 1, 0.005, 48)
    assert policy_of("renoise", steps=16, confidence=0.0) == Renoise(steps=16, confidence=0.0)


# -- the state ---------------------------------------------------------------------------------------------------


def begun(prompts: tuple[int, ...] = (3, 5), new: int = 8) -> UniformNoiseState:
    canvas = torch.full((len(prompts), 24), -1)
    for s, length in enumerate(prompts):
        canvas[s, :length] = torch.arange(length) + 10
    ends = torch.tensor(prompts)
    state = UniformNoiseState.begin(
        StateInit(
            canvas,
            torch.arange(len(prompts)),
            ends,
            max_new_tokens=torch.full_like(ends, new),
            block=BLOCK,
            mask_id=-1,
            stop_ids=torch.tensor([7]),
            vocab=VOCAB,
        )
    )
    state.keys = torch.cat([sequence_keys(3, torch.tensor([s])) for s in range(len(prompts))], dim=1).T.contiguous()
    state.carry(Renoise(steps=2))
    state.grant()
    return state


def results(state: UniformNoiseState, token: int, draw: int) -> RowResults:
    count = state.capacity
    full = torch.full((count,), 0, dtype=torch.int64)
    entropy = torch.arange(count) % BLOCK * 1.0  # only the first of a canvas is within the bound
    sure = torch.full((count,), 0.5)
    return RowResults(full + token, sure, torch.ones(count, dtype=torch.bool), {"entropy": entropy}, full + draw)


def test_a_canvas_is_denoised_then_encoded_then_the_next_one_begins() -> None:
    state, policy = begun(), Renoise(bound=0.5, steps=2)
    first = state.rows(state.capacity)
    assert first.positions.tolist() == [*range(3, 9), *range(5, 11)]
    assert (first.limit.tolist(), first.origin.tolist()) == ([9] * 6 + [11] * 6, [3] * 6 + [5] * 6)  # type: ignore[union-attr]
    assert not first.encoded.any()  # type: ignore[union-attr]
    assert first.candidate.all()
    assert first.input_ids.tolist() != [0] * 12
    assert bool(((first.input_ids >= 0) & (first.input_ids < VOCAB)).all())

    state.apply(first, results(state, 20, 30), policy, "off", True)
    second = state.rows(state.capacity)
    fresh = random_ids(state.keys.T, state.columns, torch.zeros(2, dtype=torch.int64), VOCAB)
    assert second.input_ids.view(2, BLOCK)[:, :2].tolist() == [[30, 30]] * 2  # 0 and 0 + 1 > 0.5: two are kept
    assert torch.equal(second.input_ids.view(2, BLOCK)[:, 2:], fresh[:, 2:])
    assert state.shown.eq(-1).all()

    state.apply(second, results(state, 21, 30), policy, "off", True)
    third = state.rows(state.capacity)
    assert third.input_ids.tolist() == [21] * 12  # what is most likely is committed, not what was drawn
    assert third.encoded.all()  # type: ignore[union-attr]
    assert third.limit.tolist() == [p + 1 for p in third.positions.tolist()]
    assert torch.equal(third.origin.long(), third.positions)  # type: ignore[union-attr]
    assert not third.candidate.any()
    assert (state.total.tolist(), state.shown.tolist()) == ([6, 6], [[21] * 6] * 2)

    state.apply(third, results(state, 22, 30), policy, "off", True)
    assert state.start.tolist() == [9, 11]
    assert (state.commit_rows.tolist(), state.forwards.tolist()) == ([6, 6], [0, 0])
    assert state.rows(state.capacity).input_ids.tolist() != first.input_ids.tolist()
    for _ in range(2):
        state.apply(state.rows(state.capacity), results(state, 23, 30), policy, "off", True)
    assert not state.active.any()  # 8 tokens are in the second canvas, which needs no keys any more
    assert not state.broken.any()


def test_a_stop_token_ends_a_response_once_its_canvas_is_done() -> None:
    state, policy = begun(new=20), Renoise(steps=2)
    state.apply(state.rows(state.capacity), results(state, 7, 7), policy, "off", True)
    assert state.active.all()
    state.apply(state.rows(state.capacity), results(state, 7, 7), policy, "off", True)
    assert not state.active.any()


def test_random_tokens_depend_on_seed_prompt_position_and_step_alone() -> None:
    keys = sequence_keys(3, torch.arange(2))
    at, step = torch.arange(400).expand(2, -1), torch.tensor([4, 4])
    found = random_ids(keys, at, step, VOCAB)
    assert torch.equal(found[1:, 7:9], random_ids(keys[:, 1:], at[1:, 7:9], step[1:], VOCAB))
    for other in (random_ids(keys, at + 400, step, VOCAB), random_ids(keys, at, step + 1, VOCAB), found.flip(0)):
        assert (found == other).float().mean() < 0.1
    counts = found.flatten().bincount(minlength=VOCAB)
    assert len(counts) == VOCAB
    assert counts.min() > 2
