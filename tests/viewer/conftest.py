"""A browser, if there is one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, headless: playwright's own, or the system's."""
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install -e '.[browser]'")
    with api.sync_playwright() as play:
        found = next(filter(None, map(shutil.which, NAMES)), None)
        try:
            launched = play.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except api.Error as error:
            reason = str(error).strip().partition("\n")[0]
            pytest.skip(f"needs Chromium (playwright install chromium, or apt install chromium): {reason}")
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens an address. At the end of the test no page may have complained, but of what `complains` says it must."""
    pages, complaints, known = [], [], []

    def open_(address: str, width: int = 1100, height: int = 800, *, complains: str = "", **settings: Any) -> Any:
        found = browser.new_page(viewport={"width": width, "height": height}, **settings)
        found.set_default_timeout(10_000)
        found.on("console", lambda said: said.type in ("error", "warning") and complaints.append(said.text))
        found.on("pageerror", lambda error: complaints.append(str(error)))
        pages.append(found)
        known.append(complains)
        found.goto(address)
        return found

    yield open_
    for page in pages:
        page.close()
    assert [text for text in complaints if not any(k and k in text for k in known)] == []
