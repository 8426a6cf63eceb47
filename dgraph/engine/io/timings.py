"""Times of requests that have ended, and the summary of a load test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Served:
    """Record of one request that has ended; times in seconds on one clock.

    Attributes:
        arrived, admitted, first, ended: when it came, got its slot, had its first block committed, and ended; NaN for
            an event that it never reached.
        tokens: of its response.
        requeued: how often it gave way to others.
    """

    arrived: float
    admitted: float
    first: float
    ended: float
    tokens: int
    requeued: int = 0


@dataclass(frozen=True)
class Summary:
    """Summary over requests. Times in seconds; latency is from arrival to end.

    Attributes:
        requests, tokens: their numbers.
        seconds: from the first arrival to the last end.
        tokens_per_second, requests_per_second: over these seconds.
        mean, p50, p99, sigma, span: of latency; `span` is the longest less the shortest.
        queue_mean, queue_p99: from arrival to slot.
        first_mean, first_p99: from arrival to the first committed block.
        goodput: requests per second that ended within `limit` seconds of arrival; None without a limit.
    """

    requests: int
    tokens: int
    seconds: float
    tokens_per_second: float
    requests_per_second: float
    mean: float
    p50: float
    p99: float
    sigma: float
    span: float
    queue_mean: float
    queue_p99: float
    first_mean: float
    first_p99: float
    goodput: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values: the attributes by name."""
        return asdict(self)


def summarise(served: Sequence[Served], warm_up: float = 0.0, limit: float | None = None) -> Summary:
    """Summarise the requests of a load test.

    Args:
        served: at least one.
        warm_up: share of the requests, the first to arrive, that latencies leave out; throughput counts all.
        limit: seconds of latency within which a request counts as good.
    """
    ordered = sorted(served, key=lambda s: s.arrived)
    counted = ordered[min(int(warm_up * len(ordered)), len(ordered) - 1) :]
    seconds = max(s.ended for s in ordered) - ordered[0].arrived
    latency = sorted(s.ended - s.arrived for s in counted)
    queue = sorted(s.admitted - s.arrived for s in counted)
    first = sorted(s.first - s.arrived for s in counted)
    mean, tokens = math.fsum(latency) / len(latency), sum(s.tokens for s in ordered)
    per_second = 1 / seconds if seconds > 0 else math.inf
    good = None if limit is None else sum(s.ended - s.arrived <= limit for s in ordered) * per_second
    return Summary(
        requests=len(ordered),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens * per_second,
        requests_per_second=len(ordered) * per_second,
        mean=mean,
        p50=quantile(latency, 0.5),
        p99=quantile(latency, 0.99),
        sigma=math.sqrt(math.fsum((x - mean) ** 2 for x in latency) / len(latency)),
        span=latency[-1] - latency[0],
        queue_mean=math.fsum(queue) / len(queue),
        queue_p99=quantile(queue, 0.99),
        first_mean=math.fsum(first) / len(first),
        first_p99=quantile(first, 0.99),
        goodput=good,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The least of ascending values that at least a share `share` of them do not exceed."""
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
