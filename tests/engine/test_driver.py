"""Random schedules on a model without weights: every request gets what it gets alone, whoever comes and goes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from dgraph.engine.scheduling.schedulers import LookAhead
from dgraph.lowering.program import ProgramResult
from dgraph.runtime import BlockSession
from dgraph.runtime.decoding import Decoding
from dgraph.runtime.graphs.pool import GraphPool
from dgraph.runtime.policies import Candidates
from dgraph.runtime.policies.mixture import _REFUSALS, Refusals, refusing
from dgraph.runtime.sampling.sampler import RowContext, Sampler
from dgraph.runtime.sampling.stops import trim
from dgraph.runtime.stats import StepRecord
from tests.amounts import drawn
from tests.engine.driven import Asked, Letters, Turns, alone, filled
from tests.runtime.fake import MASK, FakeProgram, first_key, make_session
from tests.runtime.recorder import Recorder
from tests.runtime.test_growth import Growing, Patient

BLOCK = 4
LONGEST = 5 * BLOCK
PAGE_BYTES = BLOCK * 2 * (1 * 2 + 3 * 2) * 4
"""Two caches of two layers in fp32, see `FakeProgram`."""
_RANDOM = random.Random(5)
STEMS = [[_RANDOM.randrange(MASK) for _ in range(3 * BLOCK)] for _ in range(2)]
PROMPTS = [
    (*stem[:begin], *(_RANDOM.randrange(MASK) for _ in range(own)))
    for stem in STEMS
    for begin, own in ((0, 1), (3, 0), (4, 0), (4, 3), (8, 1), (8, 5), (12, 0), (12, 3))
]

RULES: list[dict[str, Any]] = [
    *({"threshold": t} for t in (0.3, 0.8, 1.0)),
    *({"steps": n} for n in (1, 2, 3, 9)),
    {"policy": "sequential"},
    {"policy": "dynamic_threshold"},
    {"policy": "factor"},
    {"policy": "relative_threshold"},
    {"policy": "hierarchical"},
    {"policy": Growing(2, 2)},
]
SECOND_THOUGHTS: list[dict[str, Any]] = [
    {"policy": "hierarchical_remask"},
    {"policy": "joint_threshold", "threshold": 0.3},
]
"""Rules that take tokens back, or change them; no block cache goes with them."""
HEAT: dict[str, list[dict[str, Any]]] = {
    "step": [{}],
    "evict": [{}],
    "sample": [{}, {"temperature": 0.7}],
    "logits": [{}, {"temperature": 1.0}, {"temperature": 0.5, "top_p": 0.9}, {"top_k": 4, "temperature": 1.0}],
}
STOP = 3
STOPS = [(), (), ("a",), ("ab", "\n"), ("€", "c ")]
KINDS: dict[str, dict[str, Any]] = {"step": {}, "evict": {"block_cache": "dc+"}, "sample": {}, "logits": {}}
SCHEDULERS = ["look_ahead", "fcfs", "prefill_first", "static", LookAhead(delay=9, patience=1)]


@st.composite
def decodings(draw: st.DrawFn, kind: str) -> Decoding:
    new = draw(st.sampled_from([1, 3, 4, 7, 12]))
    return Decoding(
        max_new_tokens=new,
        min_tokens=min(new, draw(st.sampled_from([0, 0, 2, 6]))),
        ignore_eos=draw(st.booleans()),
        seed=draw(st.integers(0, 1)),
        stop=draw(st.sampled_from(STOPS)),
        **draw(st.sampled_from(RULES if "block_cache" in KINDS[kind] else [*RULES, *SECOND_THOUGHTS])),
        **draw(st.sampled_from(HEAT[kind])),
    )


@st.composite
def schedules(draw: st.DrawFn, kind: str) -> list[Asked]:
    one = st.builds(
        Asked,
        ids=st.sampled_from(PROMPTS),
        decoding=decodings(kind),
        index=st.integers(0, 1),
        turn=st.integers(0, 12),
        priority=st.integers(-1, 1),
        cancel=st.none() | st.none() | st.integers(0, 12),
        draft=st.booleans(),
    )
    return [filled(draw, each, BLOCK, MASK) for each in draw(st.lists(one, min_size=1, max_size=7))]


def engines() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "max_sequences": st.integers(1, 4),
            "max_tokens": st.just(LONGEST + 12),
            "max_batched_rows": st.sampled_from([2 * BLOCK, 3 * BLOCK, 5 * BLOCK, 100]),
            "max_mixed_rows": st.sampled_from([None, None, 0, BLOCK, 2 * BLOCK, 4 * BLOCK]),
            "kv_bytes": st.sampled_from([8, 10, 14, 100]).map(lambda pages: pages * PAGE_BYTES),
            "scheduler": st.sampled_from(SCHEDULERS),
            "pages": st.sampled_from(["block", "life"]),
            "prefix_cache": st.booleans(),
        }
    )


def made(kind: str, **changes: Any) -> BlockSession:
    return make_session(BLOCK, kind, **{**KINDS[kind], **changes})


def served(kind: str, asked: list[Asked], engine: dict[str, Any], **changes: Any) -> Turns:
    """Serve a schedule and compare each request with what it gets alone."""
    turns = Turns(made(kind, **changes), asked, **engine)
    turns.run()
    for told, one in zip(turns.told, asked, strict=True):
        wanted = alone((kind, *changes.items()), made(kind, **changes), one)
        if told.finish == "cancelled":
            assert told.token_ids == wanted.token_ids[: len(told.token_ids)]
            assert told.step_map == wanted.step_map[: len(told.token_ids)]
            assert told.confidence == wanted.confidence[: len(told.token_ids)]
            assert wanted.text.startswith(told.text)
        else:
            told.check_as(wanted)
    return turns


@pytest.mark.parametrize("kind", KINDS)
@drawn(6, 60, data=st.data())
def test_every_request_gets_what_it_gets_alone(kind: str, data: st.DataObject) -> None:
    served(kind, data.draw(schedules(kind)), data.draw(engines()))


@pytest.mark.parametrize("page", [2, 4, 8])
@pytest.mark.parametrize("recommit", [True, False])
@drawn(3, 15, data=st.data())
def test_pages_of_other_sizes_and_blocks_that_are_not_computed_again(
    page: int, recommit: bool, data: st.DataObject
) -> None:
    engine = {**data.draw(engines()), "kv_bytes": data.draw(st.sampled_from([40, 56, 400])) * PAGE_BYTES // BLOCK}
    served("evict", data.draw(schedules("evict")), engine, page_size=page, recommit=recommit)


@pytest.mark.parametrize("kind", ["step", "evict"])
def test_events_say_what_an_observer_sees(kind: str) -> None:
    """With which probability each token was committed, and which positions of the block each step evicted."""
    decoding, prompt = Decoding(max_new_tokens=14, threshold=0.9, ignore_eos=True), PROMPTS[3]
    records: list[StepRecord] = []
    made(kind).generate([prompt], decoding, observer=records.append)
    (told,) = Turns(made(kind), [Asked(prompt, decoding, draft=True)], max_sequences=1, max_tokens=64).run()
    committed = {
        int(at): (record.step + 1, float(sure))
        for record in records
        for at, sure in zip(record.committed_positions, record.confidence[record.committed], strict=True)
    }
    wanted = [committed[len(prompt) + place] for place in range(len(told.token_ids))]
    assert list(zip(told.step_map, told.confidence, strict=True)) == wanted
    assert len(told.drafts) == len(records)
    for draft, record in zip(told.drafts, records, strict=True):
        evicted = {int(at) - len(prompt) - draft.offset for at in record.positions[~record.kept]}
        assert [place for place, kept in enumerate(draft.kept) if not kept] == sorted(
            place for place in evicted if 0 <= place < len(draft.kept)
        )
    assert (kind == "evict") == any(not all(draft.kept) for draft in told.drafts)


@pytest.mark.parametrize("text", [False, True])
@drawn(
    6,
    40,
    prompt=st.sampled_from(PROMPTS),
    new=st.integers(1, 12),
    least=st.integers(0, 12),
    rule=st.sampled_from(RULES),
)
def test_nothing_ends_a_response_that_is_too_short(
    text: bool, prompt: tuple[int, ...], new: int, least: int, rule: dict[str, Any]
) -> None:
    least = min(least, new)
    stops = {"stop": ("a", "k", "€"), "ignore_eos": True} if text else {}
    whole = made("step").generate([prompt], max_new_tokens=new, ignore_eos=True, **rule).token_ids[0]
    decoding = Decoding(max_new_tokens=new, min_tokens=least, **stops, **rule)
    (told,) = Turns(made("step"), [Asked(prompt, decoding)], max_sequences=1, max_tokens=64).run()
    ends = (at for at, token in enumerate(whole) if at >= least and token == STOP)
    wanted = trim(Letters(), whole, stops["stop"], least).token_ids if text else whole[: next(ends, new)]
    assert told.token_ids == wanted
    assert told.finish == ("length" if len(wanted) == new else "stop")
    if not text:
        assert made("step").generate([prompt], decoding).token_ids[0] == wanted


# -- fixed tokens -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["joint_threshold", "hierarchical_remask", "llada2.1"])
@drawn(3, 30, data=st.data())
def test_rules_that_change_their_mind_leave_fixed_tokens_alone(rule: str, data: st.DataObject) -> None:
    decoding = Decoding(max_new_tokens=11, policy=rule, ignore_eos=data.draw(st.booleans()))
    one = st.builds(Asked, ids=st.sampled_from(PROMPTS), decoding=st.just(decoding), turn=st.integers(0, 3))
    asked = [filled(data.draw, each, BLOCK, MASK) for each in data.draw(st.lists(one, min_size=1, max_size=4))]
    served("step", asked, data.draw(engines()))


@pytest.mark.parametrize(("kind", "cache"), [("step", "off"), ("step", "dc"), ("evict", "dc+"), ("evict", "off")])
@drawn(
    6,
    30,
    prompt=st.sampled_from(PROMPTS),
    decoding=st.builds(
        lambda rule: Decoding(max_new_tokens=17, ignore_eos=True, **rule),
        st.sampled_from([rule for rule in RULES if not isinstance(rule.get("policy"), Growing)]),  # lengths are fixed
    ),
    fixed=st.lists(st.integers(0, MASK - 1), min_size=2 * BLOCK, max_size=2 * BLOCK),
    begin=st.integers(0, 6),
)
def test_what_comes_after_fixed_tokens_is_as_after_a_prompt(
    kind: str, cache: str, prompt: tuple[int, ...], decoding: Decoding, fixed: list[int], begin: int
) -> None:
    """The keys of what was passed over have been written: blocks that follow it decode as if all before were prompt."""
    canvas = [*[None] * begin, *fixed]
    (found,) = made(kind, block_cache=cache).generate([prompt], decoding, canvases=[canvas]).token_ids
    assert found[begin : begin + len(fixed)] == fixed
    assume(MASK not in found)  # which the fake model may answer
    end = (len(prompt) + begin + len(fixed)) // BLOCK * BLOCK - len(prompt)
    rest = replace(decoding, max_new_tokens=len(found) - end)
    assert made(kind, block_cache=cache).generate(
        [[*prompt, *found[:end]]], rest, canvases=[canvas[end:]]
    ).token_ids == [found[end:]]


@pytest.mark.parametrize("place", [3, 5, 6])
def test_rows_that_are_evicted_before_a_fixed_token_have_keys(place: int) -> None:
    """A fixed token is never evicted and sees all that is before it; what lay in the pages before is none of it."""
    found = []
    for before in (0, 7):
        session = make_session(8, "evict", block_cache="dc+")
        session.kv.reserve(4)
        for cache in session.kv.tensors().values():
            cache.fill_(before)
        canvas = [*[None] * place, 5]
        found.append(session.generate([[1]], max_new_tokens=16, ignore_eos=True, canvases=[canvas]).token_ids)
    assert found[0] == found[1]


def test_a_response_without_a_free_position_takes_no_step() -> None:
    decoding, prompt = Decoding(max_new_tokens=6), [1, 2]
    for canvas, wanted in (([5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10]), ([5, STOP, 7, None], [5])):
        found = made("step").generate([prompt], decoding, canvases=[canvas])
        assert (found.token_ids, found.stats.steps) == ([wanted], 0)
        (told,) = Turns(made("step"), [Asked((1, 2), decoding, canvas=tuple(canvas))], max_sequences=1).run()
        assert (told.token_ids, told.finish) == (wanted, "stop" if STOP in canvas else "length")
        assert told.step_map == [0] * len(wanted)


# -- requests that fail -----------------------------------------------------------------------------------------------


class Poisoned(FakeProgram):
    """A program that gives NaN for a marked prompt, and leaves it in the pages of that prompt."""

    def __call__(self, inputs: Mapping[str, Tensor], rows: int) -> ProgramResult:
        for name in ("k_cache_0", "v_cache_1"):
            held = inputs[name][inputs["page_table"].long().clamp(min=0)].isnan().any()
            assert not held or self.poisoned(inputs).any(), "NaN of one who has left"
        found = super().__call__(inputs, rows)
        self.calls.clear()
        wrong = self.poisons(inputs, rows)
        if wrong.any():
            found.outputs["confidence"][:rows][wrong] = math.nan
            sequence = torch.searchsorted(inputs["cu_rows"][1:].contiguous(), torch.arange(rows).int(), right=True)
            pages = inputs["page_table"][sequence[wrong].unique()]
            inputs["k_cache_0"][pages[pages >= 0].long()] = math.nan
        return found

    @staticmethod
    def poisons(inputs: Mapping[str, Tensor], rows: int) -> Tensor:
        """bool[rows]: of sequences whose first page was marked."""
        sequence = torch.searchsorted(inputs["cu_rows"][1:].contiguous(), torch.arange(rows).int(), right=True)
        return Poisoned.poisoned(inputs)[sequence]

    @staticmethod
    def poisoned(inputs: Mapping[str, Tensor]) -> Tensor:
        """bool[b]: sequences whose first page was marked, whether they take part in the step or not."""
        first = inputs["k_cache_0"][inputs["page_table"][:, 0].long().clamp(min=0), 0, 0, 0]
        return (first == torch.tensor(first_key(MARK, 0), dtype=torch.float32)) | first.isnan()


MARK = 27
assert all(prompt[0] != MARK for prompt in PROMPTS)


@drawn(6, 50, data=st.data())
def test_one_whose_numbers_go_wrong_fails_alone(data: st.DataObject) -> None:
    asked = data.draw(schedules("step"))
    for prompt in data.draw(st.lists(st.sampled_from([(MARK,), (MARK, 1, 2, 3, 4, 5), (MARK, 7)]), min_size=1)):
        at = data.draw(st.integers(0, len(asked)))
        asked.insert(at, Asked(prompt, Decoding(max_new_tokens=9), turn=data.draw(st.integers(0, 12))))
    session = made("step")
    session.programs["step"] = Poisoned("step")
    turns = Turns(session, asked, **data.draw(engines()))
    turns.run()
    for told, one in zip(turns.told, asked, strict=True):
        if one.ids[0] == MARK:
            assert told.finish == "error"
            assert "gave no usable confidence" in str(told.events[-1].error)
            assert told.token_ids == []
        elif told.finish != "cancelled":
            told.check_as(alone(("step",), made("step"), one))
    assert not session.kv.tensors()["k_cache_0"].isnan().any(), "nobody finds NaN in a page"


class Raises:
    """A logits processor that fails when a row is of a position."""

    def __init__(self, position: int):
        self.position = position

    def __call__(self, logits: Tensor, context: RowContext) -> Tensor:
        if (context.position >= self.position).any():
            raise ArithmeticError(f"position {self.position}")
        return logits


@drawn(6, 50, data=st.data())
def test_one_whose_sampler_raises_fails_alone(data: st.DataObject) -> None:
    asked = data.draw(schedules("logits"))
    broken = []
    for position in data.draw(st.lists(st.sampled_from([0, 5, 9]), min_size=1, max_size=2)):
        decoding = Decoding(max_new_tokens=12, ignore_eos=True, sampler=Sampler(processors=(Raises(position),)))
        one = Asked((1, 2, 3), decoding, turn=data.draw(st.integers(0, 12)))
        asked.insert(data.draw(st.integers(0, len(asked))), one)
        broken.append(one)
    turns = Turns(made("logits"), asked, **data.draw(engines()))
    turns.run()
    for told, one in zip(turns.told, asked, strict=True):
        if one in broken:
            assert told.finish == "error"
            assert isinstance(told.events[-1].error, ArithmeticError)
        elif told.finish != "cancelled":
            told.check_as(alone(("logits",), made("logits"), one))


@dataclass(frozen=True)
class Fails:
    """A policy that fails in a sequence's step, be it of another policy, and commits all until then."""

    step: int

    def choose(self, candidates: Candidates) -> Tensor:
        if (candidates.step >= self.step).any():
            raise ArithmeticError(f"step {self.step}")
        return candidates.masked


