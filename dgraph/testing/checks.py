"""The checks that a method must pass, as functions; see `dgraph.testing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from dgraph import numerics
from dgraph.compiler.compiled_model import Result
from dgraph.errors import PassError, VerifyError
from dgraph.passes.base import Pass
from dgraph.passes.manager import run_passes
from dgraph.recipes import Recipe, RecipeLike
from dgraph.testing.models import TinyModel, prompts
from dgraph.testing.ranks import ranks

NEW_TOKENS = 20
"""Length of the responses that checks decode: two blocks and a half."""
TOLERANCE = 1e-4
"""Largest difference of keys and values whose sums may be reassociated; for fp32 and values of about 1."""

Options = Mapping[str, Any]


def check_lossless(
    tiny: TinyModel,
    recipe: RecipeLike,
    identity: Options,
    *,
    against: RecipeLike = "dense",
    exact: bool = False,
    **decoding: Any,
) -> None:
    """Check that a method at its identity setting gives the tokens, keys and values of the model without it.

    Keys and values are compared if both recipes keep them by position: a region that hides rows does not.

    Args:
        tiny: the model.
        recipe: the method.
        identity: the method's options at which it must change nothing.
        against: the recipe without the method.
        exact: True if keys and values must be equal bit for bit, not only to 1e-4.
        decoding: as for `CompiledModel.generate`; by default 20 tokens at a threshold of 0.7.
    """
    method, without = _keeping(tiny, tiny.recipe(recipe, **identity)), _keeping(tiny, tiny.recipe(against))
    by_position = not any(plan is not None and plan.region.hides for plan in (method.plan, without.plan))
    got = _run(tiny, method, {}, keep_kv=by_position, **decoding)
    wanted = _run(tiny, without, {}, keep_kv=by_position, **decoding)
    _same_tokens(tiny, got, wanted, f"{_name(recipe)} with {dict(identity)}", _name(against))
    for index, (mine, other) in enumerate(zip(got.kv or (), wanted.kv or (), strict=True)):
        for layer, pairs in enumerate(zip(mine.layers, other.layers, strict=True)):
            for kind, a, b in zip(("keys", "values"), *pairs, strict=True):
                same = torch.equal(a, b) if exact else torch.allclose(a, b, atol=TOLERANCE, rtol=TOLERANCE)
                assert same, (
                    f"{tiny}: {kind} of layer {layer} of prompt {index} under {_name(recipe)} differ from those under "
                    f"{_name(against)} by up to {(a - b).abs().max():.2g}"
                )


def check_batch_equals_alone(tiny: TinyModel, recipe: RecipeLike, options: Options, **decoding: Any) -> None:
    """Check that each prompt of a batch gets the tokens that it gets alone.

    "Alone" is the same call with a batch of one, so a prompt keeps its index in the call, on which draws depend.
    """
    made = tiny.optimized(recipe, **options)
    ids = prompts(tiny)
    together, alone = (made.generate(input_ids=ids, max_batch=n, **_settings(decoding)).token_ids for n in (None, 1))
    for index, (mine, other) in enumerate(zip(together, alone, strict=True)):
        assert mine == other, (
            f"{tiny}: prompt {index} gets {mine} in a batch of {len(ids)} and {other} alone, under {_name(recipe)} "
            f"with {dict(options)}"
        )


def check_backends_agree(tiny: TinyModel, recipe: RecipeLike, options: Options, **decoding: Any) -> None:
    """Check that Inductor's regions give the tokens that the graph gives op by op. Compiling takes some ten seconds."""
    eager = _run(tiny, recipe, options, **decoding)
    compiled = _run(tiny, recipe, options, backend="inductor", buckets="fine", **decoding)
    _same_tokens(tiny, compiled, eager, "Inductor", "eager")


def check_ranks_agree(
    tiny: TinyModel, recipe: RecipeLike, options: Options, *, world: int = 2, **decoding: Any
) -> None:
    """Check that ranks that have some heads each (tensor parallelism) give one process's tokens.

    They run as threads. A sum over ranks rounds in another order. So the check also fails on a model and prompts in
    which a decision is between values that tie to within 1e-6.
    """
    whole, made = _run(tiny, recipe, options, **decoding), _settings(decoding)

    def run(rank: int) -> Result:
        return tiny.on_rank(rank, world, recipe, **options).generate(input_ids=prompts(tiny), **made)

    for rank, result in enumerate(ranks(world, run)):
        _same_tokens(tiny, result, whole, f"{_name(recipe)} on rank {rank} of {world}", "one process")


