"""`dgraph serve`: an OpenAI-compatible server."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from dgraph.cli import options as given
from dgraph.cli.completion import completing
from dgraph.cli.output import ERR, print_text, status
from dgraph.cli.ranks import leads, ranks
from dgraph.errors import InputError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from dgraph.blueprint import Blueprint
    from dgraph.serve.host import Host

MODEL = "tiny_sdar"
KEY_VARIABLE = "DGRAPH_API_KEY"
LIMITS = "Limits"
ENGINE = "Engine"
REPLICAS = "Replicas"


def serve(
    model: Annotated[
        str, typer.Argument(help=given.MODEL, autocompletion=completing("models"), callback=given.fetched)
    ] = MODEL,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            "--recipe", "-r", help="See `dgraph recipes`; several are served side by side.", show_default="focus"
        ),
    ] = None,
    option: given.Options = None,
    kv_dtype: given.KvDtype = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 for any free port.")] = 8000,
    name: Annotated[
        str | None,
        typer.Option("--served-model-name", help="Model name in the API.", show_default="the model's name"),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help=f"API key that clients must send; may be repeated. Also {KEY_VARIABLE}, separated by commas."
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with an API key per line.", show_default=False)
    ] = None,
    max_sequences: Annotated[
        int | None,
        typer.Option(help="Requests that decode at a time.", show_default="16, or 64 on a GPU", rich_help_panel=ENGINE),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longest request in tokens, prompt and response together.",
            show_default="4096, or what the model has",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    max_batched_rows: Annotated[
        int | None,
        typer.Option(
            help="Largest number of rows of a step.",
            show_default="8192, on a CPU 512 of them of prompts",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    max_mixed_rows: Annotated[
        int | None,
        typer.Option(
            help="Rows of prompts that one step encodes with the blocks of all requests (block-causal models); 0 gives "
            "every prompt a forward of its own.",
            show_default="512",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    max_logit_rows: Annotated[
        int | None,
        typer.Option(
            help="Rows of an LM-head chunk: logits in memory at a time.",
            show_default="the recipe's",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(help="Memory of keys and values, as 8G.", show_default="the engine's", rich_help_panel=ENGINE),
    ] = None,
    scheduler: Annotated[
        str, typer.Option(help="Scheduler: chooses the requests of the next step.", rich_help_panel=ENGINE)
    ] = "look_ahead",
    policy: given.OldScheduler = None,
    no_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--no-prefix-cache", help="Do not reuse keys and values of equal prompt prefixes.", rich_help_panel=ENGINE
        ),
    ] = False,
    open_blocks: Annotated[
        int,
        typer.Option(
            help="Blocks of a response that a request may ask to be decoded together.", min=1, rich_help_panel=LIMITS
        ),
    ] = 1,
    queue: Annotated[
        int, typer.Option(help="Longest queue; further requests get status 503.", rich_help_panel=LIMITS)
    ] = 1024,
    max_body: Annotated[str, typer.Option(help="Largest request body in bytes, as 4M.", rich_help_panel=LIMITS)] = "8M",
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Longest prompt in tokens.", show_default="what there is room for", rich_help_panel=LIMITS),
    ] = None,
    max_prompts: Annotated[int, typer.Option(help="Prompts of one completion request.", rich_help_panel=LIMITS)] = 64,
    max_n: Annotated[int, typer.Option(help="Choices of one prompt.", rich_help_panel=LIMITS)] = 16,
    max_stops: Annotated[int, typer.Option(help="Stop strings of one request.", rich_help_panel=LIMITS)] = 16,
    tool_parser: Annotated[
        str | None,
        typer.Option(
            help="Form of calls of tools: hermes, llama3_json or gemma.",
            rich_help_panel=LIMITS,
            show_default="the chat template's",
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="Form of reasoning: think or gemma; none leaves it in the text.",
            rich_help_panel=LIMITS,
            show_default="the chat template's",
        ),
    ] = None,
    default_max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Default of max_tokens for chats.",
            show_default="128, or all there is room for (block-causal models)",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    keep_alive: Annotated[
        float,
        typer.Option(help="Seconds between keep-alive comments of a stream without tokens.", rich_help_panel=LIMITS),
    ] = 15.0,
    max_connections: Annotated[
        int,
        typer.Option(help="Open connections; fewer where the limit of open files is lower.", rich_help_panel=LIMITS),
    ] = 2048,
    header_timeout: Annotated[
        float, typer.Option(help="Seconds to receive the head of a request.", rich_help_panel=LIMITS)
    ] = 10.0,
    body_timeout: Annotated[
        float, typer.Option(help="Seconds to receive the body of a request.", rich_help_panel=LIMITS)
    ] = 30.0,
    idle_timeout: Annotated[
        float, typer.Option(help="Seconds to keep an idle connection open.", rich_help_panel=LIMITS)
    ] = 75.0,
    send_timeout: Annotated[
        float, typer.Option(help="Seconds that a client may stop reading its response.", rich_help_panel=LIMITS)
    ] = 30.0,
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name that clients may use, or *; may be repeated.",
            show_default="without keys: --host and the names of this machine; any where --host is 0.0.0.0",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests may take after SIGTERM.", rich_help_panel=LIMITS)
    ] = 30.0,
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin that browsers may call from (CORS), or *; may be repeated.", rich_help_panel=LIMITS),
    ] = None,
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Serve from replicas on Ray: in the cluster that RAY_ADDRESS names or that runs here, else in a new "
            "one.",
            rich_help_panel=REPLICAS,
        ),
    ] = False,
    replicas: Annotated[
        str,
        typer.Option(
            help="Number of replicas, with --ray; auto scales with the load, up to the devices of the cluster.",
            rich_help_panel=REPLICAS,
        ),
    ] = "auto",
    tp: given.Ranks = 1,
    no_access_log: Annotated[bool, typer.Option("--no-access-log", help="Do not log requests.")] = False,
    log_prompts: Annotated[bool, typer.Option("--log-prompts", help="Log prompts, too.")] = False,
    backend: Annotated[str, typer.Option(help="inductor, or eager to run op by op.")] = "inductor",
    buckets: given.Buckets = None,
    check: given.Check = "",
    dtype: given.Dtype = None,
    weights: given.Weights = None,
    adapter: given.Adapter = None,
    device: given.Device = None,
    fact: given.Facts = None,
    calibration: given.Calibration = None,
    cache: Annotated[bool, typer.Option(help="Keep compiled code for later runs; see `dgraph cache`.")] = True,
) -> None:
    """Serve a model over HTTP, in the form of OpenAI's API, until SIGTERM or Ctrl-C.

    The port answers at once; requests are taken when two lines are printed, one with the models and one for programs:
    "ready" and the address (GET /ready says so, too). With several recipes each is a model of its own, named
    MODEL:RECIPE.

    \b
    dgraph serve
    dgraph serve tiny_sdar -r focus -r dense --port 8080
    dgraph serve ./SDAR-8B-Chat-b32 --device cuda --dtype bfloat16 --host 0.0.0.0 --api-key-file keys.txt
    dgraph serve tiny_sdar --ray --replicas 2
    """
    with _ended_by_sigterm():  # imports take seconds; the server that they bring drains
        from dgraph.serve import ServerConfig, check_installed

        check_installed()
        from dgraph.blueprint import Blueprint
        from dgraph.cache.place import parse_size
        from dgraph.compiler.compilation import Compilation
        from dgraph.engine.build import EngineConfig
        from dgraph.serve.connections import raise_file_limit
        from dgraph.serve.host import Host, bind

    recipes = list(dict.fromkeys(recipe or ["focus"]))
    chosen = (
        given.shared_options(recipes, option, kv_dtype)
        if len(recipes) > 1
        else given.recipe_options(recipes[0], option, kv_dtype)
    )
    if shutdown_timeout < 0:
        raise InputError(f"--shutdown-timeout must be at least 0 seconds, got {shutdown_timeout}.")
    if len(recipes) > 1 and kv is None and str(device or "").startswith("cuda"):
        raise InputError(
            "the recipes share the memory of the GPU: say with --kv how much each has for keys and values."
        )
    settings = ServerConfig(
        api_keys=_keys(api_key, api_key_file),
        max_body_bytes=parse_size(max_body, "--max-body"),
        max_prompt_tokens=max_prompt_tokens,
        max_prompts=max_prompts,
        max_n=max_n,
        max_stops=max_stops,
        default_max_tokens=default_max_tokens,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        allowed_origins=allowed_origin or (),
        allowed_hosts=allowed_host or (),
        keep_alive=keep_alive,
        max_connections=max_connections,
        header_timeout=header_timeout,
        body_timeout=body_timeout,
        idle_timeout=idle_timeout,
        send_timeout=send_timeout,
        log_prompts=log_prompts,
    ).listening_at(host)
    engine = EngineConfig(
        max_sequences=max_sequences,
        max_tokens=max_tokens,
        max_batched_rows=max_batched_rows,
        max_mixed_rows=max_mixed_rows,
        max_logit_rows=max_logit_rows,
        kv_bytes=None if kv is None else parse_size(kv, "--kv"),
        scheduler=(given.schedulers(None, policy) or [scheduler])[-1],
        prefix_cache=False if no_prefix_cache else None,
        queue=queue,
        open_blocks=open_blocks,
    )
    if not ray and replicas != "auto":
        raise InputError("--replicas says how many replicas --ray has; add --ray, or leave it out.")
    blueprint = Blueprint(
        model=model,
        recipes=tuple(recipes),
        options=chosen,
        name=name,
        dtype=given.torch_dtype(dtype),
        device=device if ray else given.torch_device(device),
        weights=weights,
        adapter=adapter,
        facts=given.facts(fact, calibration),
        compilation=Compilation(backend=backend, buckets=given.bucket_list(buckets), artifacts=cache, check=check),
        engine=engine,
    )
    if ray:
        from dgraph.ray.host import serve_with

        count = given.replicas(replicas)
        with status("loading") as tell:
            serve_with(
                blueprint,
                settings,
                replicas=count,
                tp=tp,
                host=host,
                port=port,
                shutdown_timeout=shutdown_timeout,
                access_log=not no_access_log,
                tell=tell,
                ready=_print_address,
            )
        return
    raise_file_limit()
    listener = bind(host, port) if leads() else None
    with ranks(tp, device) as mesh:
        if listener is None:
            for served in blueprint.engines(mesh=mesh).values():
                served.join()
        else:
            _serve_here(blueprint, mesh, Host(listener, settings, shutdown_timeout), not no_access_log)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End the command at SIGTERM within the block, with exit code 0 and a message, like a server without requests."""

    def end(number: int, frame: FrameType | None) -> None:
        ERR.print("stopped before the server had begun to load.")
        os._exit(0)  # an error might be caught by what is being imported; nothing is open yet

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve_here(blueprint: Blueprint, mesh: DeviceMesh | None, found: Host, access_log: bool) -> None:
    """Serve from this process, until a signal comes."""
    from dgraph.serve.access_log import to_stderr

    with status("loading") as tell, to_stderr(access_log):

        def ready(address: str) -> None:
            gc.collect()
            gc.freeze()  # what was loaded stays: looking through it again would hold every stream up
            tell("serving; Ctrl-C stops")
            _print_address(address, found.lifetime.models)

        found.serve_with(lambda told: blueprint.engines(told, mesh), tell, ready)


def _print_address(address: str, models: Iterable[str]) -> None:
    print_text(f"dgraph serves {', '.join(models)} at {address}")
    print_text(f"ready {address}")


def _keys(given: list[str] | None, path: Path | None) -> list[str]:
    """Keys from the command line, the environment and a file."""
    keys = [*(given or ()), *filter(None, map(str.strip, os.environ.get(KEY_VARIABLE, "").split(",")))]
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--api-key-file {path} cannot be read: {error}.") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise InputError(f"--api-key-file {path} has no key; write one per line, or leave it out.")
        keys += found
    return keys
