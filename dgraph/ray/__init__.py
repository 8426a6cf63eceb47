"""Replicas on Ray: a server as a Ray Serve application, and prompts of a Ray dataset.

    from ray import serve
    import dgraph.ray

    serve.run(dgraph.ray.deployment("tiny_sdar", "focus", replicas=2), route_prefix="/")

`dgraph serve --ray` and `dgraph generate --data IN --out OUT --ray` are the same from the command line, and
docs/ray-cluster.yaml is for a cluster. Its dependencies beyond those of dgraph come with the extra `ray`. Importing
this package needs none of them.
"""

from __future__ import annotations

from dgraph.ray.application import build, deployment
from dgraph.ray.data import Generate
from dgraph.ray.installed import check_installed

__all__ = ["Generate", "build", "check_installed", "deployment"]
