"""The decode loop around compiled programs."""

from dgraph.runtime.kv.store import KVStore
from dgraph.runtime.loop.session import BlockSession
from dgraph.runtime.policies import Candidates, ConfidenceThreshold, FixedSteps, Policy
from dgraph.runtime.results import Generation, Progress, SequenceKV
from dgraph.runtime.stats import GenerationStats, StepRecord

__all__ = [
    "BlockSession",
    "Candidates",
    "ConfidenceThreshold",
    "FixedSteps",
    "Generation",
    "GenerationStats",
    "KVStore",
    "Policy",
    "Progress",
    "SequenceKV",
    "StepRecord",
]
