"""The embedded full bidirectional model: the long retrieval it was trained for, its checkpoint, and what it answers."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch

import dgraph
import dgraph.models
from dgraph.models.tasks import TASKS, Example, is_held_out, make, matches, read_examples
from tests.tiny import interpret
from training import checkpoint, corpus, tokenizer
from training.data import KIND_NAMES, RESPONSE, Layout, Mixture
from training.evaluate import (
    DEPTHS,
    NEEDLE_LENGTHS,
    needle_cell,
    needle_table,
    run_examples,
)
from training.model import LLADA, TinyModel
from training.tokenizer import EOS_ID, MASK_ID, PAD_ID
from training.train import LIMITS, STAGES

MODELS = Path(dgraph.models.__path__[0])
FOLDER = MODELS / "tiny_llada"
TOKENIZER = tokenizer.load(FOLDER)
STORED = read_examples(FOLDER / "held_out.jsonl")
PASSAGES = ["def f(x):\n    return x + 1\n" * 60, "Some words\nof a text.\nAnd more of them.\n" * 5]


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return checkpoint.read(FOLDER).eval()


def length_of(example: Example) -> int:
    """Tokens of the encoded prompt."""
    return len(tokenizer.encode_prompt(TOKENIZER, example.prompt))


def depth_of(prompt: str) -> int:
    """In which fifth of the pairs' order the one asked for lies, from 0."""
    keys = re.findall(r"(\w+) is \d+\.", prompt)
    wanted = re.search(r"What is (\w+)\?", prompt)
    assert wanted
    return next(part for part in range(DEPTHS) if keys.index(wanted[1]) < round((part + 1) / DEPTHS * len(keys)))


# -- retrieval from long prompts -----------------------------------------------------------------------------------


def test_batches_reach_512_token_prompts_with_a_needle_at_every_depth() -> None:
    layout = Layout(LIMITS["llada"], STAGES["llada"][-1].pairs, regions=True)
    data = Mixture(TOKENIZER, PASSAGES, 16, 1152, 3, 0, layout)
    depths, longest = set(), 0
    for index in range(3):
        batch = data[index].to(torch.device("cpu"))
        for number in range(int(batch.docs.max()) + 1):
            at = batch.docs == number
            if not at.any():
                continue
            assert batch.positions[at].tolist() == list(range(int(at.sum())))
            assert int(at.sum()) <= layout.limit
            if KIND_NAMES[int(batch.tasks[at][0])] != "needle":
                continue
            prompt = batch.tokens[at & (batch.kinds == 1)].tolist()
            text = TOKENIZER.decode(prompt)
            pairs, asked = dict(re.findall(r"(\w+) is (\d+)\.", text)), re.search(r"What is (\w+)\?", text)
            assert asked
            answer = TOKENIZER.decode(batch.tokens[at & (batch.kinds == RESPONSE)].tolist())
            assert answer.endswith(f"#### {pairs[asked[1]]}")
            longest = max(longest, len(prompt))
            if len(prompt) > 400:
                depths.add(depth_of(text))
    assert longest > 480
    assert depths == set(range(DEPTHS))


def test_stages_grow_in_pairs_to_512_tokens() -> None:
    pairs = [stage.pairs for stage in STAGES["llada"]]
    assert pairs == sorted(pairs)
    lengths = [length_of(make("needle", random.Random(0), fewest=n, most=n)) for n in pairs]
    for length, goal in zip(lengths, (128, 256, 512), strict=True):
        assert length == pytest.approx(goal, rel=0.1)
    assert LIMITS["llada"] >= 512 + 64


@pytest.mark.parametrize("length", NEEDLE_LENGTHS["llada"])
def test_needles_of_the_table_are_held_out_and_where_they_should_be(length: int) -> None:
    for part in range(DEPTHS):
        for example in needle_cell(TOKENIZER, length, part, 4):
            assert is_held_out(example.prompt)
            assert depth_of(example.prompt) == part
            assert 0.85 * length < length_of(example) <= length + 4


# -- the checkpoint --------------------------------------------------------------------------------------------------


