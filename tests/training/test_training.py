"""The tiny model and what made it: tasks, tokenizer, mask layout, objectives, decoder and checkpoint."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch

import dgraph.models
from dgraph.models.tasks import TASKS, Example, held_out, is_held_out, make, matches, read_examples
from training import checkpoint, corpus, tokenizer
from training.data import BLOCK, KIND_NAMES, Batch, Mixture, document, pack
from training.decode import decode
from training.evaluate import run_examples
from training.model import TinyConfig, TinyModel
from training.objective import block_diffusion, dense_mask, next_token
from training.tokenizer import EOS_ID, MASK_ID
from training.trainer import Trainer

FOLDER = Path(dgraph.models.__path__[0]) / "tiny_sdar"
SMALL = TinyConfig(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def small_batch(length: int = 128) -> Batch:
    """Two rows: documents of prompt lengths 40 and 5, one of three blocks and two of one."""
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> list[int]:
        return torch.randint(5, 300, (count,), generator=generator).tolist()

    documents = [
        document(ids(40), ids(30), "math", length),
        document(ids(5), ids(20), "sort", length),
        document(ids(5), ids(10), "text", length),
    ]
    return Batch(**{name: torch.from_numpy(a) for name, a in pack(documents, 2, length).items()}).to(
        torch.device("cpu")
    )


def recompute(example: Example) -> str:
    """The final answer of an example, worked out from its prompt alone."""
    prompt = example.prompt
    if example.task == "math":
        total = 0
        for sentence in prompt.split(". "):
            number = int(found.group()) if (found := re.search(r"\d+", sentence)) else 0
            if " has " in sentence:
                total = number
            elif "doubles" in sentence:
                total *= 2
            elif " buys " in sentence or " finds " in sentence:
                total += number
            elif " gives " in sentence or " loses " in sentence:
                total -= number
        return str(total)
    if example.task == "needle":
        wanted = re.search(r"What is (\w+)\?", prompt)
        assert wanted
        return dict(re.findall(r"(\w+) is (\d+)\.", prompt))[wanted.group(1)]
    if example.task == "sort":
        return min(prompt.removeprefix("Sort these words: ").split())
    if example.task == "follow":
        word, times = re.findall(r"word (\w+) in capitals (\d+) times", prompt)[0]
        return " - ".join([word.upper()] * int(times))
    statements = prompt.removeprefix("Run: ").split("; ")
    values: dict[str, int] = {}
    for statement in statements[:-1]:
        target, expression = statement.split(" = ")
        left, sign, right = [*expression.split(), "+", "0"][:3]
        base = values[left] if left in values else int(left)
        values[target] = base + int(right) if sign == "+" else base - int(right)
    return str(values[statements[-1].split()[1]])


@pytest.mark.parametrize("task", TASKS)
def test_tasks_are_deterministic_right_and_apart_from_the_held_out(task: str) -> None:
    first, second = ([make(task, rng) for _ in range(100)] for rng in (random.Random(3), random.Random(3)))
    assert first == second
    assert first != [make(task, random.Random(4)) for _ in range(100)]
    reserved = held_out(task, 100)
    assert reserved == held_out(task, 100)
    assert len({example.prompt for example in reserved}) == 100
    assert all(is_held_out(example.prompt) for example in reserved)
    assert not any(is_held_out(example.prompt) for example in first)
    for example in first + reserved:
        assert matches(example, example.answer)
        assert example.answer.rpartition("####")[2].strip() == recompute(example)


def test_a_match_needs_the_marker_or_the_whole_text() -> None:
    example = Example("math", "", "1 + 2 = 3. #### 3")
    assert matches(example, "whatever #### 3 ")
    assert not matches(example, "3")
    assert not matches(example, "1 + 2 = 3. #### 4")
    assert matches(Example("follow", "", "A - A"), " A - A\n")
    assert not matches(Example("follow", "", "A - A"), "A - A - A")


def test_unknown_tasks_and_impossible_counts_are_errors() -> None:
    with pytest.raises(ValueError, match=r"unknown task 'maths'.*math"):
        make("maths", random.Random(0))
    with pytest.raises(ValueError, match="distinct held-out prompts"):
        held_out("follow", 1000)


def test_the_tokenizer_round_trips_and_splits_digits() -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(FOLDER)
    ours = tokenizer.load(FOLDER)
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.mask_token_id) == (0, EOS_ID, MASK_ID)
    assert len(loaded) == ours.get_vocab_size() == 2048
    for text in ("river is 123.", "def f(x):\n    return x  # ümlaut\t\n\n", "  12 + 5 = 17. #### 17"):
        ids = loaded.encode(text, add_special_tokens=False)
        assert ids == ours.encode(text).ids
        assert loaded.decode(ids) == text
        assert sum(token.isdigit() for token in ours.encode(text).tokens) == sum(c.isdigit() for c in text)
    turn = [{"role": "user", "content": "What is stone?"}]
    templated = loaded.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert templated == tokenizer.encode_prompt(ours, "What is stone?")


def test_a_new_tokenizer_learns_from_the_text_it_is_given() -> None:
    learnt = tokenizer.train(["hello world, hello there\n" * 20] * 20, vocab_size=400, characters=5000)
    assert learnt.get_vocab_size() == 400
    assert [learnt.token_to_id(token) for token in tokenizer.SPECIAL] == [0, 1, 2, 3, 4]
    assert learnt.decode(learnt.encode("hello 42").ids) == "hello 42"


def test_only_packages_under_allowed_licences_give_text(tmp_path: Path) -> None:
    from email.message import Message

    def metadata(**fields: str) -> Message:
        message = Message()
        for name, value in fields.items():
            message[name.replace("_", "-")] = value
        return message

    assert corpus.free_licence(metadata(License_Expression="BSD-3-Clause AND MIT"))  # type: ignore[arg-type]
    assert corpus.free_licence(metadata(Classifier="License :: OSI Approved :: MIT License"))  # type: ignore[arg-type]
    assert not corpus.free_licence(metadata(License_Expression="MIT AND MPL-2.0"))  # type: ignore[arg-type]
    assert not corpus.free_licence(metadata(License="GPL"))  # type: ignore[arg-type]
    assert not corpus.free_licence(metadata(Name="says nothing"))  # type: ignore[arg-type]
    source = tmp_path / "module.py"
    source.write_text("import os\n\ndef f(x):\n" + "    x = x + 1\n" * 20 + "    return x\n\ny = 1\n")
    found = list(corpus.passages(source))
    assert len(found) == 1
    assert found[0].startswith("def f(x):")
    assert found[0].endswith("return x")


def test_documents_fill_whole_blocks_and_rows_keep_them_aligned() -> None:
    batch = small_batch()
    for row in range(2):
        for number in set(batch.docs[row].tolist()) - {-1}:
            at = (batch.docs[row] == number).nonzero().flatten()
            assert len(at) % BLOCK == 0
            assert at[0] % BLOCK == 0
            assert batch.positions[row, at].tolist() == list(range(len(at)))
    cut = document([3] * 10, [7] * 200, "text", 64)
    assert len(cut.ids) == 64
    assert EOS_ID not in cut.ids


def test_a_batch_depends_on_seed_and_index_alone() -> None:
    bpe = tokenizer.load(FOLDER)
    passages = ["def f():\n    return 1\n" * 20]
    first, second = Mixture(bpe, passages, 4, 512, 9, 0), Mixture(bpe, passages, 4, 512, 9, 0)
    second[3]
    assert torch.equal(first[5].tokens, second[5].tokens)
    assert not torch.equal(first[5].tokens, first[6].tokens)
    assert not torch.equal(first[5].tokens, Mixture(bpe, passages, 4, 512, 9, 1)[5].tokens)
    assert int(first[5].tasks.max()) == KIND_NAMES.index("text")


def test_what_a_row_sees() -> None:
    batch = small_batch()
    length = batch.tokens.shape[1]
    inputs = block_diffusion(batch, 2, torch.Generator().manual_seed(0))
    rows, width = inputs.input_ids.shape
    assert width == length + 2 * BLOCK
    seen = dense_mask(inputs.visible, rows, width, torch.device("cpu"))[:, 0]
    clean_blocks = batch.tokens.view(rows, -1, BLOCK)
    for row in range(rows):
        docs, blocks = batch.docs[row], batch.positions[row] // BLOCK
        for noisy in range(2):
            copied = inputs.targets[row, noisy * BLOCK : (noisy + 1) * BLOCK]
            source = int((clean_blocks[row] == copied).all(-1).nonzero()[0]) * BLOCK
            if docs[source] < 0:
                continue  # padding, which nobody reads
            earlier = ((docs == docs[source]) & (blocks < blocks[source])).nonzero().flatten().tolist()
            itself = range(length + noisy * BLOCK, length + (noisy + 1) * BLOCK)
            for query in itself:
                assert seen[row, query].nonzero().flatten().tolist() == [*earlier, *itself]
                assert inputs.positions[row, query] == batch.positions[row, source + query - itself[0]]
        for query in range(length):
            visible = (docs == docs[query]) & (blocks <= blocks[query])
            assert torch.equal(seen[row, query, :length], visible)
            assert not seen[row, query, length:].any()
    causal = dense_mask(next_token(batch).visible, rows, length, torch.device("cpu"))[:, 0]
    for row in range(rows):
        same = batch.docs[row][:, None] == batch.docs[row]
        assert torch.equal(causal[row], same.tril())


def test_only_response_tokens_are_masked_and_weighed() -> None:
    batch = small_batch()
    inputs = block_diffusion(batch, 4, torch.Generator().manual_seed(1))
    noisy = inputs.input_ids[:, batch.tokens.shape[1] :]
    masked = noisy == MASK_ID
    assert masked.any()
    assert torch.equal(noisy[~masked], inputs.targets[~masked])
    assert bool((inputs.weights[~masked] == 0).all())
    assert not (masked & (inputs.positions[:, -noisy.shape[1] :] < 5)).any()  # every prompt is longer
    assert torch.equal(inputs.input_ids[:, : batch.tokens.shape[1]], batch.tokens)


def test_a_noisy_block_is_predicted_as_the_decoder_would() -> None:
    """The training layout and a plain block-causal forward over [clean blocks, noisy block] agree."""
    torch.manual_seed(0)
    model = TinyModel(SMALL).double()
    item = document(list(range(5, 45)), list(range(50, 80)), "math", 96)
    arrays = pack([item], 1, 96)
    batch = Batch(**{name: torch.from_numpy(array) for name, array in arrays.items()}).to(torch.device("cpu"))
    inputs = block_diffusion(batch, 2, torch.Generator().manual_seed(0))
    mask = dense_mask(inputs.visible, *inputs.input_ids.shape, torch.device("cpu"))
    trained = model(inputs.input_ids, inputs.positions, mask)
    for number in range(2):
        rows = slice(96 + number * BLOCK, 96 + (number + 1) * BLOCK)
        start = int(inputs.positions[0, rows][0])
        ids = torch.cat((batch.tokens[:, :start], inputs.input_ids[:, rows]), 1)
        positions = torch.arange(start + BLOCK)[None]
        block_causal = (positions[:, :, None] // BLOCK >= positions[:, None] // BLOCK)[:, None]
        plain = model(ids, positions, block_causal)[:, start:]
        torch.testing.assert_close(trained[:, rows], plain, rtol=1e-9, atol=1e-9)


def test_cached_decoding_equals_forwards_of_everything() -> None:
    torch.manual_seed(0)
    model = TinyModel(SMALL).double().eval()
    prompts = [list(range(5, 45)), list(range(100, 107)), list(range(60, 124))]
    for prompt, result in zip(prompts, decode(model, prompts, 40, None), strict=True):
        tokens = list(prompt)
        end = -(-(len(prompt) + 40) // BLOCK) * BLOCK
        for start in range(len(prompt) // BLOCK * BLOCK, end, BLOCK):
            tokens += [MASK_ID] * (start + BLOCK - len(tokens))
            positions = torch.arange(len(tokens))[None]
            mask = (positions[:, :, None] // BLOCK >= positions[:, None] // BLOCK)[:, None]
            while MASK_ID in tokens:
                with torch.no_grad():
                    chance, choice = model(torch.tensor([tokens]), positions, mask)[0].float().softmax(-1).max(-1)
                best = max((i for i, t in enumerate(tokens) if t == MASK_ID), key=lambda i: (float(chance[i]), -i))
                tokens[best] = int(choice[best])
            if EOS_ID in tokens[start:]:
                break
        response = tokens[len(prompt) : len(prompt) + 40]
        assert result.ids == (response[: response.index(EOS_ID)] if EOS_ID in response else response)
        assert result.steps == result.committed == len(tokens) - len(prompt)


@pytest.mark.parametrize("phase", ["ar", "diffusion"])
def test_a_few_steps_reduce_the_loss(phase: str) -> None:
    torch.manual_seed(0)
    model = TinyModel(SMALL)
    trainer = Trainer(model, steps=12, peak=1e-2, final=0.1, dense=True, compiled=False)
    batch = small_batch()
    losses = []
    for _ in range(12):
        noise = torch.Generator().manual_seed(0)
        inputs = next_token(batch) if phase == "ar" else block_diffusion(batch, 3, noise)
        losses.append(float(trainer.step(inputs)[0]))
    assert losses[-1] < 0.8 * losses[0]


def test_a_checkpoint_survives_writing_and_reading(tmp_path: Path) -> None:
    model = TinyModel(SMALL).bfloat16()
    checkpoint.write(model, tmp_path, shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert not list(tmp_path.glob("*.part"))
    again = checkpoint.read(tmp_path, torch.bfloat16)
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value)


def test_the_embedded_checkpoint_is_a_qwen3_under_sdars_name() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = json.loads((FOLDER / "config.json").read_text())
    assert config["model_type"] == "sdar"
    assert (config["mask_token_id"], config["eos_token_id"], config["block_length"]) == (MASK_ID, EOS_ID, BLOCK)
    sizes = [file.stat().st_size for file in FOLDER.iterdir()]
    assert max(sizes) < 15 * 2**20
    assert sum(sizes) < 25 * 2**20
    ours = checkpoint.read(FOLDER).eval()
    theirs = Qwen3ForCausalLM(
        Qwen3Config(**{k: v for k, v in config.items() if k not in ("architectures", "model_type")})
    )
    report = theirs.float().eval().load_state_dict(ours.state_dict(), strict=True)
    assert not report.missing_keys
    assert not report.unexpected_keys
    ids, positions = torch.randint(5, 2048, (1, 40)), torch.arange(40)[None]
    causal = torch.ones(40, 40, dtype=torch.bool).tril()[None, None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours(ids, positions, causal), rtol=1e-3, atol=1e-3)


def test_the_stored_prompts_are_held_out() -> None:
    examples = read_examples(FOLDER / "held_out.jsonl")
    counts = {task: sum(example.task == task for example in examples) for task in KIND_NAMES}
    assert counts == {**dict.fromkeys(TASKS, 100), "text": 50}
    assert all(is_held_out(example.prompt) for example in examples if example.task != "text")
    passages = (f"{example.prompt}\n{example.answer}" for example in examples if example.task == "text")
    assert all(corpus.is_held_out(passage) for passage in passages)


def test_the_embedded_model_answers_held_out_prompts() -> None:
    model, bpe = checkpoint.read(FOLDER).eval(), tokenizer.load(FOLDER)
    stored = read_examples(FOLDER / "held_out.jsonl")
    for task in ("math", "needle", "follow", "trace"):
        examples = [example for example in stored if example.task == task][:4]
        assert run_examples(model, bpe, examples)["exact_match"] == 100
