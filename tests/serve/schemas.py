"""Values that fit a schema of OpenAPI, and values that nearly do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
WRONG = 80
"""One value in this many is something else than the schema says."""
ODD = 20
"""One text or number in this many fits the schema, but lies anywhere in its range."""
SOME = 5
"""Fields of an object at most, beside those that it must have: of thirty at once nearly always one is refused."""


class Schemas:
    """Strategies for the schemas of a document."""

    def __init__(self, document: Mapping[str, Any]):
        self._document = document
        self._known: dict[str, st.SearchStrategy[Any]] = {}  # making one takes longer than drawing from it

    def body(self, path: str) -> st.SearchStrategy[Any]:
        """Of what is posted there."""
        content = self._document["paths"][path]["post"]["requestBody"]["content"]
        return self.of(content["application/json"]["schema"])

    def of(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        """Mostly values that fit."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._known:
            self._known[key] = _mostly(self._fitting(schema), JSON, WRONG)
        return self._known[key]

    def _fitting(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        if "$ref" in schema:
            place: Any = self._document
            for name in schema["$ref"].removeprefix("#/").split("/"):
                place = place[name]
            return self._fitting(place)
        for several in ("anyOf", "oneOf"):
            if several in schema:
                return st.one_of([self._fitting(one) for one in schema[several]])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "const" in schema:
            return st.just(schema["const"])
        return getattr(self, f"_{schema.get('type', 'any')}")(schema)

    def _any(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return JSON

    def _null(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return st.none()

    def _boolean(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return st.booleans()

    def _string(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return _mostly(st.text("abcdefgh", min_size=max(1, schema.get("minLength", 0)), max_size=9), st.text(), ODD)

    def _integer(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        least, most = schema.get("minimum", -3), schema.get("maximum", 1 << 40)
        return _mostly(st.integers(max(least, -1), max(least, -1) + 4), st.integers(least, most), ODD)

    def _number(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return _mostly(st.floats(0.1, 1.0), st.floats(), ODD)

    def _array(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        return st.lists(self.of(schema.get("items", {})), min_size=schema.get("minItems", 0), max_size=4)

    def _object(self, schema: Mapping[str, Any]) -> st.SearchStrategy[Any]:
        given = schema.get("properties", {}).items()
        fields = {name: self.of(inner) for name, inner in given if "Not served" not in inner.get("description", "")}
        needed = {name: fields.pop(name) for name in schema.get("required", ())}
        return _object_of(needed, fields)


@st.composite
def _mostly(draw: st.DrawFn, usual: st.SearchStrategy[Any], other: st.SearchStrategy[Any], out_of: int) -> Any:
    return draw(usual if draw(st.integers(1, out_of)) < out_of else other)


@st.composite
def _object_of(draw: st.DrawFn, needed: Mapping[str, Any], fields: Mapping[str, Any]) -> Any:
    some = draw(st.lists(st.sampled_from(sorted(fields)), max_size=SOME, unique=True)) if fields else []
    return {**{name: draw(needed[name]) for name in needed}, **{name: draw(fields[name]) for name in some}}
