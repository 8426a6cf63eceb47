"""A causal checkpoint becomes a diffusion model: stopped and continued runs, low rank, what is written, dialogues."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import dgraph
from dgraph.errors import InputError
from dgraph.families import embedded
from dgraph.models.checkpoint import read_tensors
from dgraph.models.tasks import make
from dgraph.models.tokenizer import read_tokenizer
from dgraph.ranks.groups import Group, group_of
from dgraph.ranks.sharding import GROUP
from dgraph.testing import ranks
from tests.amounts import first_cases
from tests.parallel.processes import started
from tests.training.test_training import small_batch
from training import ablate, convert, dialogues, low_rank
from training.adopted import Adopted
from training.checkpoint import write_folder
from training.conversion import Conversion, Settings, divide, documents_of, load_base, write_model
from training.convert import Folder, train
from training.data import BLOCK, PROMPT, RESPONSE
from training.objective import dense_mask, next_token, part_of
from training.pairs import Pair, read_pairs
from training.sampling import Writer

MASK = "<|mask|>"
SMALL = Settings(steps=6, rows=2, length=128, learnt=64, held_out=4, rate=1e-2)


def causal_folder(path: Path, name: str = "Llama", **more: Any) -> Path:
    """A random causal checkpoint with the tokenizer of the embedded models."""
    import transformers

    keys = {"vocab_size": 2048, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    keys |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 1, "max_position_embeddings": 256}
    config = getattr(transformers, f"{name}Config")(**{**keys, **more})
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    described = {**config.to_dict(), "architectures": [f"{name}ForCausalLM"]}
    tensors = dict(model.named_parameters())
    write_folder(path, tensors, described, dtype=torch.float32)
    tokenizer = read_tokenizer(embedded()["tiny_sdar"].folder)
    assert tokenizer is not None
    tokenizer.save(path)
    return path


def pairs() -> list[Pair]:
    rng = random.Random(0)
    drawn = [make(task, rng) for task in ("sort", "follow") * 10]
    return [*(Pair(e.prompt, e.answer) for e in drawn), Pair("", "a text without a frame " * 60)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return causal_folder(tmp_path_factory.mktemp("base"), tie_word_embeddings=True)


def conversion(folder: Path, settings: Settings, group: Group | None = None) -> Conversion:
    base = load_base(str(folder))
    return Conversion(base, settings, documents_of(base, pairs(), settings), autocast=torch.float32, ranks=group)


VARIANTS = {
    "block_causal": SMALL,
    "low rank": replace(SMALL, rank=2),
    "bidirectional": replace(SMALL, form="bidirectional", learn_prompts=True),
    "annealed": replace(SMALL, anneal=0.5, by_rate=True, complementary=True),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_is_continued_makes_the_weights_of_one_that_is_not(
    variant: str, folder: Path, tmp_path: Path
) -> None:
    settings = VARIANTS[variant]
    whole = conversion(folder, settings)
    losses = list(whole.steps())
    assert len(losses) == settings.steps
    parts = []
    for steps in (2, 3, 1):
        part, kept = conversion(folder, settings), Folder(tmp_path, {})
        kept.restore(part)
        parts += islice(part.steps(), steps)
        kept.save(part)
    assert parts == losses
    continued = low_rank.weights(part.base.model)
    for name, value in low_rank.weights(whole.base.model).items():
        assert torch.equal(value, continued[name]), name
    assert whole.held_out_loss() == part.held_out_loss() != conversion(folder, settings).held_out_loss()


@pytest.mark.parametrize("variant", ["low rank", "bidirectional", "annealed"])
def test_ranks_train_the_weights_of_one(variant: str, folder: Path) -> None:
    settings = VARIANTS[variant]
    alone = conversion(folder, settings)
    expected = [*alone.steps(), alone.held_out_loss()]

    def train_on(rank: int) -> tuple[list[float | None], dict[str, torch.Tensor]]:
        made = conversion(folder, settings, group_of(GROUP))
        if rank:
            made.trainer.began -= 1e6  # the clock of rank 0 counts
        return [*made.steps(), made.held_out_loss()], low_rank.weights(made.base.model)

    (losses, weights), (others, same) = ranks(2, train_on)
    assert losses == others == pytest.approx(expected, rel=1e-4)
    for name, value in low_rank.weights(alone.base.model).items():
        assert torch.equal(weights[name], same[name]), name
        torch.testing.assert_close(weights[name], value, rtol=0, atol=2e-2 * float(value.abs().max()))


def test_rows_that_ranks_cannot_divide_are_refused() -> None:
    inputs = next_token(small_batch())
    rows = len(inputs.input_ids)
    with pytest.raises(
        InputError, match=f"{rows} rows of a batch cannot be divided among {rows + 1} ranks; give a mult"
    ):
        part_of(inputs, 0, rows + 1)


def test_ranks_write_the_dialogues_of_one(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialogues, "_turns", _counted)
    alone, together = tmp_path / "alone.jsonl", tmp_path / "together.jsonl"
    dialogues.write(load_base(str(folder)), alone, 10, rows=4)

    def write_on(rank: int) -> int:
        base, group = load_base(str(folder)), group_of(GROUP)
        assert dialogues.write(base, together, 3, rows=4, ranks=group) == 3
        with pytest.raises(InputError, match="1 prompts are too few for the dialogues asked for"):
            dialogues.write(base, tmp_path / "few.jsonl", 9, ["a b"], rows=2, ranks=group)
        return dialogues.write(base, together, 10, rows=4, ranks=group)

    assert ranks(3, write_on) == [10] * 3
    assert [json.loads(line)["batch"] for line in together.read_text().splitlines()] == [0] * 3 + [1] * 4 + [2] * 3
    again = tmp_path / "again.jsonl"
    ranks(2, lambda rank: dialogues.write(load_base(str(folder)), again, 10, rows=4, ranks=group_of(GROUP)))
    assert again.read_bytes() == alone.read_bytes()


RUN = """
from training import convert
convert.main({arguments!r})
"""


@pytest.mark.release
def test_the_command_runs_on_the_ranks_that_torchrun_starts(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r, _ in pairs() if p))
    given = [str(folder), "--data", str(data), "--device", "cpu", "--steps", "3", "--rows", "2", "--length", "128"]
    given += ["--learnt", "64"]
    sessions = [("alone", 1, "inf", 3), ("together", 1, "0", 1), ("together", 2, "inf", 3)]
    for name, world, minutes, done in sessions:
        arguments = [*given, "--out", str(tmp_path / name), "--minutes", minutes]
        with started(world, RUN.format(arguments=arguments)) as processes:
            ended = [processes.ends(rank) for rank in range(world)]
        assert [code for code, _, _ in ended] == [0] * world, ended
        assert f"{done} of 3 steps" in ended[0][1]
        assert [out for _, out, _ in ended[1:]] == [""] * (world - 1)
    made = [read_tensors(tmp_path / name / convert.MODEL) for name in ("alone", "together")]
    for name, value in made[0].items():
        torch.testing.assert_close(value, made[1][name], rtol=0, atol=2e-2 * float(value.abs().max()))


def test_another_seed_draws_other_masks(folder: Path) -> None:
    batch, drawn = None, []
    for seed in (0, 1, 0):
        settings = replace(SMALL, seed=seed)
        made = conversion(folder, settings)
        batch = batch or made.data[0]
        drawn.append(made._inputs(batch, settings, settings.noise(2), 3).input_ids)
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["block_causal", "low rank", "bidirectional"])
def test_on_a_gpu_flex_attention_and_compilation_train_as_dense_masks_do(variant: str, tmp_path: Path) -> None:
    """In fp32; FlexAttention takes heads of 16 and wider."""
    path = str(causal_folder(tmp_path, head_dim=16, tie_word_embeddings=True))
    losses = []
    for dense in (True, False):
        base = load_base(path, device="cuda")
        documents = documents_of(base, pairs(), VARIANTS[variant])
        made = Conversion(base, VARIANTS[variant], documents, dense, not dense, autocast=torch.float32)
        losses.append([*made.steps(), made.held_out_loss()])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_a_session_ends_in_time_and_leaves_log_plot_and_model(folder: Path, tmp_path: Path) -> None:
    described = {"base": str(folder), **asdict(SMALL)}
    seen: list[int] = []
    kept = Folder(tmp_path, described)
    train(conversion(folder, SMALL), kept, minutes=0, tell=lambda row: seen.append(row["step"]))
    assert seen == [1]
    assert dgraph.load(tmp_path / "model").spec.mask_id == 2
    kept.log({"step": 5, "loss": 1.0, "held_out": "", "rate": 0, "seconds": 0})  # of a session that was cut off
    train(conversion(folder, SMALL), Folder(tmp_path, described), tell=lambda row: seen.append(row["step"]))
    assert seen == [1, 2, 3, 4, 5, 6]
    (row,) = kept.rows()
    assert row["step"] == "6"
    assert float(row["loss"]) > 0
    assert float(row["held_out"]) > 0
    assert kept.plot()
    with pytest.raises(InputError, match=r"settings \(rank was 0, is 2\)"):
        Folder(tmp_path, {**described, "rank": 2})


def test_a_run_ends_when_its_time_is_over_and_its_rate_has_fallen_by_then(folder: Path, tmp_path: Path) -> None:
    settings = replace(SMALL, steps=1000, allowed=10.0)
    described = {"base": str(folder), **asdict(settings)}
    made = conversion(folder, settings)
    kept = Folder(tmp_path, described)
    course = made.steps()
    next(course)
    made.trainer.clock = 60 * 9.5
    assert made.trainer.rate() == pytest.approx(settings.rate * 0.02, rel=0.01)  # the warm-up's, still
    made.trainer.done = 100
    assert made.trainer.rate() == pytest.approx(settings.rate * 0.05 / 0.9, rel=0.05)
    made.trainer.clock = 60 * 10
    assert list(course) == []
    kept.save(made)
    train(conversion(folder, settings), kept)
    assert kept.rows() == []
    with pytest.raises(InputError, match="allowed must be at least 0 minutes, got -1"):
        replace(SMALL, allowed=-1)


@first_cases(
    2,
    "name, form, shift",
    [
        ("Qwen3", "block_causal", 1),
        ("Qwen2", "bidirectional", 0),
        ("Llama", "block_causal", 0),
        ("Llama", "bidirectional", 1),
    ],
)
def test_what_is_written_loads_and_generates(name: str, form: str, shift: int, tmp_path: Path) -> None:
    base = load_base(str(causal_folder(tmp_path / "base", name, tie_word_embeddings=name == "Qwen2")), MASK)
    settings = replace(SMALL, form=form, shift=shift, rank=2 * (name == "Qwen3"))
    made = Conversion(base, settings, documents_of(base, pairs(), settings), autocast=torch.float32)
    list(islice(made.steps(), 2))
    write_model(base, settings, tmp_path / "made", torch.float32)
    loaded = dgraph.load(tmp_path / "made")
    assert (loaded.spec.attention, loaded.spec.logit_shift, loaded.spec.mask_id) == (form, shift, base.mask_id)
    assert loaded.spec.next_token == (form == "block_causal" and shift == 1)
    assert (loaded.spec.block_length, loaded.spec.eos_ids) == (BLOCK, (1,))
    ids = torch.arange(5, 25)[None]
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool)
    positions = torch.arange(20)[None]
    with torch.no_grad():
        adopted = Adopted(base.model)
        logits = adopted.lm_head(adopted.hidden(ids, positions, mask))
        torch.testing.assert_close(loaded.module(ids, positions), logits)
    for recipe in ("dense", "focus", "maskkv", "sparse_dllm"):
        program = dgraph.optimize(loaded, recipe, backend="eager")
        result = program.generate(["Sort these words: river stone"], max_new_tokens=32)
        assert len(result.token_ids[0]) <= 32
        assert base.mask_id not in result.token_ids[0]


def test_layers_with_low_rank_parts_are_compiled_as_one(tmp_path: Path) -> None:
    base = load_base(str(causal_folder(tmp_path, num_hidden_layers=3)))
    low_rank.add_low_rank(base.model, 2, base.mask_id, torch.Generator())
    compiled: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        compiled.append(graph)
        return graph.forward

    ids = torch.arange(10, 26)[None]
    before = base.model(ids, use_cache=False).logits
    for layer in base.model.model.layers:
        layer.compile(dynamic=False, backend=backend)
    torch.testing.assert_close(base.model(ids, use_cache=False).logits, before)
    assert len(compiled) == 1


@pytest.mark.parametrize("tied", [True, False])
def test_new_low_rank_parts_change_nothing_and_what_is_trained_is_what_is_written(tied: bool, tmp_path: Path) -> None:
    base = load_base(str(causal_folder(tmp_path, tie_word_embeddings=tied)))
    before = {name: value.clone() for name, value in base.model.state_dict().items()}
    batch = next_token(small_batch())
    mask = dense_mask(batch.visible, *batch.input_ids.shape, torch.device("cpu"))

    def logits() -> torch.Tensor:
        adopted = Adopted(base.model)
        return adopted.lm_head(adopted.hidden(batch.input_ids, batch.positions, mask)).detach()

    plain = logits()
    settings = replace(SMALL, rank=3, steps=2)
    made = Conversion(base, settings, documents_of(base, pairs(), settings), autocast=torch.float32)
    assert torch.equal(logits(), plain)
    for name, value in low_rank.weights(base.model).items():
        assert torch.equal(value, before[name]), name
    list(made.steps())
    after = low_rank.weights(base.model)
    assert set(after) == set(before)
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    embeddings = {"model.embed_tokens.weight"} | ({"lm_head.weight"} if tied else set())
    assert changed == {name for name in before if "embed" not in name and "lm_head" not in name} | embeddings
    for name in embeddings:
        assert (after[name] != before[name]).any(1).nonzero().flatten().tolist() == [base.mask_id]
    difference = after["model.layers.1.mlp.up_proj.weight"] - before["model.layers.1.mlp.up_proj.weight"]
    assert torch.linalg.matrix_rank(difference, atol=1e-6) <= 3


def test_documents_are_framed_texts_cut_and_copies_of_held_out_ones_left_out(folder: Path, tmp_path: Path) -> None:
    base = load_base(str(folder))
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"text": "one two three " * 100}) + "\n" + json.dumps({"text": "four"}) + "\n")
    pieces = documents_of(base, read_pairs(file), SMALL)
    assert [len(piece.ids) for piece in pieces[:-2]] == [SMALL.length] * (len(pieces) - 2)
    assert all(len(piece.ids) % BLOCK == 0 and PROMPT not in piece.kinds for piece in pieces)
    assert [piece.ids.count(1) > 0 for piece in pieces[-2:]] == [True, True]
    assert set(pieces[0].kinds) == {RESPONSE}
    wide = [len(d.ids) for d in documents_of(base, pairs()[:-1] * 4, replace(SMALL, form="bidirectional"))]
    narrow = [len(d.ids) for d in documents_of(base, pairs()[:-1] * 4, SMALL)]
    assert {(a - b) // BLOCK for a, b in zip(wide, narrow, strict=True)} == {0, 1, 2, 3, 4}
    documents = documents_of(base, pairs() * 2, SMALL)
    training, held_out = divide(documents, 100, 0)
    assert len(held_out) == len(documents) // 20
    assert len(training) == len(documents) - 2 * len(held_out)


REFUSED = {
    "form must be one of block_causal, bidirectional, got 'sdar'": {"form": "sdar"},
    "block must be a divisor of 32, got 5": {"block": 5},
    r"anneal must be in \[0, 1\], and 0 without blocks, got 0.5": {"form": "bidirectional", "anneal": 0.5},
    "learnt must be a multiple of 32 up to length, 64, got 96": {"length": 64, "learnt": 96},
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_out_of_range_are_refused(message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(SMALL, **REFUSED[message])


def test_a_base_needs_a_mask_token_of_its_vocabulary(tmp_path: Path) -> None:
    folder = causal_folder(tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace('"mask_token"', '"no_mask_token"'))
    with pytest.raises(
        InputError, match=r"needs a mask token below 2048, got none; give --mask-token, .* '<\|mask\|>'"
    ):
        load_base(str(folder))
    assert load_base(str(folder), MASK).mask_id == 2
    with pytest.raises(InputError, match=r"got id 2048 for '<\|new\|>'"):
        load_base(str(folder), "<|new|>")


def test_an_annealed_block_doubles_up_to_its_length() -> None:
    settings = replace(SMALL, anneal=0.6)
    sizes = [settings.noise(2, step / 10).block for step in range(10)]
    assert sizes == [4, 4, 8, 8, 16, 16, 32, 32, 32, 32]


def test_dialogues_go_on_where_they_were_cut_off(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load_base(str(folder))
    frame = dialogues.frame_of(base.tokenizer)
    assert (frame.before, frame.after) == ([3], [4])
    monkeypatch.setattr(dialogues, "_turns", _counted)
    file, again = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    assert dialogues.write(base, file, 10, rows=4) == 10
    lines = file.read_text().splitlines(keepends=True)
    assert len({json.loads(line)["prompt"] for line in lines}) == 10
    assert {json.loads(line)["ended"] for line in lines} == {True, False}
    again.write_text("".join(lines[:4]) + lines[4][:20])
    assert dialogues.write(base, again, 10, rows=4) == 10
    assert again.read_text() == file.read_text()
    assert dialogues.write(base, again, 4) == 10
    dialogues.write(base, tmp_path / "other.jsonl", 10, rows=4, seed=1)
    assert (tmp_path / "other.jsonl").read_text() != file.read_text()
    with pytest.raises(InputError, match=r"temperature of answers must be above 0, got 0\.0"):
        dialogues.write(base, tmp_path / "c.jsonl", 4, temperature=0.0)
    with pytest.raises(InputError, match="2 prompts are too few for the dialogues asked for"):
        dialogues.write(base, tmp_path / "c.jsonl", 4, ["a b", "c d"], rows=2)
    monkeypatch.setattr(dialogues, "_turns", lambda writer, began, *_: [dialogues.Turn([], False)] * len(began))
    with pytest.raises(InputError, match="wrote nothing new that ends"):
        dialogues.write(base, tmp_path / "d.jsonl", 4)


def test_answers_have_their_own_temperature(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, seen = load_base(str(folder)), set[tuple[int, float]]()

    def turns(
        writer: Writer, began: list[list[int]], stop: int, most: int, temperature: float, g: torch.Generator
    ) -> Any:
        seen.add((most, temperature))
        return _counted(writer, began, stop, most, temperature, g)

    monkeypatch.setattr(dialogues, "_turns", turns)
    dialogues.write(base, tmp_path / "a.jsonl", 4, rows=4, temperature=0.3)
    assert seen == {(dialogues.PROMPT_TOKENS, 1.0), (dialogues.RESPONSE_TOKENS, 0.3)}


def test_prompts_of_every_other_batch_begin_with_openings(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, warmth = load_base(str(folder)), list[float]()

    def turns(
        writer: Writer, began: list[list[int]], stop: int, most: int, temperature: float, g: torch.Generator
    ) -> Any:
        warmth.append(temperature)
        return _counted(writer, began, stop, most, temperature, g)

    monkeypatch.setattr(dialogues, "_turns", turns)
    dialogues.write(base, tmp_path / "a.jsonl", 12, rows=4, temperature=0.6, openings=["Who wrote", "How many"])
    prompts = [json.loads(line)["prompt"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    plain, opened = ["*"] * 4, ["Who wrote*", "How many*"] * 2
    assert [re.sub(r"turn \d+", "*", prompt) for prompt in prompts] == [*plain, *opened, *plain]
    assert warmth == [1.0, 0.6, 0.6, 0.6, 1.0, 0.6]
    dialogues.write(base, tmp_path / "b.jsonl", 4, rows=4, temperature=0.6)
    assert (tmp_path / "a.jsonl").read_text().startswith((tmp_path / "b.jsonl").read_text())
    for openings, given in ((["Who"], ["a b"]), (["Who", ""], None)):
        with pytest.raises(InputError, match="openings are texts, of prompts that the base writes itself"):
            dialogues.write(base, tmp_path / "c.jsonl", 4, given, openings=openings)


def _counted(
    writer: Writer, began: list[list[int]], stop: int, most: int, temperature: float, generator: torch.Generator
) -> list[dialogues.Turn]:
    """A turn of a drawn number for each, as a model's; every other response goes on."""
    texts = [f"turn {int(torch.randint(10**6, (), generator=generator))}" for _ in began]
    encode, is_prompt = writer.base.tokenizer.encode_text, most == dialogues.PROMPT_TOKENS
    return [dialogues.Turn(encode(text), is_prompt or row % 2 == 0) for row, text in enumerate(texts)]