def check_against(
    tiny: TinyModel,
    recipe: RecipeLike,
    options: Options,
    oracle: Callable[[TinyModel, list[int], Options], list[int]],
    **decoding: Any,
) -> None:
    """Check that the compiled program gives the tokens of a plain implementation of the method.

    Args:
        tiny: the model.
        recipe, options: the method.
        oracle: the plain implementation. It takes the model, a prompt and the decoding settings (max_new_tokens,
            threshold, ...). It gives the response's ids up to a stop token, which is left out.
        decoding: as for `CompiledModel.generate`.
    """
    got = _run(tiny, recipe, options, **decoding)
    for index, prompt in enumerate(prompts(tiny)):
        wanted = oracle(tiny, prompt, _settings(decoding))
        assert got.token_ids[index] == wanted, (
            f"{tiny}: prompt {index} gets {got.token_ids[index]} under {_name(recipe)} with {dict(options)}; the plain "
            f"implementation gives {wanted}"
        )


def check_effects(tiny: TinyModel, recipe: RecipeLike, options: Options) -> None:
    """Check that each pass of a recipe has the numerical effect that its `Effect` declares.

    See `dgraph.numerics.check_effects`.
    """
    try:
        numerics.check_effects(tiny.graph, tiny.recipe(recipe, **options))
    except (PassError, VerifyError) as error:
        raise AssertionError(f"{tiny}: {error}") from error


def check_fires(tiny: TinyModel, recipe: RecipeLike, options: Options, step: str, layers: Sequence[int | None]) -> None:
    """Check that a pass of a recipe's step program fires once in each of these layers, in order, and nowhere else.

    Args:
        tiny: the model.
        recipe, options: the method.
        step: the pass's name.
        layers: layers in which it fires; None outside the layers.

    Raises:
        UnknownName: the step does not run the pass.
    """
    made = tiny.optimized(recipe, **options)
    made.graph("step", after=step)  # an unknown pass is named with its closest match
    report = next(r for r in made.report["step"] if r.name == step)
    fired = [applied.layer for applied in report.applied]
    assert fired == list(layers), f"{tiny}: {step} fired in layers {fired}, expected {list(layers)}"


def check_skips(tiny: TinyModel, before: Sequence[Pass], step: Pass, reason: str) -> None:
    """Check that a pass that cannot apply says why: one of its reasons to skip contains `reason`.

    Args:
        tiny: the model.
        before: passes that run first.
        step: the pass.
        reason: part of the reason.
    """
    *_, report = run_passes(tiny.graph.copy(), [*before, step], optional=frozenset({step.name}))
    reasons = [skipped.reason for skipped in report.skipped]
    assert any(reason in said for said in reasons), f"{tiny}: {step.name} skipped for {reasons}, expected {reason!r}"


def _keeping(tiny: TinyModel, recipe: Recipe) -> Recipe:
    """The recipe, changed to keep the keys behind its layers' windows if it has windows."""
    return recipe.with_all_keys() if tiny.optimized(recipe)._session.kv.windows else recipe


def _settings(decoding: Options) -> dict[str, Any]:
    rule = {} if {"threshold", "steps", "policy"} & set(decoding) else {"threshold": 0.7}
    return {"max_new_tokens": NEW_TOKENS, **rule, **decoding}


def _run(
    tiny: TinyModel,
    recipe: RecipeLike,
    options: Options,
    *,
    backend: str = "eager",
    buckets: str = "exact",
    **decoding: Any,
) -> Result:
    made = tiny.optimized(recipe, backend, buckets, **options)
    return made.generate(input_ids=prompts(tiny), **_settings(decoding))


def _same_tokens(tiny: TinyModel, got: Result, wanted: Result, mine: str, other: str) -> None:
    for index, (a, b) in enumerate(zip(got.token_ids, wanted.token_ids, strict=True)):
        assert a == b, f"{tiny}: prompt {index} gets {a} under {mine} and {b} under {other}"


def _name(recipe: RecipeLike) -> str:
    return recipe if isinstance(recipe, str) else recipe.name
