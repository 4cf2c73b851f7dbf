# SPDX-License-Identifier: Apache-2.0
"""The planted defects of ``tools/dev mutants`` fit to this tree. The command itself runs them."""

import ast
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cyborg

ROOT = Path(cyborg.__file__).parents[1]
LOG = "ERROR    cyborg.db:claims.py:3 the claim is lost\n"
FOUND = "FAILED a/test_b.py::test_c[x y] - assert 1 == 2\n1 failed, 3 passed in 0.12s"


def load_tool() -> ModuleType:
    """Return the module of the command, which is in no package."""
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "_mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()
MUTANTS = TOOL.load_mutants()
IDS = [mutant.name for mutant in MUTANTS]


def list_functions(path: Path) -> set[str]:
    """Return the names of the functions of a test module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.static
def test_list_has_each_patch_once() -> None:
    patches = sorted(path.stem for path in (ROOT / TOOL.LIST).parent.glob("*.patch"))
    assert (sorted(IDS), len(IDS)) == (patches, 25)


@pytest.mark.static
@pytest.mark.parametrize("mutant", MUTANTS, ids=IDS)
def test_patch_applies_to_code_of_the_package(mutant: Any) -> None:
    for path, text in TOOL.mutate(ROOT, mutant.patch.read_text(encoding="utf-8")).items():
        assert path.startswith("cyborg/")
        assert not path.startswith("cyborg/tests/")
        assert ast.dump(ast.parse(text)) != ast.dump(ast.parse((ROOT / path).read_text("utf-8")))


@pytest.mark.static
@pytest.mark.parametrize("mutant", MUTANTS, ids=IDS)
def test_named_tests_exist(mutant: Any) -> None:
    assert mutant.tests
    for test in mutant.tests:
        path, _, name = test.partition("::")
        assert name.partition("[")[0] in list_functions(ROOT / path)


@pytest.mark.static
def test_page_has_each_mutant_with_its_tests() -> None:
    page = (ROOT / "doc/source/contributor/testing.rst").read_text(encoding="utf-8")
    rows = re.findall(r"^([a-z-]+) {2,}\S.*? {2,}(test_\S+)$", page, re.MULTILINE)
    # A row has the name of a test once, for all its cases.
    tests = dict.fromkeys(
        (mutant.name, test.rpartition("::")[2].partition("[")[0])
        for mutant in MUTANTS
        for test in mutant.tests
    )
    assert rows == list(tests)


@pytest.mark.static
def test_mutants_of_fences_name_the_case_of_each_database_server() -> None:
    # SQLite has one writer at a time: there, a fence decides nothing between two connections.
    fences = {
        mutant.name: mutant.tests for mutant in MUTANTS if "db/test_fences.py" in mutant.tests[0]
    }
    assert sorted(fences) == ["claim-guard", "lease-epoch", "project-not-locked"]
    for tests in fences.values():
        (name,) = {test.partition("[")[0] for test in tests}
        kinds = [re.split(r"[-\]]", test.removeprefix(f"{name}["))[0] for test in tests]
        assert kinds == ["mysql", "postgresql"]


PATCH = (
    "--- a/one.py\n+++ b/one.py\n@@ -1,3 +1,3 @@\n a = 1\n-b = 2\n+b = 3\n\n@@ -9 +9 @@\n-c\n+d\n"
)


def test_mutate_changes_lines_that_look_like_headers(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("a\n-- b\n@@ c\nd\n")
    patch = "--- a/one.py\n+++ b/one.py\n@@ -1,3 +1,3 @@\n a\n--- b\n+++ b/e\n @@ c\n"
    assert TOOL.mutate(tmp_path, patch) == {"one.py": "a\n++ b/e\n@@ c\nd\n"}


def test_mutate_changes_the_lines_wherever_they_are(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("first\na = 1\nb = 2\n\nc\nlast\n")
    assert TOOL.mutate(tmp_path, PATCH) == {"one.py": "first\na = 1\nb = 3\n\nd\nlast\n"}


@pytest.mark.parametrize(
    ("text", "patch", "error"),
    [
        ("a = 1\nb = 4\n\nc\n", PATCH, "one.py has 0 times"),
        ("a = 1\nb = 2\n\nc\na = 1\nb = 2\n\n", PATCH, "one.py has 2 times"),
        ("a = 1\nb = 2\n\nc\n", PATCH.replace("one", "two"), "two.py does not exist"),
        ("a = 1\nb = 2\n\nc\n", "", "the patch is empty"),
        ("c\n", PATCH + " e\n", "a hunk of one.py has more lines than its header says"),
        ("c\n", PATCH.removesuffix("+d\n"), "a hunk of one.py has fewer lines than its header"),
    ],
)
def test_mutate_with_another_text_is_an_error(
    tmp_path: Path, text: str, patch: str, error: str
) -> None:
    (tmp_path / "one.py").write_text(text)
    with pytest.raises(TOOL.PatchError, match=error):
        TOOL.mutate(tmp_path, patch)


@pytest.mark.parametrize(
    ("status", "output", "description"),
    [
        (1, FOUND, "found by a/test_b.py::test_c[x y] (1 s)"),
        (
            1,
            f"{LOG}=== short test summary info ===\n{FOUND}",
            "found by a/test_b.py::test_c[x y] (1 s)",
        ),
        (0, "3 passed, 1 deselected in 0.12s", "SURVIVED (1 s)"),
        (0, "1 skipped in 0.12s", "ERROR: no test of the tier was run"),
        (5, "1 deselected in 0.12s", "ERROR: no test of the tier was run"),
        (1, f"ERROR a/test_b.py::test_d - OSError\n{FOUND}", "ERROR: pytest ended with 1"),
        (1, "ERROR a/test_b.py::test_d - OSError", "ERROR: pytest ended with 1"),
        (2, "ERROR a/test_b.py - ImportError\n!!! Interrupted", "ERROR: pytest ended with 2"),
        (4, "ERROR: not found: a/test_b.py::test_d", "ERROR: pytest ended with 4"),
        (-9, "", "ERROR: pytest ended with -9"),
    ],
)
def test_run_without_a_failed_test_finds_nothing(
    status: int, output: str, description: str
) -> None:
    text = TOOL.describe(TOOL.judge_run(status, output, 1.0))
    assert text.splitlines()[0] == description


@pytest.mark.parametrize(
    ("tests", "missed"),
    [
        (["a::b"], ()),
        (["a::b[x]"], ()),
        (["a::b[x]", "a::b[y]"], ("a::b[y]",)),
        (["a::b[x]", "a::c"], ()),
        (["a::d", "a::c"], ("a::d",)),
        (["a::b[x]", "a::b"], ()),
        (["a::b[", "a::"], ("a::b[", "a::")),
    ],
)
def test_mutant_is_found_when_each_of_its_tests_has_failed(
    tests: list[str], missed: tuple[str, ...]
) -> None:
    assert TOOL.find_missed(tests, ["a::b[x]", "a::c"]) == missed
    outcome = TOOL.Outcome(1.0, failed=("a::b[x]", "a::c"), missed=missed)
    survived = f"SURVIVED {', '.join(missed)} (1 s)"
    assert TOOL.describe(outcome) == (survived if missed else "found by a::b[x], a::c (1 s)")
