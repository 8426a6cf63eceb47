"""Values that calls of ops share while a stage runs: when they are computed anew."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dgraph.errors import InputError
from dgraph.ops.per_stage import one_stage, per_stage


class Counted:
    """A `per_stage` sum of a tensor and a number that counts how often it is computed."""

    def __init__(self) -> None:
        self.calls = 0
        self.add = per_stage(self._add)

    def _add(self, values: Tensor, more: int) -> list[int]:
        self.calls += 1
        if more < 0:
            raise InputError("negative")
        return [value + more for value in values.tolist()]


def test_a_value_is_computed_once_in_a_stage() -> None:
    counted, values = Counted(), torch.arange(3)
    with one_stage():
        assert counted.add(values, 1) is counted.add(values, 1)
        assert counted.add(values, more=1) == counted.add(values, more=1) == [1, 2, 3]
    assert counted.calls == 2
    with one_stage():
        counted.add(values, 1)
    assert counted.calls == 3, "the next stage knows nothing of it"


def test_it_is_computed_anew_for_whatever_may_give_another_value() -> None:
    counted, values = Counted(), torch.arange(3)
    with one_stage():
        assert counted.add(values, 1) == [1, 2, 3]
        assert counted.add(values, 2) == [2, 3, 4]
        assert counted.add(values[1:], 1) == [2, 3]
        values.add_(10)
        assert counted.add(values, 1) == [11, 12, 13]
        for number in range(20):  # a tensor that is gone leaves its identity to no other
            assert counted.add(torch.tensor([number]), 0) == [number]
    assert counted.calls == 24


def test_outside_of_a_stage_and_of_inference_tensors_every_call_computes() -> None:
    counted = Counted()
    with torch.inference_mode():
        fresh = torch.arange(2)
        with one_stage():
            assert counted.add(fresh, 1) == [1, 2]
            fresh.add_(1)
            assert counted.add(fresh, 1) == [2, 3]
    plain = torch.arange(2)
    assert counted.add(plain, 0) == counted.add(plain, 0)
    assert counted.calls == 4


def test_an_error_is_not_kept_and_ends_the_stage() -> None:
    counted, values = Counted(), torch.arange(2)
    for _ in range(2):
        with pytest.raises(InputError), one_stage():
            counted.add(values, -1)
    assert counted.calls == 2
    counted.add(values, 0)
    counted.add(values, 0)
    assert counted.calls == 4, "the stage is over"
