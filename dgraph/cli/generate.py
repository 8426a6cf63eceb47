"""`dgraph generate`: responses to prompts."""

from __future__ import annotations

import queue
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dgraph.cli import decoding_args as args
from dgraph.cli import options as given
from dgraph.cli import program_args
from dgraph.cli.generate_data import generate_data, help_generate
from dgraph.cli.output import ERR, OUT, check_page, print_json, print_text, status, write_page
from dgraph.cli.ranks import leads, ranks
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
    backend: args.Backend = "inductor",
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
    html: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Also write a page that replays the run step by step.", show_default=False),
    ] = None,
) -> None:
    """Continue prompts.

    \b
    dgraph generate tiny_sdar -p "Sort these words: river stone cloud maple"
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
        if data is None or out is None or prompt or prompt_file or html:
            raise InputError("--data and --out go together, and without --prompt, --prompt-file and --html.")
        blueprint = Blueprint(
            model=model,
            recipes=(recipe,),
            options=options,
            dtype=given.torch_dtype(dtype),
            device=device if ray else given.torch_device(device),
            weights=weights,
            adapter=adapter,
            facts=facts,
            compilation=dgraph.Compilation(backend=backend, buckets=rows, artifacts=cache, check=check),
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
    with ranks(tp, device) as mesh, status("loading") as tell:
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

        def count(progress: Progress) -> None:
            tell(f"decoding: {progress.finished} of {progress.prompts} prompts, {progress.decoded} tokens")

        def bundled(step: int) -> str:
            return args.command_line(context, "bundle", "--step", str(step), "--out", "bundle.zip")

        if html is None:
            with nullcontext() if program else commanded(bundled):
                result = optimized.generate(prompts, decoding, max_batch=max_batch, progress=count)
            texts, token_ids, counts = result.texts or [], result.token_ids, result.stats.to_json()
        else:
            texts, runs = _watched(optimized, prompts, decoding, max_batch, tell)
            write_page(html, page_of(runs, f"{found.name}: {prompts[0]}"))
            token_ids, counts = [[t.token for t in run.tokens] for run in runs], _counts(runs)
    if json:
        made = {"model": found.name, "recipe": optimized.recipe.to_json()}
        print_json({"texts": texts, "token_ids": token_ids, **counts, **made})
    else:
        _print(prompts, texts, counts)


def check_prompts(model: Model, prompts: list[str], decoding: Decoding, max_batch: int | None) -> None:
    """Refuse prompts and settings that cannot be decoded before compiling, which takes a minute and writes to a cache.

    Raises:
        InputError: as `CompiledModel.generate` would raise it.
    """
    from dgraph.runtime.checks import check_request

    if model.tokenizer is None:
        raise InputError(f"{model.name} has no tokenizer.json, so it cannot read a prompt; add one to its folder.")
    with warnings.catch_warnings(action="ignore"):  # `generate` gives the same warning later
        check_request(model.spec, [model.tokenizer.encode(p) for p in prompts], decoding, max_batch)


def _watched(
    optimized: CompiledModel, prompts: list[str], decoding: Decoding, max_batch: int | None, tell: Callable[[str], None]
) -> tuple[list[str], list[Run]]:
    """Continue prompts in an engine that reports every step; returns texts, and a record of each one's steps."""
    from dgraph.engine.submission import RequestSpec
    from dgraph.viewer import Run

    told: list[list[Event]] = [[] for _ in prompts]
    ended: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def sink_of(events: list[Event]) -> Callable[[Event], None]:
        def sink(event: Event) -> None:
            events.append(event)
            if event.finish_reason is not None:
                ended.put(event)

        return sink

    model, tokenizer = optimized.model, optimized.model.tokenizer
    assert tokenizer is not None, "checked before anything was compiled"
    block = decoding.block_length or model.spec.block_length
    longest = max(len(tokenizer.encode(prompt)) for prompt in prompts)
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
                RequestSpec(prompt=prompt, decoding=decoding, sink=sink_of(told[index]), draft=True, index=index)
                for index, prompt in enumerate(prompts)
            ]
        )
        for done in range(len(prompts)):
            tell(f"decoding: {done} of {len(prompts)} prompts")
            last = ended.get()
            if last.error is not None:
                raise last.error
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


def _print(prompts: list[str], texts: list[str], counts: dict[str, Any]) -> None:
    for prompt, text in zip(prompts, texts, strict=True):
        if OUT.is_terminal and len(prompts) > 1:
            OUT.print(f"> {prompt}", style="dim")
        print_text(text)
    if ERR.is_terminal:
        ERR.print(
            "{tokens} tokens ({decoded} decoded) in {counted}: {tokens_per_step:.2f} tokens per step, "
            "{rows_per_token:.1f} rows per token, {total:.2f} s".format(
                **counts, counted=counted(counts["steps"], "step")
            ),
            style="dim",
        )
