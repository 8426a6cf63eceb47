"""A process that serves through Ray: its address, its signals, its end."""

from __future__ import annotations

import logging
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from dgraph.blueprint import Blueprint
from dgraph.errors import DgraphError, InputError
from dgraph.families import folder_of
from dgraph.ray.application import application
from dgraph.ray.cluster import actor_options, check_room, joined, needs, room
from dgraph.ray.installed import check_installed
from dgraph.ray.ranks import check_ranks
from dgraph.serve.host import address, bind
from dgraph.serve.settings import ServerConfig

if TYPE_CHECKING:
    from ray.serve import Application

NAME = "dgraph"
"""Name of the application in the cluster."""
LAST = 10.0
"""Seconds for replicas to end after their last request."""


class Stopped(BaseException):
    """Raised in the main thread by SIGTERM or SIGINT."""


def serve_with(
    blueprint: Blueprint,
    settings: ServerConfig,
    *,
    replicas: int | str,
    tp: int,
    host: str,
    port: int,
    shutdown_timeout: float,
    access_log: bool,
    tell: Callable[[str], None],
    ready: Callable[[str, list[str]], None],
) -> None:
    """Serve replicas on Ray until a signal comes. Call it in the main thread.

    The first SIGTERM or SIGINT drains: no more requests are taken, and running ones go on for up to `shutdown_timeout`.
    The second ends them at once.

    Args:
        blueprint: blueprint of each replica's engines.
        settings: settings of the application.
        replicas: number of replicas. "auto" for as many as the load asks for, at most those for which the cluster has
            room when this begins.
        tp: devices of each replica.
        host, port: address to listen at; port 0 for any free one.
        shutdown_timeout: seconds that requests may take after the first signal.
        access_log: True for a line in a replica's log on each request.
        tell: called with a text for each thing that is done.
        ready: called once, when requests are taken, with the address and the models' names for clients.

    Raises:
        InputError: a number out of range, the address cannot be had, or the extra `ray` is not installed. Also if Serve
            runs in the cluster already, with an address of its own.
        UnknownName, CheckpointError: there is no such model.
        DgraphError: Ray cannot be reached, or no replica can be built.
    """
    check_installed()
    check_ranks(tp, blueprint)
    folder_of(blueprint.model)
    with bind(host, port) as listener:
        at, port = address(listener), listener.getsockname()[1]

    def made() -> Application:
        each = {name: tp * amount for name, amount in needs(actor_options(blueprint, {})).items()}
        if replicas != "auto":
            check_room(int(replicas), each)
        return application(
            blueprint,
            settings,
            replicas=replicas,
            autoscaling={"max_replicas": max(1, room(each))} if replicas == "auto" else None,
            tp=tp,
            shutdown_timeout=shutdown_timeout,
            access_log=access_log,
        )

    tell("starting Ray")
    out = sys.stdout
    with joined():
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.WARNING)  # in this process; replicas have logs of their own
        if serve.status().proxies:
            raise InputError(
                "Serve runs in this cluster already, with an address of its own: add the application to it with "
                "`serve deploy` (see docs/ray-cluster.yaml), or end it with `serve shutdown`."
            )
        with _signals():
            try:
                serve.start(http_options={"host": host, "port": port}, logging_config={"log_level": "WARNING"})
                tell("starting replicas")
                models = serve.run(made(), name=NAME).models.remote().result()
                tell("serving; Ctrl-C stops")
                with redirect_stdout(out):
                    ready(at, models)
                while True:
                    time.sleep(3600.0)
            except Stopped:
                tell("waiting for requests to end; Ctrl-C ends them at once")
                with suppress(Stopped):
                    _drain(serve, shutdown_timeout)
            except RuntimeError as error:
                raise DgraphError(f"no replica can be built: {reason_of(serve.status()) or error}") from None
            finally:
                for number in (signal.SIGTERM, signal.SIGINT):
                    signal.signal(number, signal.SIG_IGN)
                serve.shutdown()


def _drain(serve: Any, timeout: float) -> None:
    """Delete the application, and wait until its replicas are gone."""
    end = time.monotonic() + timeout + LAST
    serve.delete(NAME, _blocking=False)
    while NAME in serve.status().applications and time.monotonic() < end:
        time.sleep(0.2)


@contextmanager
def _signals() -> Iterator[None]:
    """Raise `Stopped` in the main thread at each SIGTERM or SIGINT within the block."""

    def stop(number: int, frame: Any) -> None:
        raise Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def reason_of(status: Any) -> str:
    """The error message of the last replica that failed to start; "" if that is not known."""
    app = status.applications.get(NAME)
    told = "" if app is None else "\n".join(each.message for each in app.deployments.values())
    found = re.findall(r"^\s*(?:[\w.]+\.)?\w+(?:Error|Name): (.+)$", told, re.MULTILINE)
    return str(found[-1]) if found else told.strip()
