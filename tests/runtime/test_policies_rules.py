"""Every decoding rule against its formula, written for one sequence with lists and sorting."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dgraph.runtime.policies import (
    PRESETS,
    Candidates,
    DecodeRule,
    FixedSteps,
    HierarchicalRemask,
    Sequential,
    policy_of,
    traits_of,
)
from tests.runtime.formulas import (
    NONE,
    Sequence,
    confidence_threshold,
    draw,
    dream,
    dynamic_threshold,
    entropy_bounded,
    factor,
    fixed_steps,
    hierarchical,
    hierarchical_remask,
    joint_threshold,
    plain,
    relative_threshold,
    sequential,
    single,
    together,
)

CASES: list[tuple[str, Callable[..., list[int]], dict[str, Any]]] = [
    *(("fixed_steps", fixed_steps, {"steps": n}) for n in (1, 3, 8, 40)),
    *(("fixed_steps", fixed_steps, {"steps": n, "schedule": "masks"}) for n in (1, 2, 5, 40)),
    ("fixed_steps", fixed_steps, {"steps": 3, "schedule": "masks", "remasking": "random"}),
    ("fixed_steps", fixed_steps, {"steps": 3, "remasking": "random"}),
    *(("fixed_steps", fixed_steps, {"steps": n, "remasking": "random_order"}) for n in (1, 3, 40)),
    ("fixed_steps", fixed_steps, {"steps": 3, "schedule": "masks", "remasking": "random_order"}),
    *(("sequential", sequential, {"steps": n}) for n in (None, 1, 3, 40)),
    *(("confidence_threshold", confidence_threshold, {"threshold": t, "inclusive": i}) for t, i in
      [(0.5, False), (0.5, True), (0.875, True), (1.0, False), (1.0, True)]),
    *(("dynamic_threshold", dynamic_threshold, {"threshold": t, "steps": n, "fallback": f}) for t, n, f in
      [(0.5, None, "top"), (0.5, 2, "top"), (0.875, 3, "top"), (0.5, 2, "leftmost"), (0.875, 3, "leftmost")]),
    *(("relative_threshold", relative_threshold, {"threshold": t}) for t in (0.25, 0.5, 0.9, 1.0)),
    ("relative_threshold", relative_threshold, {"threshold": 0.9, "tolerance": 0.125}),
    ("relative_threshold", relative_threshold, {"threshold": 0.9, "tolerance": 0}),
    *(("factor", factor, {"factor": f, "variant": v}) for f in (0.3, 1.0, 2.5) for v in ("paper", "dinfer")),
    *(("entropy_bounded", entropy_bounded, {"gamma": g}) for g in (0.0, 0.25, 0.35, 3.0, 100.0)),
    *(("hierarchical", hierarchical, {"threshold": t, "low_threshold": low, "fast_v2": fast}) for t, low, fast in
      [(0.9, 0.4, False), (0.5, 0.25, False), (0.75, 0.0, False), (0.25, 0.875, False), (0.25, 0.875, True),
       (0.9, 0.5, True)]),
    *(("hierarchical_remask", hierarchical_remask, {"threshold": t, "low_threshold": low, "remask_threshold": r})
      for t, low, r in [(0.9, 0.4, 0.4), (0.75, 0.25, 0.5), (0.5, 0.75, 0.625), (0.9, 0.5, 1.0), (0.9, 0.4, 0.0)]),
    *(("dream", dream, {"alg": a, "alg_temp": t, "steps": n}) for a in ("maskgit_plus", "topk_margin", "entropy")
      for t, n in [(None, 4), (0, None), (0.3, 3), (2.0, 40)]),
    *(("dream", dream, {"alg": "origin", "alg_temp": None, "steps": n, "eps": e}) for n, e in
      [(None, 1e-3), (3, 0.5), (40, 1e-3)]),
    *(("joint_threshold", joint_threshold, {"threshold": t, "edit_threshold": e, "max_post_edit_steps": p})
      for t, e, p in [(0.5, 0.0, 16), (0.875, 0.5, 2), (1.0, 1.0, 0)]),
]  # fmt: skip


@pytest.mark.parametrize("block", [1, 4, 13, 32])
@pytest.mark.parametrize(
    ("name", "formula", "options"),
    [pytest.param(*c, id=f"{c[0]}: {', '.join(map(str, c[2].values()))}") for c in CASES],
)
def test_a_rule_is_its_formula(
    name: str, formula: Callable[..., list[int]], options: dict[str, Any], block: int
) -> None:
    policy = policy_of(name, **options)
    assert isinstance(policy, DecodeRule)
    rng = random.Random(f"{name} {options} {block}")
    for _ in range(40):
        sequences = [draw(rng, block, traits_of(policy).edits) for _ in range(rng.randint(1, 5))]
        chosen = policy.choose(together(sequences))
        assert chosen.dtype == torch.bool
        for sequence, row in zip(sequences, chosen, strict=True):
            got = row.nonzero()[:, 0].tolist()
            assert got == sorted(formula(sequence, **options)), sequence
            assert traits_of(policy).edits or set(got) <= set(sequence.open)
            assert got or traits_of(policy).may_wait or not sequence.open


@pytest.mark.parametrize("block", [1, 4, 13, 32])
@pytest.mark.parametrize(
    ("formula", "policy"),
    [
        *((fixed_steps, FixedSteps(n, s, "random_order")) for n in (1, 3, 8, 40) for s in ("block", "masks")),
        *((sequential, Sequential(n)) for n in (None, 1, 3, 40)),
    ],
    ids=lambda value: getattr(value, "__name__", None) or repr(value),
)
def test_what_is_foreseen_is_what_is_chosen(formula: Callable[..., list[int]], policy: Any, block: int) -> None:
    """In order, if every masked position gets a candidate."""
    rng = random.Random(f"{policy} {block}")
    assert traits_of(policy).foresees
    for _ in range(40):
        sequences = [draw(rng, block) for _ in range(rng.randint(1, 5))]
        for sequence in sequences:
            sequence.c = [0.5 if masked else NONE for masked in sequence.masked]
        seen = together(sequences)
        assert seen.order is not None
        coming = policy.foresee(seen.masked, seen.step, seen.decoded, seen.order)
        assert coming.shape == (len(sequences), math.ceil(block / min(block, policy.steps or block)))
        for sequence, columns, row in zip(sequences, coming.tolist(), policy.choose(seen), strict=True):
            wanted = formula(sequence, **{k: v for k, v in policy.to_json().items() if k != "rule"})
            assert columns == wanted + [-1] * (len(columns) - len(wanted))
            assert sorted(wanted) == row.nonzero()[:, 0].tolist()


def test_who_foresees() -> None:
    found = {name for name, policy in PRESETS.items() if traits_of(policy).foresees}
    assert found == {"dkv_greedy"}
    assert not traits_of(FixedSteps(3)).foresees
    assert not traits_of(FixedSteps(3, remasking="random")).foresees
    assert not traits_of(object()).foresees


def test_no_sequences_are_no_decisions() -> None:
    rng = random.Random(0)
    whole = together([draw(rng, 4)])
    empty = {name: value[:0] for name, value in vars(whole).items() if isinstance(value, Tensor)}
    none = Candidates(**empty, measured={name: value[:0] for name, value in whole.measured.items()})
    for name, _, options in CASES:
        assert policy_of(name, **options).choose(none).shape == (0, 4)


# -- whole blocks ------------------------------------------------------------------------------------------------


def play(policy: Any, confidences: list[list[float]], steps: int = 200) -> list[list[int]]:
    """Positions per step until a block with these confidences in each step (the last one again) has no mask."""
    block = len(confidences[0])
    masked, history, decoded, step = [True] * block, [], 0, 0
    while any(masked):
        assert len(history) < steps
        c = confidences[min(len(history), len(confidences) - 1)]
        given = [single(x) if m else NONE for x, m in zip(c, masked, strict=True)]
        row = Sequence(
            given, masked, [0] * block, [9] * block, step, decoded, len(history), given,
            [-x for x in given], [0.5] * block, [0.5] * block, [False] * block, 0,
        )  # fmt: skip
        chosen = policy.choose(together([row]))[0].nonzero()[:, 0].tolist()
        history.append(chosen)
        masked = [m and i not in chosen for i, m in enumerate(masked)]
        decoded, step = decoded + len(chosen), step + bool(chosen)
    return history


def dream_threshold(confidences: list[list[float]], threshold: float, steps: int) -> list[list[int]]:
    """Dream's budget with what was left of it, step by step."""
    block = len(confidences[0])
    left, history, carried = list(range(block)), [], 0
    while left:
        i = len(history)
        c = confidences[min(i, len(confidences) - 1)]
        own = block // steps + (i < block % steps) if i < steps else 0
        budget = own + carried
        order = sorted(left, key=lambda p: (-single(c[p]), p))[:budget]
        chosen = [p for k, p in enumerate(order) if k == 0 or single(c[p]) >= single(threshold)]
        carried = budget - len(chosen)
        history.append(sorted(chosen))
        left = [p for p in left if p not in chosen]
    return history


