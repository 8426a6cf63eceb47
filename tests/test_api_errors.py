"""Bad input to the entry points: each one clear message, before anything runs."""

from __future__ import annotations

import pickle
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import dgraph
from dgraph.errors import (
    CaptureError,
    CheckpointError,
    DgraphError,
    InputError,
    LoweringError,
    PassError,
    UnknownName,
    VerifyError,
)
from dgraph.ir.graph import Graph
from dgraph.passes import CacheKV, PackRows, Pass
from dgraph.recipes import RECIPES, build
from dgraph.runtime import FixedSteps
from tests.compiled import compiled
from tests.tiny import BLOCK, MASK, draw


@pytest.fixture(scope="module")
def dense(model: dgraph.Model) -> dgraph.CompiledModel:
    return compiled(model, "dense")


@pytest.fixture
def captured_before(captured: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dgraph.compiler.base_graph.capture_or_load", lambda *_: (captured.copy(), True))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"recipe": "focsu"}, UnknownName, r"unknown recipe 'focsu'\. Did you mean 'focus'\? Known: dense, "),
        ({"alhpa": 2.0}, UnknownName, r"unknown option of recipe 'focus' 'alhpa'\. Did you mean 'alpha'"),
        ({"recipe": "dense", "alpha": 2.0}, UnknownName, r"unknown option of recipe 'dense' 'alpha'"),
        ({"alpha": 0.99}, InputError, r"alpha must be at least 1 .*got 0\.99"),
        ({"alpha": float("nan")}, InputError, r"alpha must be at least 1 .*got nan"),
        ({"after": 4}, InputError, r"EvictTokens: after=4 is not a layer of this model, which has 0\.\.3"),
        ({"after": 0}, InputError, r"after must be a layer of at least 1 for signal='delta', got 0"),
        ({"block_cache": "on"}, InputError, r"block_cache must be one of 'off', 'dc', 'dc\+', got 'on'"),
        ({"recommit": "no"}, InputError, r"recommit must be True or False, got 'no'"),
        ({"max_num_logits": 0}, InputError, r"max_num_logits .* at least 1, got 0"),
        ({"backend": "indcutor"}, InputError, r"backend must be one of 'inductor', 'eager', 'auto', got 'indcutor'"),
        ({"buckets": "big"}, InputError, r"buckets must be 'exact', 'hybrid', .* or a list of row counts .*got 'big'"),
        ({"buckets": [0, 8]}, InputError, r"buckets must be .*got \[0, 8\]"),
        ({"warmup": "full"}, InputError, r"warmup must be a WarmUp\(batch=\.\.\.\), or None, got 'full'"),
        (
            {"warmup": dgraph.WarmUp(batch=2), "graphs": False},
            InputError,
            r"warmup captures .*, but graphs=False",
        ),
        (
            {"compilation": dgraph.Compilation()},
            InputError,
            r"backend cannot be set beside a Compilation",
        ),
        ({"artifacts": 3}, InputError, r"artifacts must be True, False or a folder, got 3"),
        ({"facts": {"mask": 3}}, UnknownName, r"unknown fact 'mask'\. Did you mean 'mask_id'"),
        ({"facts": {"mask_id": 97}}, InputError, r"needs a mask token; got mask_id=97 with a vocabulary of 97"),
    ],
)
def test_optimize(
    model: dgraph.Model, options: dict[str, Any], error: type[Exception], message: str, captured_before: None
) -> None:
    with pytest.raises(error, match=message):
        dgraph.optimize(model, **{"backend": "eager", **options})


def test_optimize_with_a_finished_recipe(model: dgraph.Model) -> None:
    recipe = build(RECIPES, "dense", model.spec, {})
    with pytest.raises(InputError, match=r"options alpha were given beside a finished recipe"):
        dgraph.optimize(model, recipe, alpha=1.5)


@pytest.mark.parametrize("recipe", [None, 3, build])
def test_optimize_with_what_is_no_recipe(model: dgraph.Model, recipe: Any) -> None:
    with pytest.raises(
        InputError, match=r"recipe must be a name, a dgraph\.Recipe or options .*, got .*`dgraph recipes` lists"
    ):
        dgraph.optimize(model, recipe)


@pytest.mark.parametrize("step", [CacheKV, "CacheKV", None])
def test_a_phase_of_what_is_no_pass(step: Any) -> None:
    with pytest.raises(InputError, match=r"phase 'step': passes are objects of subclasses .*, as CacheKV\(\), got"):
        dgraph.Phase("step", (PackRows(), step))


def test_a_phase_of_a_pass_that_says_too_little() -> None:
    @dataclass(frozen=True)
    class Idle(Pass):
        pass

    with pytest.raises(InputError, match="pass Idle must say its effect and its summary and its run; see"):
        dgraph.Phase("step", (PackRows(), Idle()))


@pytest.mark.parametrize("what", ["no_such_model", "tiny_sda"])
def test_optimize_an_unknown_model(what: str) -> None:
    with pytest.raises(UnknownName, match=f"unknown model '{what}'"):
        dgraph.optimize(what)


