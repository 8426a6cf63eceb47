"""An OpenAI-compatible server over engines: one ASGI application, for uvicorn or any other host.

    import dgraph
    from dgraph.serve import app

    application = app(dgraph.optimize("tiny_sdar", recipe="focus").engine())

`dgraph serve` is the same from the command line. Its dependencies beyond those of dgraph come with the extra `serve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dgraph.engine.engine import Engine
from dgraph.errors import InputError
from dgraph.errors.former import former_names
from dgraph.serve.settings import ServerConfig
from dgraph.settings import settings_of

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["ServerConfig", "app"]

__getattr__ = former_names(__name__, {"ServeSettings": "ServerConfig"})


def app(engines: Engine | Mapping[str, Engine], settings: ServerConfig | None = None, **keywords: Any) -> FastAPI:
    """An ASGI application over open engines. The application never closes them: the caller does.

    Args:
        engines: one, served under the name of its model, or several by the names that clients call them. The first
            answers requests that name no model.
        settings: see `ServerConfig`.
        keywords: fields of `ServerConfig`, in place of `settings`.

    Raises:
        InputError: no engine, a setting out of range, or the extra `serve` is not installed.
        UnknownName: an unknown setting.
    """
    chosen = settings_of(ServerConfig, settings, keywords)
    named = {engines.model: engines} if isinstance(engines, Engine) else dict(engines)
    if not named:
        raise InputError("a server needs at least one engine, got none.")
    check_installed()
    from dgraph.serve.application import build
    from dgraph.serve.lifetime import Lifetime

    lifetime = Lifetime()
    lifetime.begin(named)
    return build(lifetime, chosen)


def check_installed() -> None:
    """Raise `InputError` if a package of the extra `serve` is missing."""
    try:
        import fastapi
        import httptools
        import prometheus_client
        import uvicorn
    except ImportError as error:
        raise InputError(f"a server needs {error.name}, which is not installed: pip install 'dgraph[serve]'.") from None
    del fastapi, httptools, prometheus_client, uvicorn
