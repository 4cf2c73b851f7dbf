# SPDX-License-Identifier: Apache-2.0
"""Lines of a given width."""

import io

import pytest

from cyborg.cli.views.text import (
    ASCII,
    DEFAULT_WIDTH,
    UNICODE,
    build_flow,
    build_line,
    choose_glyphs,
    limit_lines,
    output_width,
)


@pytest.mark.parametrize(
    ("encoding", "glyphs"),
    [("utf-8", UNICODE), ("ascii", ASCII), ("latin-1", ASCII), ("cp437", ASCII)],
)
def test_choose_glyphs_follows_the_encoding(encoding: str, glyphs: object) -> None:
    assert choose_glyphs(io.TextIOWrapper(io.BytesIO(), encoding=encoding)) is glyphs


def test_choose_glyphs_without_encoding_is_unicode() -> None:
    assert choose_glyphs(io.StringIO()) is UNICODE


def test_output_width_without_terminal_ignores_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "33")
    assert output_width(io.StringIO()) == DEFAULT_WIDTH


def test_build_line_cuts_wide_characters_by_columns() -> None:
    text = build_line(7, UNICODE, "加速器加速器")
    assert (text.plain, text.cell_len) == ("加速器…", 7)
    assert build_line(7, ASCII, "加速器加速器").plain == "??????"


def test_build_line_has_no_control_characters() -> None:
    assert build_line(40, UNICODE, "a\x1b[2Jb\nc\u202ed\x9be", "  ").plain == "a [2Jb c d e"


def test_build_flow_breaks_between_items() -> None:
    lines = build_flow(20, UNICODE, "Hosts", ["12 up", "1 late", "2 down"])
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
    lines = [build_line(9, UNICODE, letter) for letter in "abc"]
    shown = limit_lines(20, UNICODE, lines, number, total, "x")
    assert [line.plain for line in shown] == expected
