# SPDX-License-Identifier: Apache-2.0
"""Lines of a given width."""

import io

import pytest

from cyborg.cli.views.text import ASCII, DEFAULT_WIDTH, UNICODE, Canvas, make_canvas


@pytest.mark.parametrize(
    ("encoding", "glyphs"),
    [("utf-8", UNICODE), ("ascii", ASCII), ("latin-1", ASCII), ("cp437", ASCII)],
)
def test_canvas_follows_the_encoding(encoding: str, glyphs: object) -> None:
    assert make_canvas(io.TextIOWrapper(io.BytesIO(), encoding=encoding)).glyphs is glyphs


def test_canvas_without_encoding_is_unicode() -> None:
    assert make_canvas(io.StringIO()).glyphs is UNICODE


def test_canvas_without_terminal_ignores_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "33")
    assert make_canvas(io.StringIO()).width == DEFAULT_WIDTH


def test_build_line_cuts_wide_characters_by_columns() -> None:
    text = Canvas(7, UNICODE).build_line("加速器加速器")
    assert (text.plain, text.cell_len) == ("加速器…", 7)
    assert Canvas(7, ASCII).build_line("加速器加速器").plain == "??????"


def test_build_line_has_no_control_characters() -> None:
    assert Canvas(40, UNICODE).build_line("a\x1b[2Jb\nc\u202ed\x9be", "  ").plain == "a [2Jb c d e"


def test_build_flow_breaks_between_items() -> None:
    lines = Canvas(20, UNICODE).build_flow("Hosts", ["12 up", "1 late", "2 down"])
    assert [line.plain for line in lines] == ["Hosts  12 up  1 late", "  2 down"]


@pytest.mark.parametrize(
    ("number", "total", "expected"),
    [
        (3, 3, ["a", "b", "c"]),
        (3, 9, ["a", "b", "  7 more x"]),
        (2, 3, ["a", "  2 more x"]),
        (1, 3, ["  3 more x"]),
        (0, 3, ["  3 more x"]),
        (9, 5, ["a", "b", "c", "  2 more x"]),
        (9, 2, ["a", "b", "c"]),
    ],
)
def test_limit_lines_counts_what_is_not_shown(number: int, total: int, expected: list[str]) -> None:
    lines = [Canvas(9, UNICODE).build_line(letter) for letter in "abc"]
    shown = Canvas(20, UNICODE).limit_lines(lines, number, total, "x")
    assert [line.plain for line in shown] == expected
