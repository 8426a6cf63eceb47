"""Old names of the scheduler, which work for one release with a warning."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest

import dgraph
import dgraph.engine.build as build
import dgraph.engine.scheduling.schedulers as schedulers
from dgraph.engine.build import EngineConfig
from dgraph.engine.scheduling.schedulers import SCHEDULERS, SchedulingStrategy, scheduler_of
from dgraph.errors import DgraphWarning, UnknownName
from dgraph.settings import settings_of


def test_settings_take_the_old_keyword() -> None:
    told = pytest.warns(DgraphWarning, match=r"EngineConfig.policy.* is scheduler.* since version 0\.2")
    with told:
        old: EngineConfig = EngineConfig(policy="fcfs", queue=3)  # type: ignore[call-arg]
    assert old == EngineConfig(scheduler="fcfs", queue=3)
    with told:
        assert old.policy == "fcfs"  # type: ignore[attr-defined]
    with told:
        assert replace(old, policy="static") == EngineConfig(scheduler="static", queue=3)  # type: ignore[call-arg]
    with told:
        assert settings_of(EngineConfig, None, {"policy": "static"}) == EngineConfig(scheduler="static")
    with pytest.raises(UnknownName, match="unknown scheduler 'lifo'"), told:
        EngineConfig(policy="lifo")  # type: ignore[call-arg]


def test_settings_have_their_former_names() -> None:
    told = pytest.warns(DgraphWarning, match=r"EngineSettings is EngineConfig since version 0\.2")
    with told:
        assert vars(dgraph)["__getattr__"]("EngineSettings") is EngineConfig
    with told:
        assert vars(build)["__getattr__"]("EngineSettings") is EngineConfig


def test_the_present_names_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = replace(EngineConfig(queue=3), scheduler="fcfs")
        assert (settings.scheduler, scheduler_of("fcfs")) == ("fcfs", SCHEDULERS["fcfs"]())


def test_the_module_has_its_old_names() -> None:
    module: Any = schedulers
    with pytest.warns(DgraphWarning, match=r"SchedulePolicy is SchedulingStrategy since"):
        assert module.SchedulePolicy is SchedulingStrategy
    with pytest.warns(DgraphWarning, match="policy_of is scheduler_of"):
        assert module.policy_of is scheduler_of
    with pytest.raises(AttributeError, match="has no attribute 'policies'"):
        _ = module.policies
