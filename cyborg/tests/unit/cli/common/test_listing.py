# SPDX-License-Identifier: Apache-2.0
"""How rows are fitted to a terminal, and which width that is."""

import io

import pytest
from webob import Response

from cyborg.cli import app
from cyborg.cli.common import formatting, listing
from cyborg.cli.terminal import tables
from cyborg.tests.unit.cli.common.test_rest import serving

UUID = "a0000000-0000-4000-8000-00000000000a"
NAMES = ("UUID", "Host", "State", "Error")


def width_of(rows: list[tuple[object, ...]]) -> int:
    widths = [max(len(name), *(len(str(row[n])) for row in rows)) for n, name in enumerate(NAMES)]
    return sum(width + 3 for width in widths) + 1


def fit(row: tuple[object, ...], width: int) -> list[tuple[object, ...]]:
    return listing.fit_table(NAMES, [row], [True] * 4, [True, True, False, True], width, "~")


def test_fit_table_within_width_is_unchanged() -> None:
    row = (UUID, "compute-1", "up", "")
    assert fit(row, 80) == [row]


def test_fit_table_only_widest_columns_are_truncated() -> None:
    row = (formatting.Text(UUID, UUID[:8]), "compute-1.example.org", "maintaining", "no power " * 9)
    (cut,) = fit(row, 80)
    assert width_of([cut]) <= 80
    assert str(cut[0]) == UUID[:8]
    assert str(cut[1]) == "compute-1.example.org"
    assert cut[2] == "maintaining"
    assert str(cut[3]).startswith("no power")
    assert str(cut[3]).endswith("~")
    assert isinstance(cut[3], formatting.Text)
    assert cut[3].machine_readable() == row[3]


def test_fit_table_columns_keep_minimum_width() -> None:
    (cut,) = fit((formatting.Text(UUID, UUID[:8]), "compute-1.example.org", "up", "e" * 99), 20)
    assert str(cut[1]) == "compute~"


def test_fit_table_counts_columns_of_wide_characters() -> None:
    rows = fit((formatting.Text(UUID, UUID[:8]), "\u5361" * 40, "up", ""), 60)
    assert listing.table_width(NAMES, rows, [True] * 4) in (59, 60)


def test_table_width_is_that_of_the_widest_lines() -> None:
    rows = [("a", "bb\nbbbb", None, formatting.Text(1, "c"))]
    assert listing.table_width(("A", "B", "C", "D"), rows, [True, True, False, True]) == 16


def test_fit_table_joins_lines() -> None:
    (cut,) = fit((UUID, formatting.Text(None, "a\n  b\nc"), "up", ""), 80)
    assert str(cut[1]) == "a, b, c"


def test_terminal_width_uses_columns_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert tables.terminal_width(io.StringIO()) == tables.DEFAULT_WIDTH
    monkeypatch.setenv("COLUMNS", "0")
    assert tables.terminal_width(io.StringIO()) == tables.DEFAULT_WIDTH
    monkeypatch.setenv("COLUMNS", "100")
    assert tables.terminal_width(io.StringIO()) == 100


@pytest.mark.slow
def test_tables_of_one_object_show_whole_cells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"uuid": UUID, "type": "FPGA", "model": "A long name", "hostname": "compute-1"}
    row |= {"address": "0000:3b:00.0", "state": "ready", "placement": "in_sync"}
    monkeypatch.setenv("COLUMNS", "60")
    with serving(lambda request: Response(json={"devices": [row]})) as url:
        app.main(["--os-auth-type", "none", "--os-endpoint", url, "device-list"])
    out = capsys.readouterr().out
    assert "| Field " in out
    assert "| A long name " in out
