# SPDX-License-Identifier: Apache-2.0
"""The pages of limitations are tables, and agree with the code."""

import re
from pathlib import Path

import pytest

import cyborg

pytestmark = pytest.mark.static

ROOT = Path(cyborg.__file__).parents[1]
DOC = ROOT / "doc" / "source"
PAGES = [DOC / "limits.rst", *sorted((DOC / "limits").glob("*.rst"))]
HEADER = ["Limitation", "Impact", "What to do"]
NOTHING = re.compile(r"(?:none|n/a|-|no|nothing|todo|tbd|\?)\W*", re.IGNORECASE)


def list_rows(text: str) -> list[list[str]]:
    """Return the cells of each row of the tables of a page, without their headers."""
    rows = []
    for body in re.findall(r"\.\. list-table::\n((?:   .*\n|\n)+)", text + "\n"):
        _, *table = re.split(r"^   \* -", body, flags=re.MULTILINE)
        cells = [
            [
                " ".join(cell.split())
                for cell in re.split(r"^     -(?= |$)", row, flags=re.MULTILINE)
            ]
            for row in table
        ]
        assert cells[0] == HEADER
        rows += cells[1:]
    return rows


def find_faults(rows: list[list[str]]) -> list[str]:
    """Return what is wrong with rows: missing or empty cells."""
    faults = [f"{len(row)} cells: {row}" for row in rows if len(row) != len(HEADER)]
    faults += [f"empty cell: {row}" for row in rows if not all(row)]
    faults += [
        f"write 'No workaround.': {row}"
        for row in rows
        if NOTHING.fullmatch(row[-1])
        or (row[-1].startswith("No workaround") and row[-1][13:] != ".")
    ]
    return faults


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_limits_have_impact_and_what_to_do(path: Path) -> None:
    rows = list_rows(path.read_text(encoding="utf-8"))
    assert rows
    assert find_faults(rows) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_limits_are_in_tables_only(path: Path) -> None:
    """An entry in another form would have no impact and nothing to do."""
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"^[-*] .*|^    \S.*", text, re.MULTILINE) == []
    titles = re.findall(r"^(?!=)(.+)\n=+$", text, re.MULTILINE)
    tables = text.count(".. list-table::\n")
    assert tables == len(titles) - 1, "each section has one table"


@pytest.mark.parametrize(
    "row",
    [
        "   * - A limit\n     - An impact\n",
        "   * - A limit\n     - An impact\n     -\n",
        "   * - A limit\n     - An impact\n     - None.\n",
        "   * - A limit\n     - An impact\n     - No workaround, sorry.\n",
        "   * -\n     - An impact\n     - No workaround.\n",
    ],
    ids=["two cells", "empty", "none", "other words", "no limit"],
)
def test_row_with_a_fault_is_found(row: str) -> None:
    header = "".join(f"     - {title}\n" for title in HEADER).replace("     - ", "   * - ", 1)
    table = f".. list-table::\n   :header-rows: 1\n\n{header}"
    good = "   * - A\n       limit\n     - An impact\n     - No workaround.\n"
    assert list_rows(table + good) == [["A limit", "An impact", "No workaround."]]
    assert len(find_faults(list_rows(table + good + row))) == 1


def test_limits_name_the_tests_that_ci_does_not_run() -> None:
    lab = ROOT / "cyborg" / "tests" / "lab"
    long = [f.name for f in lab.glob("test_*.py") if re.search(r"\bmark\.long\b", f.read_text())]
    assert "test_live_attach.py" in long
    rows = list_rows((DOC / "limits" / "drivers.rst").read_text(encoding="utf-8"))
    (entry,) = (row[0] for row in rows if "does not run the tests marked ``long``" in row[0])
    assert sorted(re.findall(r"``(test_\w+\.py)``", entry)) == sorted(long)


def test_limits_list_nothing_as_missing_that_the_api_has() -> None:
    text = (DOC / "limits.rst").read_text(encoding="utf-8")
    _, _, section = text.partition("\nNot implemented\n===")
    missing = [row[0] for row in list_rows(section)]
    assert any(entry.startswith("More drivers") for entry in missing)
    words = re.compile("attach|context|lease|maintenance|layout|quota", re.IGNORECASE)
    assert [entry for entry in missing if words.search(entry)] == []
    readme = (ROOT / "README.rst").read_text(encoding="utf-8")
    for clause in re.findall(r"Not implemented:(.*?)\.\s", readme, re.DOTALL):
        assert not re.search(r"attachment|device context", clause.replace("\n", " "), re.IGNORECASE)
