"""The pages in a browser: a prompt is typed, tokens commit, the run is replayed, and errors are told."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dgraph.viewer import Run, page_of
from tests.viewer.conftest import Open
from tests.viewer.fake_server import FakeServer, serving
from tests.viewer.made import TEXT, made

FOCUS, DENSE = made(), made("dense", seed=1)
REFUSED = "Failed to load resource"  # what the browser itself says of any answer that is no success


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving(FakeServer({"focus": FOCUS, "dense": DENSE})) as fake:
        yield fake


@pytest.fixture
def alone() -> Iterator[FakeServer]:
    with serving(FakeServer({"focus": FOCUS})) as fake:
        yield fake


def ask(page: Any, prompt: str = "Sort: b a") -> None:
    page.fill("textarea", prompt)
    page.wait_for_selector("#denoise:enabled")
    page.click("#denoise")


def shows(page: Any, selector: str, text: str) -> None:
    """Wait until an element has a text that begins so. (A page's policy forbids to wait for a script's word.)"""
    page.locator(selector, has_text=re.compile(f"^{re.escape(text)}")).first.wait_for(state="attached")


def done(page: Any) -> None:
    shows(page, "#said", "Done")


def cells(page: Any, state: str = "token", panel: int = 0) -> list[str]:
    """Texts of the cells of a panel that are in a state."""
    found: list[str] = (
        page.locator(".panel").nth(panel).locator(f'.canvas .cell[data-state="{state}"]').all_inner_texts()
    )
    return found


def place(page: Any) -> str:
    found: str = page.inner_text(".replay output")
    return found


def saved(folder: Path, *runs: Run) -> str:
    """The address of a page of runs."""
    (folder / "run.html").write_text(page_of(runs), encoding="utf-8")
    return (folder / "run.html").as_uri()


# -- a response as it comes ----------------------------------------------------------------------------------------


def test_tokens_appear_when_they_are_committed(alone: FakeServer, open_page: Open) -> None:
    alone.held_after = held = 3
    page = open_page(alone.address)
    page.fill('[name="max_tokens"]', "40")
    page.fill('[name="threshold"]', "0.8")
    ask(page, "Sort these words: b a")
    shows(page, ".replay output", f"step {held} of {held}")
    shown = FOCUS.steps[held - 1]
    known = [text.strip() for text in shown.tokens if text is not None]
    assert cells(page) == [text or "\N{NO-BREAK SPACE}" for text in known]
    masks = sum(token < 0 for token in shown.token_ids)
    assert len(cells(page, "mask")) + len(cells(page, "evicted")) == masks > 0
    assert len(cells(page, "ahead")) == 40 - len(shown.token_ids), "all positions that were asked for are there"
    assert page.locator("#stop").is_visible()
    alone.go.set()
    done(page)
    assert page.locator("#stop").is_hidden()
    assert len(cells(page)) == len(FOCUS.tokens)
    assert page.locator(".panel > .unseen").text_content() == f"Response: {TEXT}"
    (asked,) = alone.asked
    assert asked["messages"] == [{"role": "user", "content": "Sort these words: b a"}]
    assert (asked["max_tokens"], asked["threshold"]) == (40, 0.8)
    assert (asked["stream_mode"], asked["return_step_map"], asked["stream"]) == ("draft", True, True)
    assert "temperature" not in asked, "what was not entered is the model's"
    counters = dict(zip(*(page.locator(f".counters {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True))
    assert counters["tokens"] == str(len(FOCUS.tokens))
    assert counters["tokens/step"] == f"{len(FOCUS.tokens) / len(FOCUS.steps):.2f}"
    assert counters["rows/token"] == f"{FOCUS.usage['rows'] / len(FOCUS.tokens):.1f}"
    assert float(counters["tok/s"]) > 0


def test_two_models_side_by_side(server: FakeServer, open_page: Open) -> None:
    page = open_page(server.address)
    ask(page)
    done(page)
    assert page.locator(".panel h2").all_inner_texts() == ["focus", "dense"]
    left, right = (page.locator(".panel").nth(i).bounding_box() for i in (0, 1))
    assert left["y"] == right["y"]
    assert left["x"] + left["width"] <= right["x"]
    assert {asked["model"] for asked in server.asked} == {"focus", "dense"}
    page.keyboard.press("Escape")
    page.locator(".replay input").focus()
    page.keyboard.press("Home")
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    for panel, run in enumerate((FOCUS, DENSE)):
        assert len(cells(page, panel=panel)) == sum(token >= 0 for token in run.steps[3].token_ids)
    assert cells(page, "evicted", panel=1) == []
    page.select_option('[name="beside"]', "")
    ask(page)
    done(page)
    assert page.locator(".panel").count() == 1


def test_models_are_titled_by_recipe_and_by_a_name_that_says_more(open_page: Open) -> None:
    with serving(FakeServer({"tiny_sdar:focus": FOCUS, "dense": DENSE, "mine": FOCUS})) as server:
        titles = open_page(server.address).locator('[name="model"] option')
        titles.nth(2).wait_for(state="attached")
        assert titles.all_inner_texts() == ["focus on tiny_sdar", "dense on tiny_sdar", "mine: focus on tiny_sdar"]


def test_a_response_can_be_stopped(alone: FakeServer, open_page: Open) -> None:
    alone.held_after = 2
    page = open_page(alone.address)
    ask(page)
    page.wait_for_selector(".canvas .cell[data-state=token]")
    page.keyboard.press("Escape")
    shows(page, "#said", "Stopped")
    assert page.locator("#message").is_hidden()
    assert len(cells(page)) > 0


# -- a run again ---------------------------------------------------------------------------------------------------


def test_a_saved_run_is_replayed_by_slider_and_keys(open_page: Open, tmp_path: Path) -> None:
    page = open_page(saved(tmp_path, FOCUS))
    last = len(FOCUS.steps)
    assert place(page) == f"step {last} of {last}"
    page.keyboard.press("Home")
    assert place(page) == f"step 0 of {last}"
    assert cells(page) == []
    page.keyboard.press("ArrowRight")
    first = [token.text.strip() for token in FOCUS.tokens if token.step == 1]
    assert page.locator(".canvas .cell.fresh").all_inner_texts() == first
    assert len(cells(page, "evicted")) == FOCUS.steps[0].kept.count(False) > 0
    page.locator(".replay input").fill("5")
    assert place(page) == f"step 5 of {last}"
    assert len(cells(page)) == sum(token.step <= 5 for token in FOCUS.tokens)
    page.keyboard.press("End")
    assert len(cells(page)) == len(FOCUS.tokens)
    box = page.locator(".film").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 2.5 / (last + 1), box["y"] + 10)
    assert place(page) == f"step 2 of {last}"


def test_a_replay_moves_nothing(open_page: Open, tmp_path: Path) -> None:
    page = open_page(saved(tmp_path, FOCUS))
    where = (
        "[...document.querySelectorAll('.cell')].map((c) => c.getBoundingClientRect()).map((b) => [b.x, b.y, b.width])"
    )
    end = page.evaluate(where)
    page.keyboard.press("Home")
    assert page.evaluate(where) == end


def test_play_goes_to_the_end_and_pauses(open_page: Open, tmp_path: Path) -> None:
    page = open_page(saved(tmp_path, FOCUS))
    page.select_option('[aria-label="Steps per second"]', "2")
    page.click(".play")
    assert page.inner_text(".play") == "Pause"
    shows(page, ".replay output", "step 1 ")
    page.click(".play")
    here = place(page)
    page.select_option('[aria-label="Steps per second"]', "32")
    page.wait_for_timeout(100)
    assert place(page) == here
    page.locator("h2").click()
    page.keyboard.press("Space")
    shows(page, ".play", "Play")
    assert place(page) == f"step {len(FOCUS.steps)} of {len(FOCUS.steps)}"


def test_tokens_tell_of_themselves_to_pointer_and_keys(open_page: Open, tmp_path: Path) -> None:
    page = open_page(saved(tmp_path, FOCUS))
    token = FOCUS.tokens[4]
    cell = page.locator(".canvas .cell").nth(4)
    cell.hover()
    told = page.inner_text(".told")
    assert token.text.strip() in told
    assert f"step {token.step}" in told
    assert f"confidence {token.confidence:.3f}" in told
    assert f"token {token.token}" in told
    assert f"step {token.step}" in cell.get_attribute("aria-label")
    page.locator('.canvas .cell[tabindex="0"]').focus()
    page.keyboard.press("ArrowRight")
    focused = "[...document.querySelectorAll('.cell')].indexOf(document.activeElement)"
    assert page.evaluate(focused) == 1
    assert "position 2" in page.inner_text(".told")
    assert place(page) == f"step {len(FOCUS.steps)} of {len(FOCUS.steps)}", "the run stays where it is"
    page.keyboard.press("End")
    page.keyboard.press("ArrowUp")
    assert 1 < page.evaluate(focused) < len(FOCUS.tokens) - 1
    page.keyboard.press("Home")
    assert page.evaluate(focused) == 0
    assert page.evaluate("document.querySelectorAll('.canvas .cell[tabindex=\"0\"]').length") == 1


def test_colours_say_what_was_chosen(open_page: Open, tmp_path: Path) -> None:
    page = open_page(saved(tmp_path, FOCUS))
    shade = "(n) => [...document.querySelectorAll('.canvas .cell')].map((c) => Number(c.dataset.shade))"
    page.select_option('[aria-label="Colour by"]', "run")
    steps = [token.step for token in FOCUS.tokens]
    assert page.evaluate(shade) == [min(7, (step - 1) * 8 // (len(FOCUS.steps) - 1)) for step in steps]
    page.select_option('[aria-label="Colour by"]', "confidence")
    assert page.evaluate(shade) == [min(7, int(token.confidence * 8)) for token in FOCUS.tokens]
    assert "unsure" in page.inner_text(".legend")


def test_tokens_that_changed_and_tokens_that_were_given(open_page: Open, tmp_path: Path) -> None:
    """A rule may take a token back or put another in its place; a fixed token was there before the first step."""
    given = tuple(
        replace(token, step=0, confidence=1.0) if i == 0 else token for i, token in enumerate(FOCUS.tokens[:3])
    )
    kept, sure = (True,) * 3, (1.0, 0.5, 0.0)
    steps = tuple(
        replace(FOCUS.steps[0], step=n, offset=0, token_ids=ids, tokens=texts, confidence=sure, kept=kept)
        for n, ids, texts in (
            (1, (given[0].token, 7, -1), (given[0].text, "one", None)),
            (2, (given[0].token, -1, 8), (given[0].text, None, "two")),
            (3, tuple(t.token for t in given), tuple(t.text for t in given)),
        )
    )
    tokens = (given[0], *(replace(token, step=3) for token in given[1:]))
    page = open_page(saved(tmp_path, replace(FOCUS, steps=steps, tokens=tokens)))
    first, *others = (token.text.strip() for token in given)
    page.keyboard.press("Home")
    assert cells(page) == [first]
    seen = []
    for _ in range(3):
        page.keyboard.press("ArrowRight")
        seen.append(cells(page))
    assert seen == [[first, "one"], [first, "two"], [first, *others]]
    assert page.locator('.canvas [data-shade="given"]').all_inner_texts() == [first]


def test_what_a_model_says_is_text(open_page: Open, tmp_path: Path) -> None:
    mean = "<img src=x onerror=alert(1)></script><b>"
    tokens = (replace(FOCUS.tokens[0], text=mean), *FOCUS.tokens[1:])
    page = open_page(saved(tmp_path, replace(FOCUS, tokens=tokens, prompt=mean)))
    assert page.locator("img").count() == 0
    assert page.inner_text(".prompt") == mean
    assert cells(page)[0] == mean


# -- every reader --------------------------------------------------------------------------------------------------


def test_dark_light_and_reduced_motion(open_page: Open, tmp_path: Path) -> None:
    look = "(() => { const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]; })()"
    cell = "getComputedStyle(document.querySelector('.canvas .cell'))"
    found = {}
    for scheme in ("light", "dark"):
        page = open_page(saved(tmp_path, FOCUS), color_scheme=scheme)
        found[scheme] = page.evaluate(look)
        assert page.evaluate(f"{cell}.backgroundColor") != "rgba(0, 0, 0, 0)"
    sums = {scheme: [sum(map(int, re.findall(r"\d+", c)[:3])) for c in pair] for scheme, pair in found.items()}
    assert sums["light"][0] > 700 > 100 > sums["light"][1]
    assert sums["dark"][0] < 100 < 700 < sums["dark"][1]
    assert page.evaluate(f"{cell}.transitionDuration") != "0s"
    page = open_page(saved(tmp_path, FOCUS), reduced_motion="reduce")
    assert page.evaluate(f"{cell}.transitionDuration") == "0s"


@pytest.mark.parametrize("width", [320, 390])
def test_a_phone_scrolls_in_one_direction(width: int, server: FakeServer, open_page: Open, tmp_path: Path) -> None:
    wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    page = open_page(server.address, width, 700, has_touch=True)
    ask(page, "w" * 300)
    done(page)
    assert page.evaluate(wide) == 0
    assert page.locator("#denoise").bounding_box()["height"] >= 30
    long = replace(FOCUS, tokens=(replace(FOCUS.tokens[0], text="x" * 200), *FOCUS.tokens[1:]), prompt="y" * 200)
    page = open_page(saved(tmp_path, long, DENSE), width, 700)
    assert page.evaluate(wide) == 0


def test_every_control_has_a_name(server: FakeServer, open_page: Open) -> None:
    page = open_page(server.address)
    ask(page)
    done(page)
    nameless = """[...document.querySelectorAll('button, input, select, textarea, [role=listbox], [role=group]')]
        .filter((e) => !(e.labels?.length || e.getAttribute('aria-label') || e.textContent.trim()))
        .map((e) => e.outerHTML)"""
    assert page.evaluate(nameless) == []
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.name") == "prompt"


# -- what goes wrong -----------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_and_kept_in_the_page(alone: FakeServer, open_page: Open) -> None:
    alone.key = "sesame"
    page = open_page(alone.address, complains=REFUSED)
    page.wait_for_selector("#key-field:visible")
    assert "API key" in page.inner_text("#message")
    page.fill('[name="key"]', "sesame")
    page.click("#again")
    page.wait_for_selector("#message", state="hidden")
    ask(page)
    done(page)
    assert len(cells(page)) == len(FOCUS.tokens)
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]


def test_a_page_waits_for_a_server_that_loads(alone: FakeServer, open_page: Open) -> None:
    alone.loading = 1
    page = open_page(alone.address, complains=REFUSED)
    page.wait_for_selector("#message:visible")
    assert page.inner_text("#message-text") == ("Not ready yet: the server is loading its model. Asking again in 1 s.")
    page.wait_for_selector("#denoise:enabled")
    assert page.locator("#message").is_hidden()


def test_a_busy_server_is_told_of_and_asked_again(alone: FakeServer, open_page: Open) -> None:
    alone.busy = 1
    page = open_page(alone.address, complains=REFUSED)
    ask(page)
    page.wait_for_selector("#message:visible")
    assert page.inner_text("#message-text") == (
        "The server is busy: 2 requests wait, as many as may. Try again in 3 s."
    )
    page.click("#again")
    done(page)
    page.wait_for_selector("#message", state="hidden")
    assert len(cells(page)) == len(FOCUS.tokens)


def test_what_has_come_stays_where_the_connection_is_lost(alone: FakeServer, open_page: Open) -> None:
    alone.lost_after = 4
    page = open_page(alone.address)
    ask(page)
    page.wait_for_selector("#message:visible")
    assert page.inner_text("#message-text") == "The connection was lost before the response was complete."
    assert place(page) == "step 4 of 4"
    assert cells(page)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"broken_after": 3}, "the engine has died."),
        (
            {"refusal": "threshold must be above 0 and at most 1, got 7."},
            "threshold must be above 0 and at most 1, got 7.",
        ),
    ],
    ids=["in the stream", "before it"],
)
def test_errors_are_told_in_the_server_s_words(
    wrong: dict[str, Any], message: str, alone: FakeServer, open_page: Open
) -> None:
    for name, value in wrong.items():
        setattr(alone, name, value)
    page = open_page(alone.address, complains=REFUSED)
    ask(page)
    page.wait_for_selector("#message:visible")
    assert page.inner_text("#message-text") == message


def test_a_server_that_is_gone(open_page: Open) -> None:
    with serving(FakeServer({"focus": FOCUS})) as fake:
        page = open_page(fake.address, complains=REFUSED)
        page.wait_for_selector("#denoise:enabled")
    ask(page)
    page.wait_for_selector("#message:visible")
    assert page.inner_text("#message-text") == "The server does not answer. Is it still running?"


def test_an_empty_prompt_is_not_sent(alone: FakeServer, open_page: Open) -> None:
    page = open_page(alone.address)
    ask(page, "  ")
    page.wait_for_selector("#message:visible")
    assert page.inner_text("#message-text") == "Write a prompt first."
    assert alone.asked == []
