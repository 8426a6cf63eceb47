"""Responses under a constraint are valid whatever a model computes and whatever a rule commits."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st

import dgraph
from dgraph.errors import InputError
from dgraph.runtime.constraints.completion import Completion
from dgraph.runtime.constraints.constraint import MOST_BYTES, Constraint
from dgraph.runtime.constraints.guide import Guide, Offer
from dgraph.runtime.constraints.vocabulary import Vocabulary, vocabulary_of
from tests.amounts import first_cases

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PROMPT = "Sort these words: river stone cloud maple"


def scalars() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"type": "null"}, {"type": "number"}]),
        st.builds(lambda n: {"type": "string", "maxLength": n}, st.integers(0, 6)),
        st.builds(lambda n: {"type": "string", "minLength": n}, st.integers(0, 6)),
        st.builds(lambda e: {"enum": e}, st.lists(st.sampled_from(["a", "bc", 1, None, "é", True]), min_size=1)),
    )


def compound(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    objects = st.builds(
        lambda parts, needed: {
            "type": "object",
            "properties": parts,
            "required": [name for name in parts if name in needed],
            "additionalProperties": False,
        },
        st.dictionaries(st.sampled_from(["a", "key", "ü", "long name"]), inner, max_size=3),
        st.sets(st.sampled_from(["a", "key", "ü", "long name"])),
    )
    arrays = st.builds(lambda items, n: {"type": "array", "items": items, "minItems": n}, inner, st.integers(0, 2))
    return objects | arrays | st.builds(lambda one, two: {"anyOf": [one, two]}, inner, inner)


SCHEMAS = st.recursive(scalars(), compound, max_leaves=4)
# Not \\d: llguidance knows digits of a later Unicode than Python does.
ATOMS = st.sampled_from(["a", "[a-z]", "[0-9]", ".", "é", "x y", "[^b]", "\\x22"])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.builds("({})({})".format, inner, inner),
        st.builds("({}|{})".format, inner, inner),
        st.builds("({}){}".format, inner, st.sampled_from(["*", "+", "?", "{2,3}", "{3}"])),
    ),
    max_leaves=5,
)


def expression(text: str) -> Constraint:
    """The constraint of an expression, unless its shortest text is longer than what is looked for."""
    try:
        return Constraint.regex(text)
    except InputError as error:
        if "that was found in time" not in str(error):
            raise
        reject()


CONSTRAINTS = st.one_of(
    SCHEMAS.map(Constraint.json_schema),
    EXPRESSIONS.map(expression),
    st.lists(st.text('ab {"é', min_size=1, max_size=6), min_size=1, max_size=4).map(Constraint.choice),
)


def valid(constraint: Constraint, text: str) -> bool:
    said = constraint.to_json()[constraint.kind]
    if constraint.kind == "choice":
        return text in said
    if constraint.kind == "regex":
        return re.fullmatch(said, text) is not None
    try:
        jsonschema.validate(json.loads(text), said)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


@cache
def model(name: str) -> Any:
    return dgraph.optimize(name, recipe="dense", backend="eager")


@cache
def vocabulary() -> Vocabulary:
    one = model("tiny_sdar")
    return vocabulary_of(one.model.tokenizer, one.spec)


def decode(constraint: Constraint, block: int, limit: int, seed: int) -> tuple[list[int], Guide]:
    """Tokens of a response to random logits, of which random positions are committed."""
    draw, words = np.random.default_rng(seed), vocabulary()
    guide = Guide(constraint, words, limit)
    ends, known = set(words.spec.eos_ids), list[int | None]()
    while len(known) < limit:
        known += [None] * block
        while None in known[:limit]:
            free = [at for at, token in enumerate(known[:limit]) if token is None]
            logits = draw.normal(0, 4, (len(free), words.spec.vocab)).astype(np.float32)
            shown = [n for n in range(len(free)) if draw.random() < 0.8] or [0]
            offers = {free[n]: Offer(logits[n], int(logits[n].argmax()), 0.5) for n in shown}
            found = guide.propose(known, offers)
            taken = draw.choice(sorted(found), size=min(len(found), int(draw.integers(1, 4))), replace=False)
            for at in taken.tolist():
                known[at] = found[at][0]
            first = next((at for at, token in enumerate(known) if token is None), len(known))
            stops = [at for at, token in enumerate(known[:first]) if token in ends]
            if stops:
                return [token for token in known[: stops[0]] if token is not None], guide
    return [token for token in known[:limit] if token is not None], guide


def check(constraint: Constraint, block: int, limit: int, seed: int) -> None:
    tokens, guide = decode(constraint, block, limit, seed)
    raw = vocabulary().bytes_of(tokens)
    more = Completion(constraint.grammar).of(raw)
    assert more is not None, (constraint, raw)
    if guide.fits:
        assert more == b"", (constraint, raw, more)
        assert valid(constraint, model("tiny_sdar").model.tokenizer.decode(tokens)), (constraint, tokens)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(CONSTRAINTS, st.sampled_from([4, 8, 32]), st.sampled_from([4, 16, 40]), st.integers(0, 999))
def test_any_commits_of_what_a_guide_proposes_are_valid(
    constraint: Constraint, block: int, limit: int, seed: int
) -> None:
    check(constraint, block, limit, seed)


@pytest.mark.release
@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(CONSTRAINTS, st.sampled_from([4, 8, 32, 128]), st.sampled_from([4, 16, 64, 128]), st.integers(0, 2**31))
def test_many_commits_of_what_a_guide_proposes_are_valid(
    constraint: Constraint, block: int, limit: int, seed: int
) -> None:
    check(constraint, block, limit, seed)


@pytest.mark.parametrize("name", ["tiny_sdar", "tiny_llada"])
@pytest.mark.parametrize(
    "how", [{}, {"steps": 4}, {"temperature": 1.5, "seed": 3}, {"policy": "dream_entropy"}], ids=str
)
def test_responses_of_a_model_satisfy_a_schema(name: str, how: Mapping[str, Any]) -> None:
    said = model(name).generate(PROMPT, constraint=Constraint.json_schema(PERSON), max_new_tokens=32, **how)
    jsonschema.validate(json.loads(said.texts[0]), PERSON)


@first_cases(
    2,
    "name, recipe",
    [
        *(("tiny_sdar", "focus"), ("tiny_llada", "dllm_serve+dyllm"), ("tiny_llada", "maskkv"), ("tiny_sdar", "dyllm")),
        *(("tiny_sdar", "dllm_serve"), ("tiny_sdar", "maskkv"), ("tiny_llada", "fast_dllm"), ("tiny_llada", "focus")),
        *(("tiny_llada", "dllm_cache"), ("tiny_llada", "dkv_cache"), ("tiny_llada", "maskkv+dyllm+focus")),
    ],
)
def test_a_schema_holds_under_every_recipe(name: str, recipe: str) -> None:
    constraint, ran = Constraint.json_schema(PERSON), dgraph.optimize(name, recipe, backend="eager")
    for said in ran.generate([PROMPT, "a b"], constraint=constraint, max_new_tokens=40).texts:
        jsonschema.validate(json.loads(said), PERSON)


@pytest.mark.parametrize("how", [{}, {"open_blocks": 3, "block_length": 8}], ids=["one block", "several"])
def test_a_model_that_is_right_stays_right(how: Mapping[str, Any]) -> None:
    free = model("tiny_sdar").generate(PROMPT, max_new_tokens=32, **how)
    held = model("tiny_sdar").generate(PROMPT, constraint=Constraint.regex("(?s:.*)"), max_new_tokens=32, **how)
    assert held.token_ids == free.token_ids


def test_a_schema_holds_with_several_open_blocks() -> None:
    """Also beside requests that open one, in steps that have room for more."""
    one, constraint = model("tiny_sdar"), Constraint.json_schema(PERSON)
    held = dgraph.Decoding(constraint=constraint, max_new_tokens=40, block_length=8)
    said = one.generate([PROMPT, "a b"], held.changed({"open_blocks": 3})).texts
    with one.engine(max_sequences=2, max_tokens=96, block_length=8, open_blocks=3) as engine:
        said += [response.text for response in engine.generate([PROMPT, "a b"], held)]
    for text in said:
        jsonschema.validate(json.loads(text), PERSON)


def test_a_bias_changes_what_a_constraint_allows() -> None:
    eight = Constraint.regex("[ab]{8}")
    first = model("tiny_sdar").generate(PROMPT, constraint=eight, max_new_tokens=16)
    bias = dict.fromkeys(first.token_ids[0], -100.0)
    other = model("tiny_sdar").generate(PROMPT, constraint=eight, max_new_tokens=16, logit_bias=bias)
    assert re.fullmatch("[ab]{8}", other.texts[0])
    assert set(other.token_ids[0]).isdisjoint(first.token_ids[0])


def test_a_response_without_tokens_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary of a model may lack a byte that its constraint demands; neighbours go on."""
    one = model("tiny_sdar")
    ways = Vocabulary.tokens_of
    monkeypatch.setattr(Vocabulary, "tokens_of", lambda self, text: () if b"\xc3" in text else ways(self, text))
    alone, lacking, other = one_alone(24), Constraint.choice(["é"]), Constraint.choice(["yes", "no"])
    with one.engine(max_sequences=2, max_tokens=96) as engine, ThreadPoolExecutor() as threads:
        asked = [
            threads.submit(engine.generate, [PROMPT], dgraph.Decoding(max_new_tokens=24, constraint=constraint))
            for constraint in (None, lacking, other)
        ]
        with pytest.raises(InputError, match="no tokens of the model make a valid choice"):
            asked[1].result()
        assert asked[0].result()[0].text == alone
        assert asked[2].result()[0].text in ("yes", "no")
        assert engine.generate([PROMPT], max_new_tokens=24)[0].text == alone


