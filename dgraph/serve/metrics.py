"""Metrics for Prometheus.

Every metric is named `dgraph:...`. A metric that vLLM has too also goes by its name, `vllm:...`, for which routers and
dashboards of other projects look. Counts are read from the engine at each scrape. A request's durations are recorded
when it ends, and the times between its pieces as they come.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from dgraph.engine.io.events import Event
from dgraph.engine.io.timings import Served
from dgraph.engine.stats import EngineStats
from dgraph.serve.lifetime import Lifetime
from dgraph.serve.refusal import Refusal
from dgraph.serve.translate import ParsedRequest

LABELS = ("model_name", "engine")
SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
PIECES = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
REQUESTS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)
FEW = (1, 2, 5, 10, 20)

Read = Callable[[EngineStats], float]


@dataclass(frozen=True)
class Told:
    """Metric that is read from an engine's statistics. alias: True if vLLM has a metric of that name."""

    name: str
    help: str
    read: Read
    alias: bool = False


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


GAUGES = (
    Told("num_requests_running", "Requests in slots.", lambda s: s.running, True),
    Told("num_requests_waiting", "Requests in the queue.", lambda s: s.waiting, True),
    Told("kv_cache_usage_perc", "Share of the KV pages in use.", lambda s: 1 - _share(s.free_pages, s.pages), True),
    Told("kv_bytes", "Memory of all keys and values.", lambda s: s.kv_bytes),
    Told("budget_fill", "Share of the rows that steps may have which they had.", lambda s: s.budget_fill),
    Told("longest_wait_steps", "Most steps in a row that a running request sat out.", lambda s: s.longest_wait),
)
COUNTERS = (
    Told("prompt_tokens", "Tokens of prompts whose requests ended.", lambda s: s.prompt_tokens, True),
    Told("generation_tokens", "Committed tokens of requests that ended.", lambda s: s.completion_tokens, True),
    Told("num_preemptions", "Requests that gave way because pages ran out.", lambda s: s.preempted, True),
    Told("prefix_cache_queries", "Tokens of prompts looked up in the prefix cache.", lambda s: s.prefix_asked, True),
    Told("prefix_cache_hits", "Tokens of prompts found in the prefix cache.", lambda s: s.prefix_found, True),
    Told("requests_admitted", "Requests that got a slot.", lambda s: s.admitted),
    Told("steps", "Forward passes of the decode loop.", lambda s: s.steps),
    Told("refresh_rows", "Rows of prompts and of steps that recompute them.", lambda s: s.refresh_rows),
    Told("mixed_rows", "Rows of prompts that steps encoded with their blocks.", lambda s: s.mixed_rows),
    Told("diffusion_num_denoising_steps", "As dgraph:steps.", lambda s: s.steps, True),
    Told("diffusion_num_committed_tokens", "As dgraph:generation_tokens.", lambda s: s.completion_tokens, True),
)
KINDS = {
    "request_success": ("Requests that ended.", "finished_reason", True),
    "admission_rejections": ("Requests that were not taken.", "reason", True),
    "rows": ("Rows that were forwarded.", "stage", False),
    "padded_rows": ("The same with what pads them.", "stage", False),
}
"""Counters with a label of their own, by name: help text, label, and True if vLLM has a metric of that name."""


@dataclass
class Histogram:
    """Values counted by size. bounds: upper bounds, ascending; one more count, above all of them, is infinity's."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Pairs of an upper bound and the number of values that are not above it."""
        found, below = [], 0
        for bound, count in zip((*map(float, self.bounds), float("inf")), self.counts, strict=True):
            below += count
            found.append(("+Inf" if bound == float("inf") else repr(bound), float(below)))
        return found


HISTOGRAMS: dict[str, tuple[str, tuple[float, ...], bool]] = {
    "time_to_first_token_seconds": ("From arrival to the first text.", SECONDS, True),
    "inter_token_latency_seconds": (
        "Between tokens; those of one commit come together, so all but one of them took no time.",
        PIECES,
        True,
    ),
    "commit_interval_seconds": ("Between pieces of a response that became final.", PIECES, False),
    "request_time_per_output_token_seconds": ("From the first block to the end, by token after it.", PIECES, True),
    "time_to_first_block_seconds": ("From arrival to the first committed block.", SECONDS, False),
    "e2e_request_latency_seconds": ("From arrival to the end.", REQUESTS, True),
    "request_queue_time_seconds": ("From arrival to a slot.", REQUESTS, True),
    "request_prefill_time_seconds": ("From a slot to the first committed block.", REQUESTS, True),
    "request_decode_time_seconds": ("From the first committed block to the end.", REQUESTS, True),
    "request_inference_time_seconds": ("From a slot to the end.", REQUESTS, True),
    "request_prompt_tokens": ("Of a request.", TOKENS, True),
    "request_generation_tokens": ("Of a request.", TOKENS, True),
    "request_steps": ("The step of a request that committed its last token.", TOKENS, False),
    "request_params_n": ("Choices that a request asks for.", FEW, True),
    "request_params_max_tokens": ("New tokens that a request asks for at most.", TOKENS, True),
}
"""Histograms by name: help text, upper bounds, and True if vLLM has a metric of that name."""


class Meter:
    """Measurements of one model's requests."""

    def __init__(self) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds, _) in HISTOGRAMS.items()}
        self.refused: dict[str, int] = {}

    def began(self, order: ParsedRequest) -> None:
        """Record the parameters of a request that the engine took."""
        self.histograms["request_params_n"].add(order.choices)
        for decoding in order.decodings:
            self.histograms["request_params_max_tokens"].add(decoding.max_new_tokens)

    def follow(self, choices: int, began: float) -> Pace:
        """Watch the pieces of a request. began: its arrival, in seconds on the monotonic clock."""
        return Pace(self.histograms, choices, began)

    @contextmanager
    def taking(self) -> Iterator[None]:
        """Count a request that is refused with 503, by the refusal's code."""
        try:
            yield
        except Refusal as refusal:
            if refusal.status == 503:
                reason = refusal.code or ""
                self.refused[reason] = self.refused.get(reason, 0) + 1
            raise


