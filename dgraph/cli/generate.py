"""`dgraph generate`: responses to prompts."""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgraph.cli import decoding_args as args
from dgraph.cli import options as given
from dgraph.cli import program_args
from dgraph.cli.generate_data import generate_data, help_generate
from dgraph.cli.output import ERR, OUT, check_page, print_json, print_text, status, write_page
from dgraph.cli.ranks import leads, ranks
from dgraph.cli.streaming import followed, view_of
from dgraph.errors import InputError
from dgraph.types.card import counted

if TYPE_CHECKING:
    from dgraph.compiler.compiled_model import CompiledModel
    from dgraph.engine.io.events import Event
    from dgraph.families import Model
    from dgraph.runtime.decoding import Decoding
    from dgraph.runtime.results import Progress
    from dgraph.viewer import Run


REPLICAS = "Replicas"


def generate(
    context: typer.Context,
    model: given.Model,
    prompt: args.Prompt = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="A JSONL file: each line has a prompt or messages, and optionally an id and settings.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="The JSONL file of answers to --data; lines already answered are skipped.",
            show_default=False,
        ),
    ] = None,
    prompt_file: args.PromptFile = None,
    recipe: args.Recipe = "focus",
    option: given.Options = None,
    kv_dtype: given.KvDtype = None,
    max_new_tokens: args.MaxNewTokens = 128,
    threshold: args.Threshold = None,
    steps: args.Steps = None,
    policy: args.Policy = None,
    block_length: args.BlockLength = None,
    open_blocks: args.OpenBlocks = 1,
    temperature: args.Temperature = None,
    top_p: args.TopP = None,
    top_k: args.TopK = None,
    stop: args.Stop = None,
    json_schema: args.JsonSchema = None,
    regex: args.Regex = None,
    seed: args.Seed = 0,
    max_batch: Annotated[
        int | None,
        typer.Option(help="Prompts decoded at a time.", show_default="all, or with --data 16, and 64 on a GPU"),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Answer --data in actors on Ray.", rich_help_panel=REPLICAS)
    ] = False,
    replicas: Annotated[int, typer.Option(help="Number of actors, with --ray.", min=1, rich_help_panel=REPLICAS)] = 1,
    tp: given.Ranks = 1,
    backend: args.Backend = "auto",
    buckets: given.Buckets = None,
    check: given.Check = "",
    dtype: given.Dtype = None,
    weights: given.Weights = None,
    adapter: given.Adapter = None,
    device: given.Device = None,
    fact: given.Facts = None,
    calibration: given.Calibration = None,
    cache: args.Cache = True,
    trust: program_args.Trust = False,
    json: given.Json = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Show text as it settles, and on a terminal the block that is decoded.")
    ] = False,
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write a page that replays the run step by step.", show_default=False),
    ] = None,
) -> None:
    """Continue prompts.

    \b
    dgraph generate tiny_sdar -p "Sort these words: river stone cloud maple"
    dgraph generate tiny_sdar -p "Sort these words: river stone cloud maple" --stream
    dgraph generate tiny_sdar -p "Sort these words: river stone cloud maple" --html run.html
    dgraph generate ./SDAR-8B-Chat-b32 -r focus -o alpha=1.8 -p "Why is the sky blue?" --json
    dgraph generate ./SDAR-8B-Chat-b32 --device cuda --tp 2 -p "Why is the sky blue?"
    dgraph generate ./SDAR-8B-Chat-b32 --device cuda --weights fp8 -p "Why is the sky blue?"
    dgraph generate tiny_sdar --data in.jsonl --out out.jsonl
    dgraph generate ./program --trust -p "Sort these words: river stone cloud maple"
    """
    import dgraph
    from dgraph import parallel
    from dgraph.blueprint import Blueprint
    from dgraph.bundles import commanded
    from dgraph.compiler.program_folder import is_program
    from dgraph.recipes import RECIPES, build
    from dgraph.viewer import page_of

    options, facts, rows = (
        given.recipe_options(recipe, option, kv_dtype),
        given.facts(fact, calibration),
        given.bucket_list(buckets),
    )
    program = is_program(model)
    program_args.check(context, program)
    decoding = args.decoding_of(context.params)
    if not ray and replicas > 1:
        raise InputError("--replicas says how many actors --ray has; add --ray, or leave it out.")
    if ray and (tp > 1 or parallel.started()):
        raise InputError("--ray answers --data in actors of one device each: leave it out, or --tp and torchrun.")
    if ray and data is None:
        raise InputError("--ray answers --data; give that, or leave --ray out.")
    if data is not None or out is not None:
        if data is None or out is None or prompt or prompt_file or html or stream:
            raise InputError("--data and --out go together, and without --prompt, --prompt-file, --html and --stream.")
        blueprint = Blueprint(
            model=model,
            recipes=(recipe,),
            options=options,
            dtype=given.torch_dtype(dtype),
            device=device if ray else given.torch_device(device),
            weights=weights,
            adapter=adapter,
            facts=facts,
            compilation=dgraph.Compilation(
                backend="inductor" if backend == "auto" else backend,  # compiling pays for many prompts
                buckets=rows,
                artifacts=cache,
                check=check,
            ),
            engine=dgraph.EngineConfig(max_sequences=max_batch, block_length=block_length, decoding=decoding),
        )
        with ranks(tp, device) as mesh:
            if leads():
                generate_data(blueprint, decoding, data, out, ray=ray, replicas=replicas, mesh=mesh, json=json)
            else:
                help_generate(blueprint, mesh)
        return
    prompts = given.read_prompts(prompt, prompt_file)
    if html is not None:
        check_page(html)
    if stream and json:
        raise InputError("--stream shows text and --json one object; leave one of them out.")
    with ranks(tp, device) as mesh, ExitStack() as shown:
        tell = shown.enter_context(status("loading"))
        if program:
            optimized = dgraph.open(model, trust=trust, artifacts=cache, progress=tell)
            found, decoding = optimized.model, args.decoding_of(args.said(context), optimized.decoding)
            check_prompts(found, prompts, decoding, max_batch)
        else:
            opened = mesh is not None or weights is not None
            found = dgraph.load(
                model, given.torch_dtype(dtype), given.torch_device(device), opened, adapter=adapter, **facts
            )
            build(RECIPES, recipe, found.spec, options)
            check_prompts(found, prompts, decoding, max_batch)
            optimized = dgraph.optimize(
                found,
                recipe,
                backend=backend,
                buckets=rows,
                artifacts=cache,
                check=check,
                progress=tell,
                mesh=mesh,
                weights=weights,
                **options,
            )
            args.tell_backend(context, optimized)

        def count(progress: Progress) -> None:
            tell(f"decoding: {progress.finished} of {progress.prompts} prompts, {progress.decoded} tokens")

        def silent(index: int, arrived: queue.SimpleQueue[Event]) -> list[Event]:
            tell(f"decoding: {index} of {len(prompts)} prompts")
            return followed(arrived, lambda event: None)

        def visible(index: int, arrived: queue.SimpleQueue[Event]) -> list[Event]:
            _head(prompts, index)
            assert found.tokenizer is not None, "checked before anything was compiled"
            with view_of(found.tokenizer.decode) as view:
                return followed(arrived, view.show)

        def bundled(step: int) -> str:
            return args.command_line(context, "bundle", "--step", str(step), "--out", "bundle.zip")

        if html is None and not stream:
            with nullcontext() if program else commanded(bundled):
                result = optimized.generate(prompts, decoding, max_batch=max_batch, progress=count)
            texts, token_ids, counts = result.texts or [], result.token_ids, result.stats.to_json()
        else:
            if stream:
                shown.close()  # a spinner and the response would write on the same line
            texts, runs = _watched(optimized, prompts, decoding, max_batch, visible if stream else silent)
            if html is not None:
                write_page(html, page_of(runs, f"{found.name}: {prompts[0]}"))
            token_ids, counts = [[t.token for t in run.tokens] for run in runs], _counts(runs)
    if json:
        made = {"model": found.name, "recipe": optimized.recipe.to_json(), "backend": optimized.compiler.backend}
        print_json({"texts": texts, "token_ids": token_ids, **counts, **made})
        return
    for index, text in enumerate(texts if not stream else ()):
        _head(prompts, index)
        print_text(text)
    _foot(counts)