def test_optimize_a_missing_folder() -> None:
    with pytest.raises(CheckpointError, match="is not a checkpoint folder"):
        dgraph.optimize("./no/such/folder")


PROMPT = [draw(9)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"either prompts \(texts\) or input_ids"),
        ({"prompts": "a", "input_ids": PROMPT}, r"either prompts \(texts\) or input_ids"),
        ({"prompts": "a"}, r"came without a tokenizer; pass input_ids"),
        ({"input_ids": [[]]}, r"prompt 0 is empty"),
        ({"input_ids": [[1], []]}, r"prompt 1 is empty"),
        ({"input_ids": [1, 2]}, r"input_ids must be a list of ids per prompt, got \[1, 2\]"),
        ({"input_ids": [[1, "2"]]}, r"prompt 0: token 1 is '2', expected an integer id"),
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, r"input_ids must be int64 \[b, t\], got torch\.int64 \[3\]"),
        ({"input_ids": torch.zeros(1, 3)}, r"input_ids must be int64 \[b, t\], got torch\.float32 \[1, 3\]"),
        ({"input_ids": [[1, 97]]}, r"prompt 0: token 1 is 97, outside the vocabulary of 97"),
        ({"input_ids": [[1, MASK]]}, r"prompt 0: token 1 is the mask token \(id 96\)"),
        ({"input_ids": [[1] * 4090]}, r"prompt 0: 4090 tokens and max_new_tokens=16 .* more than the 4096"),
        ({"input_ids": PROMPT, "threshold": 0.0}, r"threshold is a probability in \(0, 1\], got 0\.0"),
        ({"input_ids": PROMPT, "threshold": 1.1}, r"threshold is a probability in \(0, 1\], got 1\.1"),
        ({"input_ids": PROMPT, "threshold": 0.9, "steps": 4}, r"either threshold \(0\.9\) or steps \(4\), not both"),
        ({"input_ids": PROMPT, "steps": 0}, r"steps .*got 0"),
        ({"input_ids": PROMPT, "max_new_tokens": 0}, r"max_new_tokens must be at least 1, got 0"),
        ({"input_ids": PROMPT, "block_length": 0}, r"block_length must be at least 1, got 0"),
        ({"input_ids": PROMPT, "temperature": -1.0}, r"temperature is a finite number, at least 0, got -1\.0"),
        ({"input_ids": PROMPT, "policy": 3}, r"policy must be a name, or an object with choose.*, got 3; `dgraph pol"),
        ({"input_ids": PROMPT, "policy": FixedSteps}, r"policy must be .*\(an object, not its class\), got <class"),
        ({"input_ids": PROMPT, "max_batch": 0}, r"max_batch must be at least 1, got 0"),
    ],
)
def test_generate(dense: dgraph.CompiledModel, settings: dict[str, Any], message: str) -> None:
    steps: list[Any] = []
    with pytest.raises(InputError, match=message):
        dense.generate(**{"max_new_tokens": 16, "observer": steps.append, **settings})
    assert steps == [], "nothing ran"
    assert dense.generate(input_ids=PROMPT, max_new_tokens=1).stats.tokens == 1, "and nothing broke"


class Chooses:
    """A policy that chooses as it was told."""

    def __init__(self, choose: Any):
        self.choose = choose


@pytest.mark.parametrize(
    ("choose", "got"),
    [
        (lambda candidates: None, "None"),
        (lambda candidates: candidates.committable.long(), r"torch\.int64 \[1, \d+\]"),
        (lambda candidates: candidates.confidence, r"torch\.float32 \[1, \d+\]"),
        (lambda candidates: candidates.committable[:, :3], r"torch\.bool \[1, 3\]"),
    ],
    ids=["nothing", "numbers", "confidence", "a part"],
)
def test_a_policy_that_chooses_what_is_no_choice(dense: dgraph.CompiledModel, choose: Any, got: str) -> None:
    with pytest.raises(InputError, match=rf"Chooses: choose returns a tensor torch\.bool \[1, \d+\], .* got {got}\."):
        dense.generate(input_ids=PROMPT, policy=Chooses(choose), max_new_tokens=16)
    assert dense.generate(input_ids=PROMPT, max_new_tokens=1).stats.tokens == 1, "and nothing broke"


def test_a_policy_that_commits_nothing_is_named(dense: dgraph.CompiledModel) -> None:
    waits = Chooses(lambda candidates: torch.zeros_like(candidates.committable))
    with pytest.raises(DgraphError, match=r"prompt 0 .*, or Chooses chose none of its masks.*waits without may_wait"):
        dense.generate(input_ids=PROMPT, policy=waits, max_new_tokens=16)


