"""Plain tables of a given width."""

from __future__ import annotations

from dgraph.text.columns import paragraphs, table

TITLES = ("name", "what", "of")
ROWS = [("one", "a text that is rather long, so that it needs several lines", "x"), ("second", "short", "y")]


def test_without_a_width_columns_are_as_wide_as_their_cells() -> None:
    assert table(("a", "b"), [("cell", "x"), ("c", "")], indent=" ") == [" a     b", " cell  x", " c"]


def test_the_widest_column_is_wrapped() -> None:
    assert table(TITLES, ROWS, indent="", width=45) == [
        "name    what                               of",
        "one     a text that is rather long, so     x",
        "        that it needs several lines",
        "second  short                              y",
    ]
    assert table(TITLES, ROWS, indent="", width=200) == table(TITLES, ROWS, indent="")


def test_too_little_room_gives_paragraphs() -> None:
    assert table(TITLES, ROWS, indent="", width=40) == [
        "one",
        "  what  a text that is rather long, so",
        "        that it needs several lines",
        "  of    x",
        "second",
        "  what  short",
        "  of    y",
    ]


def test_paragraphs_leave_out_what_is_empty() -> None:
    assert paragraphs(TITLES, [("one", "", "-")], "  ", 60) == ["  one"]
    assert paragraphs(("name",), [("one",)], "", 60) == ["one"]
