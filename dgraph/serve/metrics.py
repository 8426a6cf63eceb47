"""Numbers for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from dgraph.engine.events import Event
from dgraph.serve.lifetime import Lifetime
from dgraph.serve.refusal import Refusal
from dgraph.serve.running import Running
from dgraph.serve.served_model import ServedModel
from dgraph.serve.translate import Order


class Metrics:
    media_type = CONTENT_TYPE_LATEST

    def __init__(self, lifetime: Lifetime):
        self._registry = CollectorRegistry()

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def refused(self, model: ServedModel, refusal: Refusal) -> None:
        pass

    def seen(self, model: ServedModel, order: Order, running: Running, index: int, event: Event) -> None:
        pass

    def ended(self, model: ServedModel, order: Order) -> None:
        pass
