"""The decode loop around compiled programs."""

from dgraph.runtime.generation import Generation, Progress, SequenceKV
from dgraph.runtime.kv import KVStore
from dgraph.runtime.policies import Candidates, ConfidenceThreshold, FixedSteps, Policy
from dgraph.runtime.session import BlockSession
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
