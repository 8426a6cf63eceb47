"""Dialogues that a chat model writes itself, for its conversion: so nothing else about it changes.

There are three ways. The model is given the beginning of its chat form and writes the user's turn, too (Magpie, arXiv
2406.08464). Or it is given the beginning of the user's turn as well, such as "Who wrote", for short questions that it
would rarely ask itself. Or the prompts are given and it writes the answers alone.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch

from dgraph.errors import InputError
from dgraph.families import ChatTokenizer
from dgraph.ranks.groups import Alone, Group

from .conversion import Base, seeded
from .pairs import Pair
from .sampling import Writer

FILE = "dialogues.jsonl"
PROMPT_TOKENS, RESPONSE_TOKENS = 128, 512
"""Longest turns. A prompt that is not over by then is thrown away, a response kept up to there."""
GIVE_UP_AFTER = 20
"""Batches in a row without a new dialogue after which there are taken to be no more."""
PROMPT_TEMPERATURE, TEMPERATURE = 1.0, 0.7
"""Temperatures of turns of the user, and of answers unless another one is given."""


@dataclass(frozen=True)
class Frame:
    """Ids around a user's turn: ids before it, and ids between it and the answer, of which the first ends it."""

    before: list[int]
    after: list[int]

    def opened(self, tokenizer: ChatTokenizer, opening: str) -> list[int]:
        """Ids up to where a user's turn goes on that begins with a text."""
        ids = tokenizer.encode(opening)
        return ids[: len(ids) - len(self.after)]


@dataclass(frozen=True)
class Turn:
    """A turn that a model wrote: ids up to its stop token, which is left out, and whether it came."""

    ids: list[int]
    ended: bool


def frame_of(tokenizer: ChatTokenizer) -> Frame:
    """The chat form of a tokenizer.

    Raises:
        InputError: it has none.
    """
    first, second = tokenizer.encode("A"), tokenizer.encode("7")
    before, after = _shared(first, second), _shared(first[::-1], second[::-1])[::-1]
    if not before or not after:
        raise InputError("the base has no chat template, so it cannot write dialogues; give --data instead.")
    return Frame(before, after)


def _shared(first: list[int], second: list[int]) -> list[int]:
    """The ids that both begin with."""
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))]


def write(
    base: Base,
    path: Path,
    total: int,
    prompts: Sequence[str] | None = None,
    rows: int = 64,
    seed: int = 0,
    until: float = float("inf"),
    tell: Callable[[int], None] = lambda done: None,
    ranks: Group | None = None,
    temperature: float = TEMPERATURE,
    openings: Sequence[str] = (),
) -> int:
    """Write dialogues {"prompt", "response", "ended", "batch"} until there are `total`, or `time.monotonic()` is
    `until`; return the number that there are then.

    Dialogues that are there stay, and the next batch follows the last one: a batch depends on the seed and its number
    alone. A prompt that does not end or was there before is left out.

    Args:
        prompts: questions to answer; None: the model asks itself.
        rows: dialogues of a batch.
        ranks: processes that write together, each every `ranks.world`-th batch. Rank 0 writes the file, which is that
            of one rank.
        temperature: temperature of the answers, above 0. The lower it is, the more likely and the more alike they are.
        openings: texts with which the user's turns of every other batch begin, one after the other, where the model
            asks itself. Such turns go on at the temperature of answers: likely questions are asked.

    Raises:
        InputError: a temperature of 0 or less; openings beside prompts, or an empty one; a base without a chat
            template, or with a sliding window; prompts that do not last; or no dialogue that is new and ends in
            `GIVE_UP_AFTER` batches.
    """
    if not temperature > 0:
        raise InputError(f"the temperature of answers must be above 0, got {temperature}; 0.01 is as good as none.")
    if openings and (prompts is not None or not all(openings)):
        raise InputError(f"openings are texts, of prompts that the base writes itself, got {list(openings)!r}.")
    ranks = ranks or Alone()
    frame, writer = frame_of(base.tokenizer), Writer(base)
    begun = [frame.opened(base.tokenizer, opening) for opening in openings]
    generator = torch.Generator(base.model.device)
    lines = _lines_of_all(path, ranks)
    seen = {line["prompt"] for line in lines}
    done, first = len(lines), 1 + max((line["batch"] for line in lines), default=-1)
    vain = 0

    def batches() -> Iterator[tuple[int, list[Pair] | None]]:
        for start in count(first, ranks.world):
            if ranks.exchange(time.monotonic() >= until)[0]:
                return
            seeded(generator, "dialogues", seed, start + ranks.rank)
            made = _batch(writer, frame, begun, prompts, start + ranks.rank, rows, temperature, generator)
            yield from enumerate(ranks.exchange(made), start)

    tell(min(done, total))
    for number, made in batches() if done < total else ():
        if made is None:
            assert prompts is not None
            raise InputError(
                f"{len(prompts)} prompts are too few for the dialogues asked for; give more, or fewer --dialogues."
            )
        new = [pair for pair in made if pair.prompt not in seen][: total - done]
        if not ranks.rank:
            _append(path, [{**pair._asdict(), "batch": number} for pair in new])
        seen |= {pair.prompt for pair in new}
        done += len(new)
        tell(min(done, total))
        if done >= total:
            break
        vain = 0 if new else vain + 1
        if vain == GIVE_UP_AFTER:
            raise InputError(
                f"{base.name} wrote nothing new that ends in {vain} batches of {rows} ({done} of {total} dialogues "
                f"so far); give --prompts, or fewer --dialogues."
            )
    return done


