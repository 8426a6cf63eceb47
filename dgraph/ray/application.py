"""A server of many replicas, as a Ray Serve application."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from dgraph.blueprint import Blueprint
from dgraph.compiler.compilation import Compilation
from dgraph.engine.build import EngineConfig
from dgraph.errors import InputError
from dgraph.ray.cluster import actor_options
from dgraph.ray.installed import check_installed
from dgraph.ray.ranks import check_ranks, placement
from dgraph.ray.replica import Replica
from dgraph.runtime.decoding import Decoding
from dgraph.serve import check_installed as check_server_installed
from dgraph.serve.settings import ServerConfig
from dgraph.settings import DtypeLike, settings_of

if TYPE_CHECKING:
    from ray.serve import Application

NAME = "dgraph"
"""Name of the deployment."""
QUEUE = 1024
"""Requests that may wait in a replica, if the engine's settings do not say."""
BESIDE = 16
"""Requests that Serve hands to a full replica: some it refuses, and some need no room, as those for its metrics."""


def deployment(
    model: str,
    recipe: str | Sequence[str] = "focus",
    *,
    replicas: int | str = "auto",
    autoscaling: Mapping[str, Any] | None = None,
    tp: int = 1,
    engine: EngineConfig | Mapping[str, Any] | None = None,
    server: ServerConfig | Mapping[str, Any] | None = None,
    shutdown_timeout: float = 30.0,
    name: str | None = None,
    dtype: DtypeLike = None,
    device: str | None = None,
    facts: Mapping[str, Any] | None = None,
    shipped: str | None = None,
    access_log: bool = True,
    ray_actor_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Application:
    """Ray Serve application: the server of `dgraph.serve.app` in each replica, over engines of its own.

        serve.run(dgraph.ray.deployment("tiny_sdar", "focus", alpha=1.8, replicas=2), route_prefix="/")

    A replica that has no room answers 503 with Retry-After itself. A replica whose engine died is replaced. A replica
    that is to go gets no more requests. It ends when its running ones are over, or after `shutdown_timeout` seconds.

    Replicas on one machine share its artifact cache, so that the first one compiles for all. `DGRAPH_CACHE` is passed
    on to them. For machines without a shared folder see `shipped`.

    Args:
        model: a name, or a folder that every machine of the cluster sees.
        recipe: its name, or several, which are served side by side.
        replicas: a number, or "auto": between min_replicas and max_replicas of `autoscaling`.
        autoscaling: fields of `ray.serve.config.AutoscalingConfig`. `target_ongoing_requests` is by default the number
            of requests that a replica decodes at the same time.
        tp: devices of a replica, all of one machine, among which its model is divided (see `dgraph.parallel`).
        engine: see `EngineConfig`; queue is 1024 if it does not say.
        server: see `ServerConfig`.
        shutdown_timeout: seconds that the requests of a replica may take when it is to go.
        name, dtype, facts, shipped: see `Blueprint`.
        device: "cpu" or "cuda"; on a GPU each replica has one of its own (num_gpus=1).
        access_log: True for a line in a replica's log on each request.
        ray_actor_options: those of `ray.serve.deployment`: num_cpus, num_gpus, resources, runtime_env, ...
        options: options of the recipe, and, as for `dgraph.optimize`, fields of a `Compilation`.

    Raises:
        InputError: a value out of range, or the extra `ray` is not installed.
        UnknownName: an unknown recipe, option or setting.
    """
    compiled = {f.name: options.pop(f.name) for f in fields(Compilation) if f.name in options}
    blueprint = Blueprint(
        model=model,
        recipes=(recipe,) if isinstance(recipe, str) else tuple(recipe),
        options=options,
        name=name,
        dtype=dtype,
        device=device,
        facts=dict(facts or {}),
        compilation=Compilation(**compiled),
        engine=_as(EngineConfig, engine),
        shipped=shipped,
    )
    settings = _as(ServerConfig, server)
    return application(
        blueprint,
        settings,
        replicas=replicas,
        autoscaling=autoscaling,
        tp=tp,
        shutdown_timeout=shutdown_timeout,
        access_log=access_log,
        ray_actor_options=ray_actor_options,
    )


def build(arguments: Mapping[str, Any]) -> Application:
    """Call `deployment` with these arguments.

    The entry point of `serve run dgraph.ray:build model=...` and of `import_path` in a configuration file. Numbers of
    replicas and devices may be texts, as on a command line.

    Raises:
        InputError, UnknownName: as `deployment`.
    """
    known = dict(arguments)
    if "model" not in known:
        raise InputError("dgraph.ray:build needs the argument model: a name, or a folder that every machine sees.")
    for count in ("replicas", "tp"):
        if isinstance(known.get(count), str) and known[count].isdecimal():
            known[count] = int(known[count])
    return deployment(**known)


def application(
    blueprint: Blueprint,
    settings: ServerConfig,
    *,
    replicas: int | str = "auto",
    autoscaling: Mapping[str, Any] | None = None,
    tp: int = 1,
    shutdown_timeout: float = 30.0,
    access_log: bool = True,
    ray_actor_options: Mapping[str, Any] | None = None,
) -> Application:
    """The application of a blueprint; see `deployment`."""
    blueprint = replace(blueprint, engine=replace(blueprint.engine, queue=blueprint.engine.queue or QUEUE))
    chosen = serve_options(
        blueprint,
        replicas=replicas,
        autoscaling=autoscaling,
        tp=tp,
        shutdown_timeout=shutdown_timeout,
        ray_actor_options=ray_actor_options,
    )
    check_installed()
    check_server_installed()
    from ray import serve

    made: Any = serve.deployment(serve.ingress()(Replica), name=NAME, **chosen)
    return made.bind(blueprint, settings, tp, access_log)


def capacity(blueprint: Blueprint) -> int:
    """The number of requests that a replica has room for, in slots and queues; known before an engine is built."""
    engine = blueprint.engine
    return len(blueprint.recipes) * (engine.slots(blueprint.on) + (engine.queue or QUEUE))


def serve_options(
    blueprint: Blueprint,
    *,
    replicas: int | str,
    autoscaling: Mapping[str, Any] | None,
    tp: int,
    shutdown_timeout: float,
    ray_actor_options: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Keywords of `ray.serve.deployment`.

    Raises:
        InputError: a number of replicas or seconds out of range, or settings of autoscaling beside a number of
            replicas. Also a device with an index, as Ray chooses each replica's device.
    """
    check_ranks(tp, blueprint)
    if shutdown_timeout < 0:
        raise InputError(f"shutdown_timeout must be at least 0 seconds, got {shutdown_timeout}.")
    if ":" in str(blueprint.device or ""):
        raise InputError(
            f"Ray chooses the device of each replica: say {blueprint.on!r}, not {str(blueprint.device)!r}."
        )
    actor = actor_options(blueprint, dict(ray_actor_options or {}))
    return {
        **_how_many(blueprint, replicas, autoscaling),
        "max_ongoing_requests": capacity(blueprint) + BESIDE,
        "graceful_shutdown_timeout_s": float(shutdown_timeout),
        **placement(tp, actor),
        "logging_config": {"enable_access_log": False},  # a replica writes lines of its own
    }


def _how_many(blueprint: Blueprint, replicas: int | str, autoscaling: Mapping[str, Any] | None) -> dict[str, Any]:
    if replicas != "auto":
        if type(replicas) is not int or replicas < 1:
            raise InputError(f'replicas are "auto" or a whole number, at least 1, got {replicas!r}.')
        if autoscaling:
            raise InputError(f'autoscaling means nothing beside replicas={replicas}; leave it out, or say "auto".')
        return {"num_replicas": replicas}
    usual = {"target_ongoing_requests": blueprint.engine.slots(blueprint.on) * len(blueprint.recipes)}
    return {"num_replicas": "auto", "autoscaling_config": {**usual, **(autoscaling or {})}}


def _as(kind: type[Any], given: Any) -> Any:
    """Settings given as a value, or as a mapping of fields as in a configuration file."""
    if not isinstance(given, Mapping):
        return settings_of(kind, given, {})
    said = dict(given)
    if isinstance(said.get("decoding"), Mapping):
        said["decoding"] = Decoding.from_json(said["decoding"])
    return settings_of(kind, None, said)
