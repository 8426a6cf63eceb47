"""Several open blocks (MultiBD, arXiv 2606.29215) for one sequence in plain Python, which recomputes everything.

Nothing is kept from step to step but the tokens and which blocks are open. A row sees all positions up to the end of
its block. So there is no cache to be wrong, and no forward that writes one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from torch import Tensor

Logits = Callable[[Sequence[int]], Tensor]
"""f32[n, vocab] of n tokens, of which each sees those up to the end of its block."""


@dataclass
class Trace:
    """Tokens up to the end of the response or a stop token, and what each step committed.

    opened: by step, the blocks that were open, by number; committed: by step, the tokens by position.
    """

    tokens: list[int] = field(default_factory=list)
    opened: list[list[int]] = field(default_factory=list)
    committed: list[dict[int, int]] = field(default_factory=list)


def rows(share: float, block: int) -> int:
    """Rows of a block that are at least a share of it."""
    return math.ceil(Fraction(str(share)) * block)


def sure(confidence: dict[int, tuple[int, float]], threshold: float, must: bool) -> list[int]:
    """Masked positions above the threshold; the most confident one without any, if one must be committed."""
    chosen = [position for position, (_, found) in confidence.items() if found > threshold]
    best = min(confidence, key=lambda position: (-confidence[position][1], position), default=None)
    return chosen or ([best] if must and best is not None else [])


def generate(
    logits: Logits,
    prompt: Sequence[int],
    *,
    new: int,
    block: int,
    mask: int,
    stops: Sequence[int] = (),
    threshold: float,
    blocks: int,
    open_at: float = 0.1,
    sure_at: float = 0.9,
    fixed: Sequence[int | None] = (),
) -> Trace:
    """Decode greedily with up to `blocks` open blocks. fixed: the first tokens of the response, None where free."""
    end = len(prompt) + new
    size = -(-end // block) * block
    free = {at for at in range(len(prompt), size) if at - len(prompt) >= len(fixed) or fixed[at - len(prompt)] is None}
    canvas = [*prompt, *(mask if token is None else token for token in fixed)]
    canvas += [mask] * (size - len(canvas))
    masked = set(free)
    last = max(at for at in free if at < end)
    front = min(min(free), end - 1) // block
    opened, trace = 1, Trace()

    def span(number: int) -> range:
        return range(number * block, (number + 1) * block)

    def decided(number: int) -> int:
        return sum(at not in masked for at in span(number))

    while True:
        numbers = list(range(front, front + opened))
        probability = logits(canvas[: (numbers[-1] + 1) * block]).softmax(-1)
        step: dict[int, int] = {}
        for number in numbers:
            found = {
                at: (int(probability[at].argmax()), float(probability[at].max())) for at in span(number) if at in masked
            }
            must = number == front or decided(number - 1) >= rows(sure_at, block)
            step |= {at: found[at][0] for at in sure(found, threshold, must)}
        trace.opened.append(numbers)
        trace.committed.append(step)
        for at, token in step.items():
            canvas[at] = token
        masked -= step.keys()
        known = next((at for at in range(len(prompt), size) if at in masked), size)
        stop = next((at for at in range(len(prompt), known) if canvas[at] in stops and at in free), None)
        done = 0
        while done < opened and not any(at in masked and at <= last for at in span(front + done)):
            done += 1
        if stop is not None or (front + done) * block > last:
            trace.tokens = canvas[len(prompt) : min(end, size if stop is None else stop)]
            return trace
        grown = opened - done + (opened > done and decided(front + opened - 1) >= rows(open_at, block))
        front += done
        opened = max(1, min(grown, blocks, last // block + 1 - front))