def _batch(
    writer: Writer,
    frame: Frame,
    begun: Sequence[list[int]],
    prompts: Sequence[str] | None,
    number: int,
    rows: int,
    temperature: float,
    generator: torch.Generator,
) -> list[Pair] | None:
    """The dialogues of a batch; None if no prompts are left for it. begun: ids with which rows of every other
    batch begin, in turns.
    """
    tokenizer, end = writer.base.tokenizer, writer.base.eos_ids[0]
    if prompts is None:
        opened = bool(begun) and number % 2 == 1
        each = [begun[row % len(begun)] if opened else frame.before for row in range(rows)]
        warmth = temperature if opened else PROMPT_TEMPERATURE
        turns = zip(each, _turns(writer, each, frame.after[0], PROMPT_TOKENS, warmth, generator), strict=True)
        asked = [tokenizer.decode(ids[len(frame.before) :] + turn.ids).strip() for ids, turn in turns if turn.ended]
    else:
        asked = list(prompts[number * rows : (number + 1) * rows])
        if not asked:
            return None
    asked = [prompt for prompt in dict.fromkeys(asked) if prompt]
    if not asked:
        return []
    began = tokenizer.encode_prompts(asked)
    answers = _turns(writer, began, end, RESPONSE_TOKENS, temperature, generator)
    texts = [tokenizer.decode(answer.ids).strip() for answer in answers]
    found = zip(asked, texts, answers, strict=True)
    return [Pair(prompt, text, answer.ended) for prompt, text, answer in found if text]


def _turns(
    writer: Writer, began: Sequence[list[int]], stop: int, most: int, temperature: float, generator: torch.Generator
) -> list[Turn]:
    """Continue each row of ids by at most `most` tokens."""
    rows = writer.write(began, stop, most, temperature, generator)
    return [Turn(row[: row.index(stop)], True) if stop in row else Turn(row, False) for row in rows]


def _append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Add lines to a file, which are there when the machine ends."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.flush()
        os.fsync(file.fileno())


def _lines_of_all(path: Path, ranks: Group) -> list[dict[str, Any]]:
    """The lines of a file that rank 0 writes."""
    lines = [] if ranks.rank else _whole_lines(path)
    ranks.exchange(None)
    return _whole_lines(path) if ranks.rank else lines


def _whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; one that an interrupt left half is cut off."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    return [json.loads(line) for line in whole.splitlines()]
