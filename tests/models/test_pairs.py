"""Prompts and responses as training batches of any tokenizer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from dgraph.errors import InputError
from dgraph.families import embedded
from dgraph.models.tokenizer import read_tokenizer
from training.data import BLOCK, EOS_PADDING, PADDING, PROMPT, RESPONSE, Document
from training.objective import Noise, block_diffusion
from training.pairs import Pairs, Passes, chat_document, plan, read_pairs

EOS = 49_151
"""An id that does not fit into 16 bits."""


def documents(count: int) -> list[Document]:
    sizes = [32 * (1 + i % 4) for i in range(count)]
    kinds = [[PROMPT] * 10 + [RESPONSE] * (size - 10) for size in sizes]
    return [Document([40_000 + i] * size, kind, 1) for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True))]


def test_lines_are_pairs(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "a", "response": "b", "more": 1}\n\n{"prompt": "c", "response": "", "ended": false}\n')
    assert read_pairs(file) == [("a", "b", True), ("c", "", False)]
    for line in (
        "{",
        '{"prompt": "a"}',
        '["a", "b"]',
        '{"prompt": "", "response": "b"}',
        '{"prompt": 1, "response": ""}',
        '{"prompt": "a", "response": "b", "ended": 1}',
    ):
        file.write_text(f'{{"prompt": "a", "response": "b"}}\n{line}\n')
        with pytest.raises(InputError, match="line 2: expected"):
            read_pairs(file)


def test_a_document_is_framed_ended_and_fills_its_block() -> None:
    tokenizer = read_tokenizer(embedded()["tiny_sdar"].folder)
    assert tokenizer is not None
    before, after = tokenizer.encode("Sort: b a"), tokenizer.encode_text("Sorted: a b")
    item = chat_document(before, after, EOS, task=3)
    assert len(item.ids) == len(item.kinds) == BLOCK
    assert item.ids == [*before, *after, *[EOS] * (BLOCK - len(before) - len(after))]
    counts = Counter(item.kinds)
    assert (counts[PROMPT], counts[RESPONSE]) == (len(before), len(after) + 1)
    assert item.kinds[-1] == EOS_PADDING
    assert item.task == 3
    exact = chat_document(before, after, EOS, block=len(before) + len(after) + 1)
    assert Counter(exact.kinds)[EOS_PADDING] == 0
    size = len(before) + len(after) - 1
    cut = chat_document(before, after, EOS, block=size, ended=False)
    assert cut.ids == [*before, *after][:size]
    assert cut.kinds == [PROMPT] * len(before) + [RESPONSE] * (len(after) - 1)


def test_a_pass_has_every_document_once() -> None:
    sizes = [32 * (1 + i % 5) for i in range(100)]
    batches = plan(sizes, rows=3, length=128, seed="s")
    found = [place.document for batch in batches for place in batch]
    assert sorted(found) == [i for i, size in enumerate(sizes) if size <= 128]
    assert found != sorted(found)
    for batch in batches:
        used = Counter[int]()
        for place in batch:
            used[place.row] += sizes[place.document]
        assert set(used) <= {0, 1, 2}
        assert max(used.values()) <= 128
    assert batches == plan(sizes, 3, 128, "s")
    assert batches != plan(sizes, 3, 128, "t")
    assert plan([], 3, 128, "s") == []


def test_a_pass_has_documents_of_a_file_as_often_as_is_said() -> None:
    mixed = [Document([i] * 32, [RESPONSE] * 32, i % 3) for i in range(60)]
    passes = Passes(mixed, rows=4, length=64, seed=0, times={0: 2.0, 1: 0.25})
    batches = [passes[i] for i in range(300)]
    ends = [sum(len(each) for each in passes.passes[: n + 1]) for n in range(len(passes.passes) - 1)]
    halves: Counter[int] = Counter()
    for begin, end in zip([0, *ends], ends, strict=False):
        found = Counter(torch.cat([b.tokens[b.kinds == RESPONSE] for b in batches[begin:end]]).tolist())
        assert all(found[i] == {0: 64, 2: 32}[i % 3] for i in range(60) if i % 3 != 1)
        halves.update(i for i in range(1, 60, 3) if found[i])
    share = sum(halves.values()) / (20 * len(ends))
    assert 0.15 < share < 0.35
    assert len(halves) == 20
    again = Passes(mixed, rows=4, length=64, seed=0, times={0: 2.0, 1: 0.25})
    assert torch.equal(again[77].tokens, batches[77].tokens)
    with pytest.raises(InputError, match="none of 60 documents fits into a row of 64"):
        Passes(mixed, rows=4, length=64, seed=0, times=dict.fromkeys(range(3), 0.0))


def test_batches_hold_their_documents_and_ids_of_any_size() -> None:
    made = documents(40)
    long = Document([7] * 160, [RESPONSE] * 160, 0)
    passes = Pairs([*made, long], rows=2, length=128, seed=0)
    assert passes.left_out == 1
    seen = Counter[int]()
    for batch in passes:
        whole = batch.to(torch.device("cpu"))
        for number in set(whole.docs.flatten().tolist()) - {-1}:
            at = whole.docs == number
            (token,) = set(whole.tokens[at].tolist())
            item = made[token - 40_000]
            assert whole.positions[at].tolist() == list(range(len(item.ids)))
            assert whole.kinds[at].tolist() == item.kinds
            seen[token] += 1
        assert set(whole.kinds[whole.docs == -1].tolist()) <= {PADDING}
    assert seen == Counter(item.ids[0] for item in made)
    assert not torch.equal(passes[0].tokens, Pairs(made, 2, 128, seed=0, epoch=1)[0].tokens)


def test_a_batch_can_be_masked_with_the_id_of_its_vocabulary() -> None:
    batch = Pairs(documents(8), rows=2, length=128, seed=0)[0].to(torch.device("cpu"))
    inputs = block_diffusion(batch, 4, torch.Generator().manual_seed(0), Noise(mask_id=4, by_rate=False))
    masked = inputs.input_ids[:, 128:] == 4
    assert masked.any()
    assert bool((inputs.targets[masked] >= 40_000).all())
