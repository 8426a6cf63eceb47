"""Artifacts of these tests are their own, unless the caller says where they are."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def own_artifact_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "DGRAPH_CACHE" not in os.environ:
            patch.setenv("DGRAPH_CACHE", str(tmp_path_factory.mktemp("artifacts")))
        torch.set_num_threads(1)
        yield
