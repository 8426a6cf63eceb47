"""`dgraph recommend`: a recipe, and formats of weights and keys, from measurements and the memory of a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgraph.cli import decoding_args as args
from dgraph.cli import options as given
from dgraph.cli.output import print_json, print_table, print_text, status
from dgraph.cli.units import read_size, size_text
from dgraph.errors import DgraphError, InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dgraph.engine.memory.profile import Profile
    from dgraph.recipes.evidence import Measured
    from dgraph.spec import ModelSpec

SAFE = "dense"
"""The recipe where no measurement speaks for another: it computes what the model does."""
FORMATS = {
    "cpu": ((None, None), (None, "fp8"), ("int8", None), ("int8", "fp8"), ("int4", "fp8")),
    "cuda": ((None, None), (None, "fp8"), ("fp8", None), ("fp8", "fp8"), ("int4", "fp8")),
}
"""Formats of weights and of keys by kind of device, in the order in which they are tried until the memory is enough."""


@dataclass(frozen=True)
class Choice:
    """A recommendation, and what it rests on.

    Attributes:
        recipe: by name.
        weights, kv_dtype: formats, None for as they are.
        profile: of memory under these.
        fits: sequences of the asked length that the memory holds.
        arms: the nearest measured table, best first; none without one.
        why: one sentence a reason.
    """

    recipe: str
    weights: str | None
    kv_dtype: str | None
    profile: Profile
    fits: int
    arms: list[Measured]
    why: list[str]


def recommend(
    context: typer.Context,
    model: given.Model,
    memory: Annotated[
        str | None, typer.Option(help="Memory limit in bytes, as 24G.", show_default="the GPU's; 4G on a CPU")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences at a time.", min=1)] = 1,
    prompt: Annotated[int, typer.Option(help="Tokens of a prompt.", min=1)] = 128,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of a response.", min=1)] = 128,
    dtype: given.Dtype = None,
    device: given.Device = None,
    fact: given.Facts = None,
    json: given.Json = False,
) -> None:
    """Say which recipe, weights and keys to take, with the measurements behind it. The model is loaded, not run.

    The recipe is the fastest of the measured table whose setting is nearest, without recipes that were measured to lose
    right answers. Formats are tried until the sequences fit into the memory, as `dgraph profile` predicts it.

    \b
    dgraph recommend tiny_sdar --batch 4
    dgraph recommend ./SDAR-8B-Chat-b32 --device cuda --batch 64 --prompt 1024
    """
    limit, where, facts = read_size("--memory", memory), given.torch_device(device), given.facts(fact)
    loaded = {"dtype": given.torch_dtype(dtype), "device": where, "facts": facts}
    with status("loading") as tell:
        found = _choose(model, loaded, limit, batch, prompt, max_new_tokens, tell)
    formats = {"weights": found.weights, "kv_dtype": found.kv_dtype}
    chosen = {"recipe": found.recipe, "max_sequences": batch, **{name: said for name, said in formats.items() if said}}
    command = args.command_line(context, "serve", **chosen)
    if json:
        print_json(_facts(found, command))
    else:
        _show(found, batch, prompt + max_new_tokens, command)


def _choose(
    model: str,
    loaded: dict[str, Any],
    limit: int | None,
    batch: int,
    prompt: int,
    response: int,
    tell: Callable[..., None],
) -> Choice:
    """Choose a recipe, then the first formats under which the sequences fit.

    Raises:
        InputError: a length beyond the model's positions.
        DgraphError: the model cannot be loaded.
    """
    import dgraph
    from dgraph.engine.memory.profile import profile

    kind = loaded["device"].type if loaded["device"] is not None else "cpu"
    found = dgraph.load(model, loaded["dtype"], loaded["device"], **loaded["facts"])
    if prompt + response > found.spec.max_positions:
        raise InputError(
            f"--prompt {prompt} and --max-new-tokens {response} are {prompt + response} positions, and {found.name} "
            f"has {found.spec.max_positions}; ask for fewer."
        )
    recipe, arms, why = _recipe(found.spec, kind, batch, prompt)
    chosen: Choice | None = None
    for weights, keys in FORMATS.get(kind, FORMATS["cpu"]):
        tell(f"profiling {' and '.join(filter(None, (weights, keys))) or 'the formats of the checkpoint'}")
        how: dict[str, Any] = {"backend": "eager", "progress": tell, **({} if keys is None else {"kv_dtype": keys})}
        if weights is None:
            made = dgraph.optimize(found, recipe, **how)
        else:
            made = dgraph.optimize(model, recipe, weights=weights, **loaded, **how)
        memory = profile(made, memory=limit, sequences=batch, measured=False)
        chosen = Choice(recipe, weights, keys, memory, memory.fits(prompt + response, response), arms, why)
        if chosen.fits >= batch:
            break
    assert chosen is not None, "there are formats to try"
    return chosen


def _recipe(spec: ModelSpec, kind: str, batch: int, prompt: int) -> tuple[str, list[Measured], list[str]]:
    """The recipe for a setting, the measured table that it is from, and reasons."""
    from dgraph.recipes import RECIPES, build
    from dgraph.recipes.evidence import losses, nearest

    arms = nearest(spec.attention, kind, batch, prompt)
    if not arms:
        return SAFE, [], [f"nothing was measured of {spec.attention} models on {kind}; {SAFE} changes no result."]
    why: list[str] = []
    left: list[Measured] = []
    for arm in arms:
        try:
            build(RECIPES, arm.recipe, spec, {})
        except DgraphError as error:
            why.append(f"{arm.recipe} is left out, which this model cannot have: {error}")
            continue
        lost = losses(arm.recipe)
        if lost:
            why.append(f"{arm.recipe} is left out, which loses right answers: {lost[0]}.")
        else:
            left.append(arm)
    if arms[0].speed is None:
        why.append(f"on {kind} rows were counted, and no time was measured: fewer rows are less work, not a time.")
    if far := arms[0].distance(batch, prompt):
        why.append(f"the nearest measured setting is {arms[0].setting}, {far:.1f} doublings from what was asked.")
    best = left[0].recipe if left else SAFE
    if left and best == SAFE:
        why.append(f"no recipe was faster than {SAFE} there.")
    return best, arms, why


def _facts(found: Choice, command: str) -> dict[str, Any]:
    from dgraph.recipes.evidence import costs_of, formats

    cost = formats().get(found.weights or "")
    return {
        "recipe": found.recipe,
        "weights": found.weights,
        "kv_dtype": found.kv_dtype,
        "fits": found.fits,
        "memory": found.profile.to_json(),
        "evidence": found.arms,
        "costs": [*map(str, costs_of(found.recipe))],
        "weights_cost": cost,
        "why": found.why,
        "command": command,
    }


def _show(found: Choice, batch: int, length: int, command: str) -> None:
    from dgraph.recipes.evidence import costs_of, formats

    memory, best = found.profile, next((arm for arm in found.arms if arm.recipe == found.recipe), None)
    rows = "not counted in that setting" if best is None or best.rows_per_token is None else f"{best.rows_per_token:g}"
    enough = (
        "" if found.fits >= batch else f", not the {batch} that were asked for: give more memory, or a shorter prompt"
    )
    lines = [
        ("recipe", found.recipe),
        ("weights", found.weights or "as they are"),
        ("keys and values", found.kv_dtype or "as they are computed"),
        ("rows per token", rows),
        (
            "memory",
            f"{found.fits} sequences of {length} positions fit into {size_text(memory.memory)}{enough} (weights "
            f"{size_text(memory.weights)}, activations {size_text(memory.activations)} predicted, "
            f"{size_text(memory.kv_cost.position)} per position)",
        ),
        *(("right answers", text) for text in map(str, costs_of(found.recipe))),
    ]
    if found.weights is not None:
        cost = formats().get(found.weights)
        text = "not measured" if cost is None else f"{cost.cell} times the NLL of smol_sdar's dialogues ({cost.record})"
        lines.append(("cost of weights", text))
    if found.kv_dtype is not None:
        lines.append(("cost of keys", f"not measured by itself; try `dgraph eval` with --kv-dtype {found.kv_dtype}"))
    print_table(("", "recommended"), lines)
    if found.arms:
        first = found.arms[0]
        print_text(f"\n{first.work}; {first.setting}; {first.hardware}, {first.date}, {first.commit}: {first.page}")
        cells = [
            (m.recipe, "-" if m.speed is None else f"{m.speed:g}", f"{m.rows_per_token:g}" if m.rows_per_token else "-")
            for m in found.arms
        ]
        print_table(("recipe", f"speed, {first.against} = 1", "rows per token"), cells)
    for reason in found.why:
        print_text(f"note: {reason}")
    print_text(f"\n{command}")
