"""A self-contained page: styles, modules and data inline, and nothing else may load or run."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

FILES = Path(__file__).parent / "files"
"""The folder of the parts: styles, modules, and the page of a server."""

_IMPORT = re.compile(r'^import \{[^}]*\} from "\./([\w-]+\.js)";\n', flags=re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function|class|const)", flags=re.MULTILINE)


def page(
    title: str, body: str, *, styles: Sequence[str], script: str | None = None, data: Mapping[str, Any] | None = None
) -> str:
    """Build a page that needs no other file. Its content security policy names its own style and script.

    Args:
        title: plain text.
        body: markup; texts in it are escaped already.
        styles: files of `FILES`, later ones after earlier ones.
        script: a module of `FILES`; those that it imports come along.
        data: plain values that the script finds as JSON in elements of these ids.
    """
    style = "\n".join(_read(name) for name in styles)
    code = "" if script is None else _joined(script)
    policy = f"default-src 'none'; style-src '{_digest(style)}'"
    if code:
        policy += f"; script-src '{_digest(code)}'"
    values = "".join(
        f'<script type="application/json" id="{escape(name)}">{_json(value)}</script>\n'
        for name, value in (data or {}).items()
    )
    run = f'<script type="module">{code}</script>\n' if code else ""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<title>{escape(title)}</title>\n'
        f"<style>{style}</style>\n</head>\n<body>\n{body}{values}{run}</body>\n</html>\n"
    )


def _read(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")


def _joined(entry: str) -> str:
    """Join a module and those that it imports: each once, before the modules that import it.

    Modules import by `import { a, b } from "./file.js";` alone, and no two of them have a name in common.
    """
    order: list[str] = []

    def visit(name: str) -> None:
        if name not in order:
            for other in _IMPORT.findall(_read(name)):
                visit(other)
            order.append(name)

    visit(entry)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", _read(name))) for name in order)


def _json(value: Any) -> str:
    """Encode JSON for a page: no text of it ends the element, or opens another."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _digest(text: str) -> str:
    """Hash of a text, as a content security policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