def test_a_turn_ends_with_its_stop_token_and_is_the_one_that_is_likely(folder: Path) -> None:
    """At a temperature of almost zero the rows of a padded batch are what each is alone."""
    base = load_base(str(folder))
    began = [[3, 9, 8, 7], [3, 9]]
    writer, generator = Writer(base), torch.Generator()
    together = dialogues._turns(writer, began, 11, 6, 1e-4, generator)
    for row, given in enumerate(began):
        made: list[int] = []
        while len(made) < 6 and 11 not in made:
            made.append(int(base.model(input_ids=torch.tensor([given + made])).logits[0, -1].argmax()))
        ended = 11 in made
        assert together[row] == dialogues.Turn(made[: made.index(11)] if ended else made, ended)
    stop = int(base.model(input_ids=torch.tensor([began[0]])).logits[0, -1].argmax())
    assert dialogues._turns(writer, began, stop, 6, 1e-4, generator)[0] == dialogues.Turn([], True)


def test_the_command_goes_on_and_says_what_is_missing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r, _ in pairs() if p))
    command = [str(folder), "--out", str(out), "--device", "cpu", "--steps", "3", "--rows", "2", "--length", "128"]
    command += ["--learnt", "64", "--complementary", "--rate", "1e-3"]
    with pytest.raises(SystemExit, match="error: there is nothing to learn from: give --data FILE"):
        convert.main(command)
    for minutes, said in (("0", "1 of 3 steps"), ("inf", "3 of 3 steps")):
        convert.main([*command, "--data", str(data), "--minutes", minutes])
        assert said in capsys.readouterr().out
    assert json.loads((out / "settings.json").read_text())["complementary"] is True
    assert (out / "loss.png").is_file()
    with pytest.raises(SystemExit, match="holds a run of other settings"):
        convert.main([*command, "--data", str(data), "--shift", "1"])
    with pytest.raises(SystemExit, match=r"was .*'times': 1\.0.*, is .*'times': 0\.5"):
        convert.main([*command, "--data", f"{data}=0.5"])
    with pytest.raises(SystemExit, match=r"expected FILE or FILE=TIMES with a number above 0, got 'often'"):
        convert.main([*command, "--data", f"{data}=often"])
    with pytest.raises(SystemExit, match="block must be a divisor of 32, got 3"):
        convert.main([*command, "--block", "3"])


def test_the_table_of_objectives_is_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ablate.Small(hidden=16, layers=1, heads=2, examples=40, steps=2, rows=2)
    monkeypatch.setattr(ablate, "Small", lambda: small)
    command = ["--out", str(tmp_path), "--only", "bidirectional, 1/t", "--steps", "2", "--rows", "2"]
    command += ["--device", "cpu", "--count", "1"]
    ablate.main(command)
    lines = json.loads((tmp_path / "table.json").read_text())
    assert [(line["arm"], line["steps"]) for line in lines] == [("bidirectional, 1/t", 2)]
    table = capsys.readouterr().out
    assert f"| bidirectional, 1/t | bidirectional | 1 | {lines[0]['held_out_loss']:.3g} | 0 |" in table
    monkeypatch.setattr(ablate, "run", lambda *_: pytest.fail("it is there already"))
    ablate.main(command)
    assert capsys.readouterr().out == table[table.index("| objective") :]
    two = [{"arm": "a", "form": "f", "held_out_loss": value} for value in (1.0, 2.0)]
    assert ablate.render(two).endswith("| a | f | 2 | 1.5 (1 to 2) | - | - | - |")
    assert all(replace(SMALL, **changes) for changes in ablate.ARMS.values())