def check_prompts(model: Model, prompts: list[str], decoding: Decoding, max_batch: int | None) -> None:
    """Refuse prompts and settings that cannot be decoded before compiling, which takes a minute and writes to a cache.

    Raises:
        InputError: as `CompiledModel.generate` would raise it.
    """
    from dgraph.runtime.request_checks import check_request

    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer.json, so it cannot read a prompt; add one to its folder.")
    with warnings.catch_warnings(action="ignore"):  # `generate` gives the same warning later
        check_request(model.spec, [model.tokenizer.encode(p) for p in prompts], decoding, max_batch)


def _watched(
    optimized: CompiledModel,
    prompts: list[str],
    decoding: Decoding,
    max_batch: int | None,
    follow: Callable[[int, queue.SimpleQueue[Event]], list[Event]],
) -> tuple[list[str], list[Run]]:
    """Continue prompts in an engine that reports every step; returns texts, and a record of each one's steps.

    follow: returns the events of a prompt, by its number and the queue that gets them, when it has ended.
    """
    from dgraph.engine.submission import RequestSpec
    from dgraph.viewer import Run

    model, tokenizer = optimized.model, optimized.model.tokenizer
    assert tokenizer is not None, "checked before anything was compiled"
    block = decoding.block_length or model.spec.block_length
    longest = max(len(tokenizer.encode(prompt)) for prompt in prompts)
    arrived: list[queue.SimpleQueue[Event]] = [queue.SimpleQueue() for _ in prompts]
    with optimized.engine(
        max_sequences=max_batch or len(prompts),
        max_tokens=longest + decoding.max_new_tokens,
        block_length=block,
        open_blocks=decoding.open_blocks,
    ) as engine:
        if not engine.leads:
            engine.join()
            raise typer.Exit
        engine.submit_all(
            [
                RequestSpec(prompt=prompt, decoding=decoding, sink=arrived[index].put, draft=True, index=index)
                for index, prompt in enumerate(prompts)
            ]
        )
        told = [follow(index, each) for index, each in enumerate(arrived)]
    about: dict[str, Any] = {"model": model.name, "recipe": optimized.recipe.name, "block_length": block}
    runs = [Run.of(events, tokenizer.decode, prompt=p, **about) for p, events in zip(prompts, told, strict=True)]
    return ["".join(event.text for event in events) for events in told], runs


