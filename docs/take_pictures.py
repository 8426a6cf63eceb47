"""Take the pictures of the page that the README shows, again where the page or what FOCUS does has changed.

    dgraph serve tiny_sdar -r focus -r dense
    python docs/take_pictures.py http://127.0.0.1:8000

Needs the extra `browser` and pillow.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

PROMPT = (
    "Ella has 14 ribbons. The number of ribbons doubles. Ella buys 17 more ribbons. Then Ella finds 16 ribbons. "
    "Ella loses 13 ribbons. Ella loses 20 ribbons. How many ribbons does Ella have?"
)
STEPS = 12
"""Of a block, so that there is more than one to see: the model is sure of most tokens at once."""
SCALE = 1.5
"""Pixels of a picture per pixel of the page."""
PICTURES: dict[str, tuple[int, int, bool, dict[str, Any]]] = {
    "side-by-side": (1280, 841, True, {}),
    "light": (920, 863, False, {}),
    "dark": (920, 863, False, {"color_scheme": "dark"}),
    "phone": (390, 844, False, {"has_touch": True}),
}
"""Width, height, whether two recipes are shown, and what else a browser is opened with."""


def take(browser: Any, address: str, width: int, height: int, two: bool, **settings: Any) -> Image.Image:
    """Decode the prompt, go back to where two thirds of the steps are done, and point at a token."""
    page = browser.new_page(viewport={"width": width, "height": height}, device_scale_factor=SCALE, **settings)
    page.set_default_timeout(120_000)
    page.goto(address)
    page.wait_for_selector("#denoise:enabled")
    page.fill("textarea", PROMPT)
    page.fill('[name="max_tokens"]', "96")
    page.locator('[name="steps"]').evaluate(f"field => field.value = {STEPS}")
    page.select_option('[name="beside"]', "tiny_sdar:dense" if two else "")
    page.click("#denoise")
    page.locator("#said", has_text="Done").wait_for(state="attached")
    slider = page.locator(".replay input")
    slider.fill(str(int(slider.get_attribute("max")) * 2 // 3))
    if width < 600:
        page.mouse.wheel(0, 400)
        page.wait_for_timeout(500)
    page.locator('.canvas .cell[data-state="token"]').nth(8).hover()
    return Image.open(io.BytesIO(page.screenshot()))


if __name__ == "__main__":
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for name, (width, height, two, settings) in PICTURES.items():
            picture = take(browser, sys.argv[1], width, height, two, **settings)
            picture.save(Path(__file__).parent / f"page-{name}.webp", quality=88)
        browser.close()