@pytest.mark.parametrize("seed", range(20))
def test_dream_carries_its_budget_over(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        block = rng.randint(1, 16)
        confidences = [[rng.randint(1, 8) / 8 for _ in range(block)] for _ in range(rng.randint(1, 8))]
        threshold, steps = rng.choice([0.25, 0.625, 0.9]), rng.randint(1, block)
        want = dream_threshold(confidences, threshold, steps)
        assert play(policy_of("dream_threshold", threshold=threshold, steps=steps), confidences) == want


def test_llada_takes_its_steps_whatever_the_prompt_left_of_the_block() -> None:
    """5 masks in 3 steps: 2, 2, 1 by the masks; by the block length of 8 they would be 3, 2."""
    first = [single(x / 8) for x in range(1, 6)]
    for schedule, want in (("masks", [2, 2, 1]), ("block", [3, 2])):
        policy, counts, decoded = policy_of("fixed_steps", steps=3, schedule=schedule), [], 0
        while decoded < 5:
            row = draw(random.Random(0), 8)
            row.masked = [False] * 3 + [True] * (5 - decoded) + [False] * decoded
            row.c = [x if m else NONE for x, m in zip([0.0] * 3 + first, row.masked, strict=True)]
            row.step, row.decoded = len(counts), decoded
            counts.append(int(policy.choose(together([row])).sum()))
            decoded += counts[-1]
        assert counts == want


def test_dream_waits_where_the_schedule_gives_nothing() -> None:
    """Its first step unmasks int(4 (1 - t_1)) = int(0.999) = 0 of 4 masks in 4 steps."""
    history = play(policy_of("dream", alg="maskgit_plus", steps=4), [[0.1, 0.4, 0.3, 0.2]])
    assert history == [[], [1], [2], [0, 3]]
    assert play(policy_of("dream", alg="entropy", steps=1), [[0.1, 0.2]]) == [[0, 1]]


def test_dreams_schedule_is_the_one_of_its_code() -> None:
    """torch.linspace in fp32 and int() on the host, for all blocks and steps up to 40."""
    for steps in range(1, 41):
        t = torch.linspace(1, 1e-3, steps + 1)
        masks = torch.arange(1, 41)
        rows = [[0.5] * m + [NONE] * (40 - m) for m in masks.tolist()]
        for i in range(steps):
            share = 1 - t[i + 1] / t[i]
            want = [int(m * share) if i < steps - 1 else m for m in masks.tolist()]
            candidates = together([plain(row, i) for row in rows])
            assert policy_of("dream", alg="maskgit_plus", steps=steps).choose(candidates).sum(1).tolist() == want


def test_a_temperature_on_the_order_draws_as_multinomial_does() -> None:
    """First picks of 20,000 draws: chi-square against the softmax of the score."""
    n, score = 20_000, torch.tensor([0.9, 0.5, 0.2, 0.7])
    noise = torch.randint(0, 2**24, (n, 4), generator=torch.Generator().manual_seed(3)) / 2**24
    sequence = plain(score.tolist(), 1)
    rows = together([sequence])
    given = {name: value for name, value in vars(rows).items() if isinstance(value, Tensor)}
    many = {name: value.expand(n, *value.shape[1:]) for name, value in given.items()}
    policy = policy_of("dream", alg="maskgit_plus", alg_temp=0.4, steps=3)
    chosen = policy.choose(Candidates(**many | {"noise": noise}))
    assert chosen.sum(1).tolist() == [1] * n
    expected = (score / 0.4).softmax(0) * n
    chi = ((chosen.sum(0) - expected).square() / expected).sum()
    assert chi < 16.3  # 3 degrees of freedom, p = 0.001
    assert chosen.equal(policy.choose(Candidates(**many | {"noise": noise})))


def test_the_uniform_border_cases_are_finite() -> None:
    noise = torch.tensor([[0.0, 1 - 2**-24]])
    row = together([plain([0.5, 0.5], 1)])
    policy = policy_of("dream", alg="maskgit_plus", alg_temp=1.0, steps=3)
    assert policy.choose(Candidates(**vars(row) | {"noise": noise})).sum() <= 1


# -- editing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, 1, 3, 16])
@pytest.mark.parametrize("seed", range(10))
def test_joint_threshold_over_whole_blocks(seed: int, limit: int) -> None:
    """Against SGLang's loop for one sequence: what is written in each pass, and when it stops."""
    rng = random.Random(seed)
    policy = policy_of("joint_threshold", threshold=0.5, edit_threshold=0.25, max_post_edit_steps=limit)
    assert isinstance(policy, DecodeRule)
    for _ in range(20):
        block, prompt = 8, rng.randint(0, 7)
        forwards = [([rng.randrange(3) for _ in range(block)], [rng.randint(1, 8) / 8 for _ in range(block)])
                    for _ in range(40)]  # fmt: skip
        quiet = rng.randint(3, 30)  # from here on the model repeats itself
        forwards[quiet:] = [forwards[quiet]] * (40 - quiet)

        def answer(number: int, forwards: list[Any] = forwards) -> tuple[list[int], list[float]]:
            return forwards[min(number, 39)]

        want = [0] * prompt + [-5] * (block - prompt)
        post = number = 0
        while True:
            token, c = answer(number)
            number += 1
            masks = [i for i in range(block) if want[i] == -5]
            if not masks:
                post += 1
                if post > limit:
                    number -= 1  # a forward without effect
                    break
            write = [i for i in masks if c[i] > 0.5] or sorted(masks, key=lambda i: (-c[i], i))[:1]
            write += [i for i in range(prompt, block) if i not in masks and token[i] != want[i] and c[i] > 0.25]
            if not write:
                break
            for i in write:
                want[i] = token[i]

        tokens, masked, passes, taken = [0] * prompt + [-5] * (block - prompt), [False] * prompt, 0, 0
        masked += [True] * (block - prompt)
        while True:
            token, c = answer(taken)
            taken += 1
            offered = [single(x) for x in c]
            editable = [not m and i >= prompt for i, m in enumerate(masked)]
            row = Sequence(offered, masked, token, tokens, 0, 0, 0, *[offered] * 4, editable, passes)
            candidates = together([row])
            chosen = policy.choose(candidates)
            settled = policy.settled(candidates, chosen).item()
            passes += not any(masked)
            for i in chosen[0].nonzero()[:, 0].tolist():
                tokens[i], masked[i] = token[i], False
            if settled:
                break
        assert tokens == want
        assert taken == number


@pytest.mark.parametrize("remask_threshold", [0.0, 0.4, 0.7, 1.0])
@pytest.mark.parametrize("seed", range(10))
def test_what_is_masked_again_is_less_than_what_is_decoded(seed: int, remask_threshold: float) -> None:
    """Whatever is predicted, and for a block that begins with tokens of the prompt: these stay, and it ends."""
    rng, block, given = random.Random(seed), 12, 3
    policy = HierarchicalRemask(remask_threshold=remask_threshold)
    masked, steps, again = [i >= given for i in range(block)], 0, 0
    while any(masked):
        sequence = draw(rng, block, edit=True)
        sequence.masked = list(masked)
        sequence.c = [single(rng.random()) for _ in masked]
        sequence.editable = [i >= given and not m for i, m in enumerate(masked)]
        seen = together([sequence])
        chosen = policy.choose(seen)
        back = policy.remask(seen, chosen)
        doubtful = set(sequence.taken_back_below(remask_threshold))
        taken, returned = ({int(i) for i in flags[0].nonzero()} for flags in (chosen, back))
        assert returned == doubtful - taken
        left = [(m and i not in taken) or i in returned for i, m in enumerate(masked)]
        assert sum(left) < sum(masked)
        assert not any(left[:given])
        assert bool(policy.settled(seen, chosen)) == (not any(left))
        masked, steps, again = left, steps + 1, again + len(returned)
    assert steps <= block - given
    assert again or remask_threshold < 0.5


@pytest.mark.parametrize("block", [1, 4, 13, 32])
def test_hierarchical_without_second_thoughts(block: int) -> None:
    rng = random.Random(block)
    for _ in range(40):
        rows = together([draw(rng, block, edit=True) for _ in range(3)])
        chosen = HierarchicalRemask(0.75, 0.25, 0.0).choose(rows)
        assert chosen.equal(policy_of("hierarchical", threshold=0.75, low_threshold=0.25).choose(rows))


def test_a_rule_that_does_not_edit_settles_with_its_last_mask() -> None:
    rows = together([plain([0.5, NONE, 0.5], 0), plain([NONE, 0.5, NONE], 0)])
    policy = policy_of("confidence_threshold", threshold=0.9)
    assert isinstance(policy, DecodeRule)
    assert policy.settled(rows, policy.choose(rows)).tolist() == [False, True]
