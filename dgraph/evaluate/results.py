"""Results as they come: a JSONL file with one record per arm and prompt, from which an evaluation resumes.

If a recipe counts salient rows, there is a record per batch, too, before the results of its prompts. A judgement of a
response is a record of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from dgraph.errors import InputError, warn
from dgraph.evaluate.arms import Arm
from dgraph.evaluate.judge import Judged
from dgraph.evaluate.salience import Counted
from dgraph.families import Model, embedded

FORMAT = 1
"""Version of the records, raised when the meaning of a record changes."""


@dataclass(frozen=True)
class Result:
    """Response of an arm to a prompt, with its counts.

    Attributes:
        key: hash of everything that the result depends on; see `Keys`.
        arm, task, prompt: for readers of the file.
        right: True if the response is right; None without an answer. Scores are computed from `text` anew.
        text, token_ids: the response.
        steps: forward passes of this prompt.
        decoded: tokens committed, end padding included.
        rows: rows of this prompt through the last layers.
        seconds: seconds of its batch, divided by the batch's prompts.
    """

    key: str
    arm: str
    task: str
    prompt: str
    right: bool | None
    text: str
    token_ids: list[int]
    steps: int
    decoded: int
    rows: int
    seconds: float

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Result:
        """The record that was written.

        Raises:
            KeyError, TypeError: an entry is missing or of another type.
        """
        result = cls(**{f.name: value[f.name] for f in fields(cls)})
        numbers = (*result.token_ids, result.steps, result.decoded, result.rows)
        if not isinstance(result.text, str) or not all(type(n) is int for n in numbers):
            raise TypeError("an entry of another type")
        return result


_READ = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
}
"""Files of a model besides its weights on which a response depends."""


def fingerprint(model: Model, name: str) -> str:
    """Fingerprint of a model: SHA-256 of its weight files, configs and the files of its tokenizer.

    name: the name or folder by which the model was loaded.
    """
    known = embedded()
    folder = known[name].folder if name in known else Path(name)
    files = (p for p in folder.iterdir() if p.suffix in {".safetensors", ".bin"} or p.name in _READ)
    return digest_of(model.spec.family, files)


def digest_of(kind: str, files: Iterable[Path]) -> str:
    """SHA-256 of a kind of model and of files by name and content."""
    digest = hashlib.sha256(kind.encode())
    for path in sorted(files):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True)
class Keys:
    """Maker of the keys of results: hashes of everything that a response depends on, the right answer aside.

    Attributes:
        weights: see `fingerprint`.
        setting: other settings that are the same for all arms: length limit, block length, dtype, backend, ...
        stored: fingerprints of stored weights, by the name that arms give as their weights.
    """

    weights: str
    setting: Mapping[str, Any]
    stored: Mapping[str, str] = field(default_factory=dict)
    _arms: dict[Arm, str] = field(default_factory=dict, compare=False, repr=False)

    def of(self, arm: Arm, prompt: str) -> str:
        """The key of an arm's response to a prompt."""
        if arm not in self._arms:
            value = {
                "format": FORMAT,
                "weights": self.weights,
                "setting": dict(self.setting),
                "torch": torch.__version__,
                "recipe": arm.built.to_json(),
                "rule": arm.rule_json(),
                **({} if arm.open_blocks == 1 else {"open blocks": arm.open_blocks}),
                **({} if arm.weights is None else {"stored as": self.stored.get(arm.weights, arm.weights)}),
            }
            self._arms[arm] = json.dumps(value, sort_keys=True)
        return hashlib.sha256(f"{self._arms[arm]}\n{prompt}".encode()).hexdigest()[:32]


class Store:
    """Results by key, in memory and (with a path) in a file.

    Raises:
        InputError: the file cannot be read or written, or has no results.
    """

    def __init__(self, path: str | Path | None = None):
        self.path = None if path is None else Path(path)
        self._found: dict[str, Result] = {}
        self._counted: dict[str, Counted] = {}
        self._judged: dict[str, Judged] = {}
        self._torn = False
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def __len__(self) -> int:
        return len(self._found)

    def get(self, key: str) -> Result | None:
        """The result of a key; None without one."""
        return self._found.get(key)

    def counted(self, keys: Iterable[str]) -> list[tuple[Counted, int]]:
        """Salient rows of the batches that gave results of these keys, each with its number of these keys."""
        found: dict[int, tuple[Counted, int]] = {}
        for key in dict.fromkeys(keys):
            if (record := self._counted.get(key)) is not None:
                found[id(record)] = (record, found.get(id(record), (record, 0))[1] + 1)
        return list(found.values())

    def judged(self, key: str) -> Judged | None:
        """The judgement of a response, by `Judge.key`; None without one."""
        return self._judged.get(key)

    def add_judged(self, judged: Iterable[Judged]) -> None:
        """Keep judgements whose keys are new, and write them to the file at once."""
        new = {one.key: one for one in judged if one.key not in self._judged}
        self._judged |= new
        self._write(asdict(one) for one in new.values())

    def add(self, results: Iterable[Result], counted: Counted | None = None) -> None:
        """Keep results whose keys are new, and write them to the file at once.

        counted: the salient rows of the batch that gave the results.
        """
        new = {result.key: result for result in results if result.key not in self._found}
        self._found |= new
        if counted is not None and new:
            self._count(counted)
        records = [asdict(result) for result in new.values()]
        if counted is not None and new:  # first, so that a write that is cut short loses results, decoded again later
            records.insert(0, counted.to_json())
        self._write(records)

    def _write(self, records: Iterable[Mapping[str, Any]]) -> None:
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        if self.path is None or not lines:
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(("\n" if self._torn else "") + lines)
        except OSError as error:
            raise InputError(f"--out {self.path} cannot be written: {error}.") from None
        self._torn = False

    def _count(self, counted: Counted) -> None:
        for key in counted.keys:  # as with results, the first record of a key stays
            self._counted.setdefault(key, counted)

    def _read(self, path: Path) -> None:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError as error:
            raise InputError(f"--out {path} cannot be read: {error}.") from None
        self._torn = bool(text) and not text.endswith("\n")
        damaged = []
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
                kind = Counted if "batch" in value else Judged if "nll" in value else Result
                record = kind.from_json(value)
            except (ValueError, KeyError, TypeError, RecursionError):
                damaged.append(number)
            else:
                if isinstance(record, Counted):
                    self._count(record)
                elif isinstance(record, Judged):
                    self._judged[record.key] = record
                else:
                    self._found[record.key] = record
        cut_short = self._torn and len(damaged) == 1  # by a crash in the first write
        if damaged and not self._found and not cut_short:
            raise InputError(f"--out {path} holds no results of an evaluation; name another file.")
        if damaged:
            shown = ", ".join(map(str, damaged[:5])) + (", ..." if len(damaged) > 5 else "")
            warn(
                f"{path}: {len(damaged)} damaged line(s) left out ({shown}); results that they held are decoded again."
            )