def test_the_folder_is_a_llada_with_tiny_sdars_tokenizer(model: TinyModel) -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert (config["architectures"], config["model_type"]) == (["LLaDAModelLM"], "llada")
    assert (config["mask_token_id"], config["eos_token_id"], config["pad_token_id"]) == (MASK_ID, EOS_ID, PAD_ID)
    assert model.config == LLADA
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        assert (FOLDER / name).read_bytes() == (MODELS / "tiny_sdar" / name).read_bytes()
    sizes = [file.stat().st_size for file in FOLDER.iterdir()]
    assert max(sizes) < 15 * 2**20
    assert sum(sizes) < 25_000_000


def test_the_card_has_the_figures_of_the_evaluation() -> None:
    card = (FOLDER / "README.md").read_text()
    report = json.loads((FOLDER / "evaluation.json").read_text())
    for task in TASKS:
        figures, single = report["tasks"][task], report["tasks_one_token_a_step"][task]
        found = re.search(rf"\| {task} \| (.*) \|\n", card)
        assert found
        numbers = [float(cell) for cell in found[1].split(" | ")]
        keys = ("exact_match", "committed_per_step", "output_per_step", "steps_per_block")
        assert numbers == pytest.approx([*(figures[key] for key in keys), single["exact_match"]], abs=0.0051)
    for length, cells in report["needle_by_tokens_and_depth"].items():
        assert f"| {length} | {' | '.join(f'{cell:g}' for cell in cells)} |" in card


def test_the_stored_prompts_are_held_out_and_reach_512_tokens() -> None:
    counts = {task: sum(example.task == task for example in STORED) for task in KIND_NAMES}
    long = [example for example in STORED if example.task == "needle"][100:]
    assert counts == {**dict.fromkeys(TASKS, 100), "text": 50, "needle": 100 + len(long)}
    assert all(is_held_out(example.prompt) for example in STORED if example.task != "text")
    passages = (f"{example.prompt}\n{example.answer}" for example in STORED if example.task == "text")
    assert all(corpus.is_held_out(passage) for passage in passages)
    cells = {(round(length_of(example) / 128) * 128, depth_of(example.prompt)) for example in long}
    assert cells == {(length, part) for length in (256, 384, 512) for part in range(DEPTHS)}
    assert len(long) == 5 * len(cells)


def test_the_captured_graph_equals_the_training_module(model: TinyModel) -> None:
    loaded = dgraph.load("tiny_llada")
    assert loaded.spec.attention == "bidirectional"
    assert (loaded.spec.mask_id, loaded.spec.eos_ids, loaded.spec.pad_id) == (MASK_ID, (EOS_ID,), PAD_ID)
    graph = dgraph.capture(loaded)
    for example in (STORED[0], STORED[-60]):
        prompt = tokenizer.encode_prompt(TOKENIZER, example.prompt)
        assert loaded.tokenizer is not None
        assert loaded.tokenizer.encode(example.prompt) == prompt
        ids = torch.tensor([[*prompt, *[MASK_ID] * 32]])
        positions, everything = torch.arange(ids.shape[1])[None], torch.ones(1, 1, *[ids.shape[1]] * 2).bool()
        with torch.no_grad():
            expected = model(ids, positions, everything)
            got = interpret(graph, {"input_ids": ids, "positions": positions})["logits"]
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


# -- what it answers -------------------------------------------------------------------------------------------------


def test_it_answers_held_out_prompts(model: TinyModel) -> None:
    for task in TASKS:
        examples = [example for example in STORED if example.task == task][:4]
        assert run_examples(model, TOKENIZER, examples)["exact_match"] == 100


@pytest.mark.release
def test_it_retrieves_at_every_length_and_depth(model: TinyModel) -> None:
    table = needle_table(model, TOKENIZER, 1)
    assert table == {str(length): [100] * DEPTHS for length in NEEDLE_LENGTHS["llada"]}


def test_what_it_retrieves_comes_from_the_prompt(model: TinyModel) -> None:
    """With the value in the prompt changed, the old answer is wrong."""
    example = [example for example in STORED if example.task == "needle"][-1]
    value = example.answer.rpartition(" ")[2]
    other = "731" if value != "731" else "732"
    changed = Example("needle", example.prompt.replace(value, other), example.answer.replace(value, other))
    assert not matches(changed, example.answer)
    assert run_examples(model, TOKENIZER, [changed])["exact_match"] == 100