@pytest.mark.parametrize("kind", ["step", "evict", "logits"])
@drawn(6, 50, data=st.data())
def test_those_whose_policy_raises_fail_alone(kind: str, data: st.DataObject) -> None:
    """Those of its kind, that is, the waiting ones among them."""
    asked = data.draw(schedules(kind))
    broken = []
    for step in data.draw(st.lists(st.sampled_from([0, 1, 3]), min_size=1, max_size=4)):
        decoding = Decoding(max_new_tokens=12, ignore_eos=True, policy=Fails(step))
        one = Asked((1, 2, 3), decoding, turn=data.draw(st.integers(0, 12)))
        asked.insert(data.draw(st.integers(0, len(asked))), one)
        broken.append(one)
    turns = Turns(made(kind), asked, **data.draw(engines()))
    turns.run()
    for told, one in zip(turns.told, asked, strict=True):
        if one in broken:
            assert told.finish == "error" or (told.finish == "length" and one.decoding.rule.step)
            assert told.finish != "error" or isinstance(told.events[-1].error, ArithmeticError)
        elif told.finish != "cancelled":
            told.check_as(alone((kind,), made(kind), one))


def test_a_policy_that_raised_is_asked_again_when_nobody_runs() -> None:
    failing, other = (Decoding(max_new_tokens=8, ignore_eos=True, policy=policy) for policy in (Fails(0), "sequential"))
    asked = [Asked((1,), other), Asked((1,), failing), Asked((2,), failing, turn=2), Asked((1,), failing, turn=60)]
    turns = Turns(made("step"), asked, max_sequences=2, max_tokens=64)
    turns.run()
    assert [told.finish for told in turns.told] == ["length", "error", "error", "error"]
    first, waiting, again = (told.events[-1].error for told in turns.told[1:])
    assert first is waiting, "it was not asked for the one that came while another ran"
    assert again is not first


