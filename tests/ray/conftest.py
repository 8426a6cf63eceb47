"""One cluster for all tests of a session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dgraph.serve.host import bind

if find_spec("ray") is None:
    collect_ignore = ["test_dataset.py", "test_replicas.py"]


@dataclass(frozen=True)
class Cluster:
    """Ray on this machine, and Serve in it.

    Attributes:
        url: of Serve's proxy.
        logs: the folder of what its processes write.
    """

    url: str
    logs: Path


Deploy = Callable[..., str]
"""Deploys a tiny model under a name, with settings of `dgraph.ray.deployment`; returns the address of its server."""


@pytest.fixture
def deploy(cluster: Cluster) -> Iterator[Deploy]:
    from ray import serve

    import dgraph.ray

    names = []

    def run(name: str, **settings: Any) -> str:
        usual = {"backend": "eager", "ray_actor_options": {"num_cpus": 0}}
        names.append(name)
        serve.run(
            dgraph.ray.deployment("tiny_sdar", "focus", **{**usual, **settings}), name=name, route_prefix=f"/{name}"
        )
        return f"{cluster.url}/{name}"

    yield run
    for name in names:
        serve.delete(name)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch, bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        patch.setenv("RAY_AUTH_MODE", "disabled")
        import ray
        from ray import serve

        listener.close()
        started = ray.init("local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "ERROR"})
            yield Cluster(f"http://127.0.0.1:{port}", Path(started.address_info["session_dir"]) / "logs")
        finally:
            serve.shutdown()
            ray.shutdown()
