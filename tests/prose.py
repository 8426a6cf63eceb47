"""A linter of prose in docstrings, comments, help texts and messages: openings, empty words, long sentences.

python -m tests.prose dgraph/engine        # every finding, as file:line
python -m tests.prose --count              # findings by rule, over dgraph and models
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("dgraph", "docs/site", "models", "training")
LONGEST = 25
"""Words of a sentence."""
OPENING = re.compile(r"(What|Of|Who|Whoever|Whose|Those|Where|Whether|How|Which)\b")
"""Words that no docstring begins with: an imperative or a noun of the field does."""
SENTENCE = re.compile(r"(What|Of|Who|Whoever|Those)\b")
"""Words that no sentence begins with."""
EMPTY = re.compile(r"\b(nobody|so many|is none|whoever)\b", re.IGNORECASE)
"""Words that stand for a thing which has a name."""


@dataclass(frozen=True)
class Finding:
    """One place where a rule is broken."""

    path: Path
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.rule}: {self.text}"


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a file, those of attributes included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for child in getattr(node, "body", []) if isinstance(getattr(node, "body", None), list) else []:
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and type(child.value.value) is str:
                yield child.lineno, child.value.value


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a docstring in one line each, entries of sections too.

    Code, tables, lists and the examples of help texts, which begin with a backspace, are left out.
    """
    lines = text.splitlines()
    indents = [len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()]
    base, held = min(indents, default=0), list[str]()
    section = False
    for number, line in enumerate([*lines, ""]):
        words, indent = line.strip(), len(line) - len(line.lstrip())
        depth = 0 if number == 0 else indent - base
        header = words in ("Args:", "Attributes:", "Returns:", "Raises:", "Yields:")
        entry = section and depth == 4
        code = (depth >= 4 and not section) or words.startswith(("|", "- ", "* ", ">>>"))
        if not words or header or entry or code:
            if held and held[0] != "\b":
                yield " ".join(held)
            held = []
        section = header or (section and (depth > 0 or not words))
        if words and not header and not code:
            held.append(words)


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph; the name before a colon that an entry of a section begins with is left out."""
    plain = re.sub(r"`[^`]*`", "x", paragraph)
    plain = re.sub(r"^[\w, *]+: (?=\S)", "", plain)
    return [each for each in re.split(r"(?<=[.;!?])\s+(?=\S)", plain) if each]


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each comment of a file; lines of a comment that follow each other are one text."""
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type != tokenize.COMMENT or re.match(r"#( (type|noqa|ruff|pragma)\b|!)", token.string):
            continue
        (line, column), text = token.start, token.string.lstrip("#: ").strip()
        alone = not token.line[:column].strip()
        if block and not (alone and line == block[-1][0] + 1):
            yield block[0][0], " ".join(text for _, text in block)
            block = []
        block.append((line, text))
    if block:
        yield block[0][0], " ".join(text for _, text in block)


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each help text, and of each text that an error or a warning is made with.

    Values within an f-string read as one word.
    """
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        named = {keyword.arg: keyword.value for keyword in node.keywords}
        name = ast.unparse(node.func).rpartition(".")[2]
        given = [named[key] for key in ("help", "epilog", "hint") if key in named]
        if re.fullmatch(r"[A-Z]\w*(Error|Warning|Lost|Differ)|warn|complain|refuse\w*", name):
            given += node.args[:1]
        for value in given:
            text = _text(value)
            if text:
                yield value.lineno, text


def _text(value: ast.AST) -> str:
    if isinstance(value, ast.Constant) and isinstance(value.value, str):
        return value.value
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "x" for part in value.values)
    return ""


def findings(path: Path) -> Iterator[Finding]:
    """Every place of a file where a rule is broken."""
    for line, text in docstrings(path):
        first = text.strip().split("\n")[0]
        if OPENING.match(first):
            yield Finding(path, line, "opening", first)
        for number, paragraph in enumerate(paragraphs(text)):
            yield from _in_paragraph(path, line, paragraph, first=number == 0)
    for line, text in comments(path):
        yield from _in_paragraph(path, line, text, kind="comment, ")
    for line, text in messages(path):
        for paragraph in text.split("\n\n"):
            if not paragraph.startswith("\b"):
                yield from _in_paragraph(path, line, paragraph, kind="message, ")


def _in_paragraph(path: Path, line: int, paragraph: str, first: bool = False, kind: str = "") -> Iterator[Finding]:
    for word in EMPTY.findall(re.sub(r"`[^`]*`", "", paragraph)):
        yield Finding(path, line, f"{kind}empty word", word)
    for number, sentence in enumerate(sentences(paragraph)):
        if SENTENCE.match(sentence) and not (first and number == 0):
            yield Finding(path, line, f"{kind}sentence", sentence)
        if len(sentence.split()) > LONGEST:
            yield Finding(path, line, f"{kind}over {LONGEST} words", sentence)


def files(names: Sequence[str] = FOLDERS) -> list[Path]:
    """Python files of folders, or files."""
    paths = [ROOT / name for name in names]
    return sorted(file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py")))


def main(arguments: Sequence[str]) -> int:
    """Print findings, or how many there are by rule; the exit code is 1 if there are any."""
    names = [each for each in arguments if each != "--count"] or list(FOLDERS)
    found = [each for path in files(names) for each in findings(path)]
    if "--count" in arguments:
        print(dict(Counter(each.rule for each in found)))
    else:
        print(*found, sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