class Frozen(Recorder):
    """Asks of a mixture what it asked when it was captured, as a graph does."""

    def __init__(self, function: Callable[[], None]):
        self.refused = dict(asked.errors) if (asked := _REFUSALS.get()) else {}
        super().__init__(function)

    def replay(self) -> None:
        with refusing(Refusals(self.refused, noting=False)):
            super().replay()


def test_what_was_captured_without_a_policy_that_raised_does_not_serve_it_later() -> None:
    """The same policies in the same order when nobody runs: the transition of before would fit them."""
    failing, other = (Decoding(max_new_tokens=8, ignore_eos=True, policy=policy) for policy in (Fails(0), "sequential"))
    asked = [Asked((1,), one, turn=turn) for turn in (0, 60) for one in (other, failing)]
    pool = GraphPool(recorder=Frozen)
    turns = Turns(made("step", pool=pool), asked, max_sequences=2, max_tokens=64)
    turns.run()
    assert [told.finish for told in turns.told] == ["length", "error"] * 2
    first, again = (turns.told[n].events[-1].error for n in (1, 3))
    assert isinstance(again, ArithmeticError)
    assert again is not first
    assert [name for name, _ in pool.recorded].count("transition") == 2


def test_the_error_of_one_does_not_end_the_next_of_its_slot() -> None:
    """The next one has a prompt of several turns, so that no step runs in the first of them."""
    failing = Decoding(max_new_tokens=4, sampler=Sampler(processors=(Raises(0),)))
    asked = [Asked((1,), failing), Asked(PROMPTS[7], Decoding(max_new_tokens=4))]
    turns = Turns(made("logits"), asked, max_sequences=1, max_tokens=64, max_batched_rows=2 * BLOCK)
    turns.run()
    assert turns.told[0].finish == "error"
    turns.told[1].check_as(alone(("logits",), made("logits"), asked[1]))


