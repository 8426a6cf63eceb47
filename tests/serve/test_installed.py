"""What the other tests of this folder need; without it they are left out."""

from __future__ import annotations

import pytest

from tests.serve.conftest import NEEDS


@pytest.mark.parametrize("name", NEEDS)
def test_the_server_can_be_tested(name: str) -> None:
    pytest.importorskip(name, reason=f"the tests of the server need {name}: pip install -e '.[test]'")
