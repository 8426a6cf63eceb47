"""Questions about one sentence of a long text, for `dgraph eval --data`: retrieval by a model of real language.

    python -m benchmarks.needle_text --model smol_sdar --lengths 1024 2048 --out needle.jsonl
    dgraph eval smol_sdar --data needle.jsonl --max-new-tokens 16 -r dense -r dllm_serve:ratio=0.1

A text repeats sentences in which no number stands, and has one that gives a town its number. The question asks for the
number; a response is right if the last number in it is that one. Each length is a task, `needle-1024`.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import dgraph
from dgraph.errors import InputError

TOWNS = (
    *("Paris", "London", "Berlin", "Madrid", "Rome", "Oslo", "Cairo", "Lima", "Tokyo", "Seoul", "Delhi", "Perth"),
    *("Dublin", "Vienna", "Prague", "Athens", "Lisbon", "Warsaw", "Geneva", "Milan"),
)
SENTENCES = (
    "The river runs past the old mill and under the stone bridge.",
    "In the morning the market opens and people buy bread and fruit.",
    "A dog sleeps in the shade of the tree beside the road.",
    "The train to the coast leaves twice a day, and it is often late.",
    "Children play in the park after school until it gets dark.",
    "The library keeps its oldest books in a room on the second floor.",
    "When the wind comes from the north, the fishing boats stay in the harbour.",
    "My neighbour grows tomatoes on the balcony and gives most of them away.",
)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def question(length: int, depth: float, draw: random.Random, tokens: Callable[[str], int]) -> dict[str, str]:
    """A line of the file: a prompt of at most `length` tokens, the sentence at a depth of it, 0 for the first.

    Raises:
        InputError: so few tokens that no other sentence fits.
    """
    town, number = draw.choice(TOWNS), draw.randint(1000, 9999)
    needle = f"The special number of {town} is {number}."
    ask = f"\n\nWhat is the special number of {town}?"
    left = length - tokens(f"{needle}{ask}")
    others: list[str] = []
    while (left := left - tokens(sentence := draw.choice(SENTENCES))) >= 0:
        others.append(sentence)
    if not others:
        raise InputError(f"a text of {length} tokens has no room for a sentence beside the needle; give more.")
    others.insert(round(depth * len(others)), needle)
    prompt = " ".join(others) + ask
    return {"task": f"needle-{length}", "prompt": prompt, "answer": str(number), "compare": "number"}


def questions(
    lengths: Sequence[int], depths: Sequence[float], count: int, tokens: Callable[[str], int], seed: int = 0
) -> list[dict[str, str]]:
    """`count` of each length and depth; tokens: how many a text has."""
    cells = [(length, depth) for length in lengths for depth in depths]
    return [
        question(length, depth, random.Random(f"{seed} {length} {depth} {i}"), tokens)
        for length, depth in cells
        for i in range(count)
    ]


def main() -> None:
    """Parse the command line, write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smol_sdar", help="whose tokenizer counts: an embedded model or a folder")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="tokens, at most")
    parser.add_argument("--depths", type=float, nargs="+", default=list(DEPTHS))
    parser.add_argument("--count", type=int, default=2, help="of each length and depth")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = dgraph.load(args.model).tokenizer
    assert tokenizer is not None, "an embedded model has one"
    empty = len(tokenizer.encode(""))  # of the chat frame
    found = questions(
        args.lengths, args.depths, args.count, lambda text: len(tokenizer.encode(text)) - empty, args.seed
    )
    args.out.write_text("".join(json.dumps(line) + "\n" for line in found), encoding="utf-8")
    print(f"{len(found)} questions in {args.out}")


if __name__ == "__main__":
    main()