def test_prompts_that_are_no_texts(dense: dgraph.CompiledModel) -> None:
    class Letters:
        def encode(self, prompt: str) -> list[int]:
            return [ord(c) % MASK for c in prompt]

        def decode(self, ids: Any) -> str:
            return "x" * len(ids)

    model = dgraph.Model("letters", dense.model.module, dense.spec, Letters(), dense.model.prefix)
    optimized = dgraph.CompiledModel.__new__(dgraph.CompiledModel)
    optimized.__dict__.update(dense.__dict__, model=model)
    with pytest.raises(InputError, match=r"prompts must be texts, got 3; pass ids as input_ids"):
        optimized.generate([3])  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"prompts must be texts, got \{'type': 'image_url'\}"):
        optimized.generate(["what is this?", {"type": "image_url"}])  # type: ignore[list-item]
    with pytest.raises(InputError, match=r"prompt 0 is empty"):
        optimized.generate("")
    with pytest.raises(InputError, match=r"a text has no half of a character \(a lone surrogate\)"):
        optimized.generate("a\ud800")
    with pytest.raises(InputError, match=r"canvas is a list of one canvas for each prompt, got 5"):
        optimized.generate(["ab", "c"], canvas=5)  # type: ignore[call-overload]
    result = optimized.generate(["ab", "c"], max_new_tokens=3)
    assert result.texts == ["xxx", "xxx"]
    assert result.token_ids == optimized.generate(input_ids=[[1, 2], [3]], max_new_tokens=3).token_ids


def test_another_block_length_warns(dense: dgraph.CompiledModel) -> None:
    with pytest.warns(UserWarning, match=r"block_length=4, but .* was trained with 8"):
        dense.generate(input_ids=PROMPT, max_new_tokens=4, block_length=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dense.generate(input_ids=PROMPT, max_new_tokens=4, block_length=BLOCK)


def test_no_prompts_give_no_results(dense: dgraph.CompiledModel) -> None:
    result = dense.generate(input_ids=[])
    assert (result.token_ids, result.texts, result.stats.tokens) == ([], None, 0)


def test_phases_and_passes_by_name(dense: dgraph.CompiledModel) -> None:
    assert dense.graph() is dense.phases["step"].graph
    assert dense.graph("prefill", after="PackRows").find("packed_attention")
    assert not dense.graph("prefill", after="CacheKV").find("packed_attention")
    with pytest.raises(UnknownName, match=r"unknown phase 'steps'\. Did you mean 'step'\? Known: prefill, step"):
        dense.graph("steps")
    with pytest.raises(UnknownName, match=r"unknown pass of this phase 'PakRows'\. Did you mean 'PackRows'"):
        dense.graph("step", after="PakRows")
    assert [r.name for r in dense.report["step"]] == ["PackRows", "FuseProjections", "CacheKV", "ChunkLMHead"]


def test_capture_and_phases_share_one_graph_that_is_left_alone(dense: dgraph.CompiledModel) -> None:
    assert dense.captured.history == ()
    assert dense.captured.find("attention")
    prefill, step = dense.graph("prefill", "CacheKV"), dense.graph("step", "CacheKV")
    assert prefill is step, "phases share the work of a common beginning"


def test_every_error_is_one_of_ours_and_prints_as_one_message() -> None:
    for kind in (InputError, CaptureError, CheckpointError, VerifyError, PassError, LoweringError):
        assert issubclass(kind, DgraphError)
        assert str(kind("what and why")) == "what and why"
    assert issubclass(InputError, ValueError)
    error = UnknownName("recipe", "denes", ["focus", "dense"])
    assert isinstance(error, DgraphError)
    assert isinstance(error, KeyError)
    assert str(error) == "unknown recipe 'denes'. Did you mean 'dense'? Known: dense, focus."
    assert str(UnknownName("recipe", "x", [])) == "unknown recipe 'x'. Known: none."


def test_progress_says_what_is_done(model: dgraph.Model, captured_before: None) -> None:
    told: list[str] = []
    dgraph.optimize(model, "dense", backend="eager", progress=told.append)
    assert told[:3] == ["loading", "capturing", "rewriting for dense"]


def test_a_warning_points_at_the_line_of_the_caller(dense: dgraph.CompiledModel) -> None:
    with pytest.warns(dgraph.DgraphWarning, match=f"block_length={2 * BLOCK}, but .* was trained with {BLOCK}") as told:
        dense.generate(input_ids=[[1, 2, 3]], max_new_tokens=2, block_length=2 * BLOCK)
    assert [warning.filename for warning in told] == [__file__]


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("max_new_tokens", {"max_new_tokens": 0}),
        ("min_tokens", {"max_new_tokens": 4, "min_tokens": 5}),
        ("stop", {"stop": "a"}),
        ("threshold", {"threshold": 2.0}),
        ("threshold", {"threshold": 0.5, "steps": 4}),
        ("steps", {"policy": "confidence_threshold", "steps": 4}),
        ("policy", {"policy": "no such policy"}),
        ("top_k", {"top_k": -1}),
        ("temperature", {"temperature": -1.0}),
        ("seed", {"seed": 0.5}),
    ],
)
def test_an_error_says_which_field_of_a_decoding_is_at_fault(field: str, given: dict[str, Any]) -> None:
    with pytest.raises((InputError, UnknownName)) as caught:
        dgraph.Decoding(**given)
    assert caught.value.field == field


def test_an_error_keeps_its_field_between_processes() -> None:
    error = pickle.loads(pickle.dumps(InputError("a prompt is empty.", field="prompt")))
    assert (str(error), error.field) == ("a prompt is empty.", "prompt")
