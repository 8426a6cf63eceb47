"""Measurements: traces of commits, the floor of a step, and arms that differ in one thing."""

from dgraph.bench.traces import Trace, read_trace, synthesise

__all__ = ["Trace", "read_trace", "synthesise"]
