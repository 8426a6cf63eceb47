"""Runs that no model made: what a page has to show, drawn at random."""

from __future__ import annotations

import random
import re

from dgraph.viewer import Run, Step, Token

TEXT = """Sorted: cloud maple river stone #### cloud

def area(width, height):
    return width * height
"""


def made(recipe: str = "focus", seed: int = 0, block: int = 16, text: str = TEXT, prompt: str = "Sort: b a") -> Run:
    """A run that says a text in pieces, about two tokens a step from left to right; "focus" leaves masks out."""
    draw = random.Random(seed)
    pieces = re.findall(r"\n| ?\w{1,6}|[^\w\s]|\s", text)
    steps, tokens = [], [Token(0, "", 0, 0.0)] * len(pieces)
    for offset in range(0, len(pieces), block):
        width = min(block, len(pieces) - offset)
        said: dict[int, Token] = {}
        while len(said) < width:
            number = len(steps) + 1
            masked = sorted(set(range(width)) - set(said), key=lambda i: i + draw.random() * 6)
            for i in masked[: draw.choice((1, 2, 3))]:
                said[i] = Token(100 + offset + i, pieces[offset + i], number, round(draw.uniform(0.6, 1), 3))
            kept = tuple(i in said or recipe != "focus" or draw.random() < 0.5 for i in range(width))
            now = [said.get(i) for i in range(width)]
            steps.append(
                Step(
                    number,
                    offset,
                    tuple(-1 if one is None else one.token for one in now),
                    tuple(None if one is None else one.text for one in now),
                    tuple(0.0 if one is None else one.confidence for one in now),
                    kept,
                )
            )
        tokens[offset : offset + width] = [said[i] for i in range(width)]
    usage = {"prompt_tokens": 9, "completion_tokens": len(tokens), "cached_tokens": 0, "steps": len(steps)}
    usage["rows"] = sum(map(sum, (step.kept for step in steps)))
    return Run("tiny_sdar", recipe, prompt, block, tuple(steps), tuple(tokens), usage, len(steps) / 100)