class Pace:
    """The times between the pieces of one request's choices.

    Attributes:
        first: seconds from its arrival to its first tokens; None before them.
        queued: seconds from arrival to a slot, of the choice that ended last; None before one has ended.
    """

    def __init__(self, histograms: dict[str, Histogram], choices: int, began: float):
        self._histograms, self._began = histograms, began
        self._last = [0.0] * choices
        self.first: float | None = None
        self.queued: float | None = None

    def seen(self, index: int, event: Event) -> None:
        """Note an event as it is sent."""
        count, found = len(event.token_ids), self._histograms
        if count:
            now, last = time.monotonic(), self._last[index]
            if last:
                found["inter_token_latency_seconds"].add(now - last)
                found["commit_interval_seconds"].add(now - last)
            else:
                took = now - self._began
                found["time_to_first_token_seconds"].add(took)
                self.first = took if self.first is None else self.first
            if count > 1:
                found["inter_token_latency_seconds"].add(0.0, count - 1)
            self._last[index] = now
        if event.served is not None and event.finish_reason in ("stop", "length"):
            self._ended(event, event.served)

    def _ended(self, event: Event, times: Served) -> None:
        found = self._histograms
        self.queued = times.admitted - times.arrived
        found["e2e_request_latency_seconds"].add(times.ended - times.arrived)
        found["request_queue_time_seconds"].add(times.admitted - times.arrived)
        found["request_prefill_time_seconds"].add(times.first - times.admitted)
        found["request_decode_time_seconds"].add(times.ended - times.first)
        found["request_inference_time_seconds"].add(times.ended - times.admitted)
        found["time_to_first_block_seconds"].add(times.first - times.arrived)
        found["request_prompt_tokens"].add(event.usage.prompt_tokens)
        found["request_generation_tokens"].add(event.usage.completion_tokens)
        found["request_steps"].add(event.usage.steps)
        if event.usage.completion_tokens > 1:
            each = (times.ended - times.first) / (event.usage.completion_tokens - 1)
            found["request_time_per_output_token_seconds"].add(each)


class Metrics(Collector):
    """Metrics of a server: all of its models, its refusals, and its process."""

    media_type = CONTENT_TYPE_LATEST

    def __init__(self, lifetime: Lifetime):
        self._lifetime = lifetime
        self._meters: dict[str, Meter] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def of(self, name: str) -> Meter:
        """The meter of one model's requests; made at the first call."""
        return self._meters.setdefault(name, Meter())

    def text(self) -> bytes:
        """All metrics, as Prometheus reads them."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """An empty list: no other collector is in the registry whose names could clash with these."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        models = list(self._lifetime.models.values())
        labels = [(model.id, str(place)) for place, model in enumerate(models)]
        stats = [model.stats for model in models]
        yield from self._counted(GAUGES, GaugeMetricFamily, labels, stats)
        yield from self._counted(COUNTERS, CounterMetricFamily, labels, stats)
        meters = [self.of(model.id) for model in models]
        kinds: dict[str, Sequence[Mapping[str, int]]] = {
            "request_success": [one.finished for one in stats],
            "admission_rejections": [meter.refused for meter in meters],
            "rows": [one.rows for one in stats],
            "padded_rows": [one.padded for one in stats],
        }
        for name, (text, by, alias) in KINDS.items():
            for prefix in prefixes(alias):
                counter = CounterMetricFamily(prefix + name, text, labels=[*LABELS, by])
                for label, counts in zip(labels, kinds[name], strict=True):
                    for kind, count in counts.items():
                        counter.add_metric([*label, kind], count)
                yield counter
        for name, (text, _, alias) in HISTOGRAMS.items():
            for prefix in prefixes(alias):
                histogram = HistogramMetricFamily(prefix + name, text, labels=LABELS)
                for label, meter in zip(labels, meters, strict=True):
                    found = meter.histograms[name]
                    histogram.add_metric(label, found.buckets(), found.total)
                yield histogram

        yield from self._turned_away()

    def _turned_away(self) -> Iterator[Metric]:
        """Yield the counts that belong to the server and not to a model."""
        lifetime = self._lifetime
        refused = CounterMetricFamily("dgraph:refusals", "Requests answered with an error.", labels=["status"])
        for status, count in sorted(lifetime.refused.items()):
            refused.add_metric([str(status)], count)
        dropped = CounterMetricFamily("dgraph:dropped_connections", "Closed by the server.", labels=["reason"])
        for reason, count in sorted(lifetime.dropped.items()):
            dropped.add_metric([reason], count)
        yield from (refused, dropped)

    @staticmethod
    def _counted(
        kinds: Sequence[Told], family: Any, labels: Sequence[tuple[str, str]], stats: Sequence[EngineStats]
    ) -> Iterator[Metric]:
        for kind in kinds:
            for prefix in prefixes(kind.alias):
                told = family(prefix + kind.name, kind.help, labels=LABELS)
                for label, one in zip(labels, stats, strict=True):
                    told.add_metric(label, kind.read(one))
                yield told


def prefixes(alias: bool) -> tuple[str, ...]:
    """Prefixes of a metric's name: "dgraph:", and "vllm:" for a metric that vLLM has too."""
    return ("dgraph:", "vllm:") if alias else ("dgraph:",)
