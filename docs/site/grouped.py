"""An extension of griffe: entries of docstrings that document several names at once, as "heads, kv_heads: sizes"."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

NAMES = re.compile(r"^ +\w+(?:, \w+)+(?=: )", flags=re.MULTILINE)


class Grouped(Extension):
    """Keep the names of an entry together: the parser takes what follows a blank for a type."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Join names by blanks that do not break."""
        if obj.docstring is not None:
            obj.docstring.value = NAMES.sub(lambda found: found[0].replace(", ", ",\u00a0"), obj.docstring.value)