def test_nobody_decodes_before_its_prompt_is_there() -> None:
    asked = [Asked(PROMPTS[7], Decoding(max_new_tokens=12, threshold=0.3, ignore_eos=True))]
    turns = Turns(made("step"), asked, max_sequences=1, max_tokens=64, max_batched_rows=2 * BLOCK)
    turns.run()
    turns.told[0].check_as(alone(("step",), made("step"), asked[0]))
    assert turns.core.stages.rows["prefill"] == 12


@pytest.mark.parametrize(("sequences", "most"), [(9, 16 * BLOCK), (13, 12 * BLOCK)])
def test_a_prompt_gets_the_rows_that_steps_leave_and_a_share_of_those_that_they_do_not(
    sequences: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight others take a block each, twice that at most, so that at most nothing is left; twelve leave nothing indeed,
    and a quarter of 12 blocks is as long as the prompt.
    """
    long = Decoding(max_new_tokens=12, steps=4, ignore_eos=True)
    asked = [Asked((1,), long)] * (sequences - 1) + [Asked(PROMPTS[6], long, turn=4)]
    rows = {"max_batched_rows": most, "max_mixed_rows": 0}
    turns = Turns(made("step"), asked, max_sequences=sequences, max_tokens=64, **rows)
    runs: list[int] = []
    count = turns.core.stages.count_stage

    def counted(name: str, rows: int, padded: int, seconds: float) -> None:
        count(name, rows, padded, seconds)
        if name == "prefill":
            runs.append(rows)

    monkeypatch.setattr(turns.core.stages, "count_stage", counted)
    told = turns.run()
    assert runs == [len(PROMPTS[6])]
    told[-1].check_as(alone(("step",), made("step"), asked[-1]))


# -- prompts that begin alike, and pools that are too small -----------------------------------------------------------


@pytest.mark.parametrize("mixed", [0, None])
def test_prompts_that_begin_alike_are_prefilled_once(mixed: int | None) -> None:
    asked = [Asked(PROMPTS[7], Decoding(max_new_tokens=4), turn=9 * n) for n in range(3)]
    turns = Turns(made("step"), asked, max_sequences=2, max_tokens=64, max_mixed_rows=mixed)
    told = turns.run()
    assert [one.events[-1].usage.cached_tokens for one in told] == [0, 12, 12]
    rows = turns.core.stages.rows.get("prefill", 0), turns.core.totals.mixed_rows
    assert rows == ((12, 0) if mixed == 0 else (0, 12))
    assert turns.core.prefix is not None
    assert (turns.core.prefix.asked, turns.core.prefix.found) == (36, 24)


@pytest.mark.parametrize("kind", ["sample", "evict"])
def test_who_gives_way_says_the_same_later(kind: str) -> None:
    decoding = Decoding(max_new_tokens=18, threshold=1.0, ignore_eos=True, **HEAT[kind][-1])
    asked = [Asked(PROMPTS[n], decoding, index=n) for n in range(4)]
    turns = served(kind, asked, {"max_sequences": 4, "max_tokens": 32, "kv_bytes": 9 * PAGE_BYTES, "scheduler": "fcfs"})
    assert turns.core.totals.preempted > 0
    assert sum(told.events[-1].served.requeued for told in turns.told) == turns.core.totals.preempted
    # Of who gives way the step that runs is not heard of any more.
    rows, heard = list(turns.core.stages.rows.values())[-1], sum(told.events[-1].usage.rows for told in turns.told)
    rows -= turns.core.totals.mixed_rows
    assert 0 <= rows - heard <= turns.core.totals.preempted * 2 * BLOCK


@pytest.mark.parametrize("policy", [Growing(5, 1), Patient(5, 1)], ids=str)
def test_who_gives_way_after_it_has_grown_says_the_same_later(policy: Growing) -> None:
    """It goes on with the length that it had when its block began, or from the start if its rule carries something."""
    asked = [Asked(PROMPTS[n], Decoding(max_new_tokens=18, policy=policy, ignore_eos=True)) for n in range(4)]
    turns = served(
        "step", asked, {"max_sequences": 4, "max_tokens": 32, "kv_bytes": 9 * PAGE_BYTES, "scheduler": "fcfs"}
    )
    assert turns.core.totals.preempted > 0
    assert max(len(told.token_ids) for told in turns.told) > policy.first


@pytest.mark.parametrize("average", ["average", "sequence_average"])
def test_who_gives_way_keeps_the_average_of_its_steps(average: str) -> None:
    decoding = Decoding(max_new_tokens=24, threshold=0.5, ignore_eos=True)
    asked = [Asked(PROMPTS[n], decoding, index=n) for n in range(4)]
    limits = {"max_sequences": 4, "max_tokens": 40, "kv_bytes": 11 * PAGE_BYTES, "scheduler": "fcfs"}
    turns = served("evict", asked, limits, average=average)
    assert turns.core.totals.preempted > 0


def test_who_gives_way_again_goes_on_at_the_same_block() -> None:
    """It begins with what it had when it first gave way, if it has not come to another block since."""
    asked = Asked(PROMPTS[3], Decoding(max_new_tokens=18, threshold=1.0, ignore_eos=True))
    turns = Turns(made("step"), [asked], max_sequences=1, max_tokens=32, pages="block", prefix_cache=False)
    core = turns.core
    ticket = core.ticket("r0", 0, asked.request(core.session.spec), turns.told[0].events.append, False, 0)
    core.take(ticket)
    known = []
    while core.tickets:
        turns.turn()
        if ticket.slot >= 0 and core.tickets and len(known) < 6 and len(ticket.said) >= 2 * BLOCK:
            assert core._batch is not None
            core._give_way(core._batch, ticket)
            known.append(len(ticket.going_on.ids))
    assert len(known) == 6
    assert known == sorted(known)
    assert known[0] > len(asked.ids)
    turns.told[0].check_as(alone(("step",), made("step"), asked))