def _counts(runs: list[Run]) -> dict[str, Any]:
    """Counts summed over runs that were decoded together, by the names of `GenerationStats`."""
    tokens, rows = (sum(run.usage[name] for run in runs) for name in ("completion_tokens", "rows"))
    decoded, steps = sum(run.decoded for run in runs), [len(run.steps) for run in runs]
    return {
        "steps": max(steps),
        "tokens": tokens,
        "decoded": decoded,
        "tokens_per_step": decoded / max(1, sum(steps)),
        "rows_per_token": rows / max(1, decoded),
        "total": max(run.seconds for run in runs),
        "usage": [dict(run.usage) for run in runs],
    }


def _head(prompts: list[str], index: int) -> None:
    """Say on a terminal which of several prompts a response is to."""
    if OUT.is_terminal and len(prompts) > 1:
        OUT.print(f"> {prompts[index]}", style="dim")


def _foot(counts: dict[str, Any]) -> None:
    """Say on a terminal how the responses came about."""
    if ERR.is_terminal:
        ERR.print(
            "{tokens} tokens ({decoded} decoded) in {counted}: {tokens_per_step:.2f} tokens per step, "
            "{rows_per_token:.1f} rows per token, {total:.2f} s".format(
                **counts, counted=counted(counts["steps"], "step")
            ),
            style="dim",
        )