@cache
def one_alone(tokens: int) -> str:
    return str(model("tiny_sdar").generate([PROMPT], max_new_tokens=tokens).texts[0])


def test_a_response_that_is_cut_can_be_completed() -> None:
    constraint = Constraint.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 40})
    said = model("tiny_sdar").generate(PROMPT, constraint=constraint, max_new_tokens=16)
    assert len(said.token_ids[0]) == 16
    assert Completion(constraint.grammar).of(said.texts[0].encode())


def test_an_engine_serves_both_kinds_together() -> None:
    one = model("tiny_sdar")
    alone = one.generate([PROMPT], max_new_tokens=24).texts
    free = dgraph.Decoding(max_new_tokens=24)
    held = dgraph.Decoding(max_new_tokens=24, constraint=Constraint.json_schema(PERSON))
    with one.engine(max_sequences=4, max_tokens=96) as engine, ThreadPoolExecutor() as threads:
        asked = [threads.submit(engine.generate, [PROMPT], chosen) for chosen in (free, held, free, held)]
        said = [each.result()[0].text for each in asked]
    assert said[0] == said[2] == alone[0]
    for text in (said[1], said[3]):
        jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize(
    ("kind", "bad", "words"),
    [
        ("json_schema", {"type": "object", "properties": {"a": {"type": "integr"}}}, "/properties/a"),
        ("json_schema", "{bad", "line 1 column 2"),
        ("json_schema", " " * 10**6, "1,000,000"),
        ("json_schema", False, "nsatisfiable"),
        ("json_schema", {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}, "no text"),
        ("regex", "a(b", "unclosed group"),
        ("regex", "a[^\\s\\S]", "no text"),
        ("regex", "a" * (MOST_BYTES + 1), "at most"),
        ("choice", [], "at least one"),
        ("choice", "ab", "list"),
        ("lark", "start: foo", "foo"),
        ("lark", '%llguidance {"no_forcing": false}\nstart: "a"', "Leave the line out"),
        ("lark", 'start: "a" start', "no text"),
    ],
)
def test_a_bad_constraint_is_refused(kind: str, bad: Any, words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        getattr(Constraint, kind)(bad)
    assert caught.value.field == "constraint"


def test_a_constraint_has_a_form_in_json() -> None:
    for constraint in (Constraint.json_schema(PERSON), Constraint.regex("a+"), Constraint.choice(["a", "b"])):
        chosen = dgraph.Decoding(constraint=constraint)
        assert dgraph.Decoding.from_json(json.loads(json.dumps(chosen.to_json()))) == chosen


def test_rules_that_change_commits_are_refused() -> None:
    with pytest.raises(InputError, match="replaces committed tokens"):
        model("tiny_llada").generate(PROMPT, constraint=Constraint.regex("a+"), policy="llada2.1")


@pytest.mark.parametrize("name", ["ignore_eos", "min_tokens", "stop"])
def test_settings_that_end_responses_elsewhere_are_refused(name: str) -> None:
    value = {"ignore_eos": True, "min_tokens": 3, "stop": ["x"]}[name]
    with pytest.raises(InputError, match=name):
        dgraph.Decoding(constraint=Constraint.regex("a+"), **{name: value})
