# SPDX-License-Identifier: Apache-2.0
"""The house keeps its shape: sizes, storeys, licence lines, and no mocks where the real thing runs.

The sizes are those of the plan in doc/source/contributor/architecture.rst.
"""

import ast
import statistics
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import cyborg

ROOT = Path(cyborg.__file__).parents[1]
MEDIAN, MOST, LONGEST = 120, 300, 500
MOCKS_PER_TEST = 0.2
_MOCKS = {"Mock", "MagicMock", "AsyncMock", "patch", "mocker"}


def sources() -> list[Path]:
    """Return every Python file of the project."""
    return sorted([*(ROOT / "cyborg").rglob("*.py"), *(ROOT / "tools").glob("*.py")])


def lines(path: Path) -> int:
    """Count the lines of a file."""
    return path.read_bytes().count(b"\n")


def test_sizes(capsys: pytest.CaptureFixture[str], record_property: Any) -> None:
    sized = sorted((lines(p), str(p.relative_to(ROOT))) for p in sources() if lines(p) > 1)
    counts = [count for count, _ in sized]
    median = statistics.median(counts)
    ninetieth = statistics.quantiles(counts, n=10)[-1]
    told = (
        f"{len(counts)} Python files: median {median:g} lines, 90th percentile {ninetieth:g}, "
        f"largest {sized[-1][0]} ({sized[-1][1]})"
    )
    # Recorded too: a worker of pytest-xdist has no terminal, and tools/test shows the record.
    record_property("told", told)
    with capsys.disabled():
        print(f"\n{told}")  # noqa: T201
    assert median <= MEDIAN
    assert ninetieth < MOST
    assert [entry for entry in sized if entry[0] > LONGEST] == []


def test_every_file_names_its_licence() -> None:
    scripts = [ROOT / "tools" / name for name in ("bench", "lib.sh", "quickstart", "test")]
    scripts += [*(ROOT / "devstack").glob("*"), ROOT / ".ci" / "run", ROOT / "setup.py"]
    bare = [
        str(path.relative_to(ROOT))
        for path in [*sources(), *scripts]
        if path.suffix != ".rst"
        and "SPDX-License-Identifier: Apache-2.0" not in "".join(head(path))
    ]
    assert bare == []


def head(path: Path) -> list[str]:
    """Return the first three lines of a file."""
    return path.read_text(encoding="utf-8").splitlines()[:3]


def test_import_contracts() -> None:
    program = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_packages_do_not_import_each_other() -> None:
    """No two rooms import each other, in whatever direction the storeys would allow one of them."""
    pairs = set()
    for path in (ROOT / "cyborg").rglob("*.py"):
        parts = path.relative_to(ROOT / "cyborg").parts
        if len(parts) < 2 or parts[0] in ("tests", "fixtures"):
            continue
        for name in imported(path):
            words = name.split(".")
            if words[0] == "cyborg" and len(words) > 1 and words[1] != parts[0]:
                pairs.add((parts[0], words[1]))
    assert [pair for pair in sorted(pairs) if pair[::-1] in pairs] == []


def imported(path: Path) -> list[str]:
    """Return the modules that a file imports, late imports included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
            if node.module == "cyborg":
                found += [f"cyborg.{alias.name}" for alias in node.names]
    return found


def test_mocks_are_rare() -> None:
    tests = mocks = 0
    for path in (ROOT / "cyborg" / "tests").rglob("test_*.py"):
        if path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                tests += 1
            elif isinstance(node, ast.Name | ast.Attribute):
                mocks += (node.id if isinstance(node, ast.Name) else node.attr) in _MOCKS
    assert mocks <= tests * MOCKS_PER_TEST


def test_no_path_of_this_machine_is_in_a_file() -> None:
    """What is written here works wherever it is checked out."""
    here = f"{ROOT}/".encode()
    folders = ("cyborg", "devstack", "doc/source", "etc", "releasenotes", "tools", ".ci")
    files = [path for name in folders for path in (ROOT / name).rglob("*")] + [*ROOT.glob("*.*")]
    files = [path for path in files if path.is_file() and path.suffix != ".pyc"]
    assert [str(path) for path in files if here in path.read_bytes()] == []


def test_no_other_distribution_has_our_modules() -> None:
    """One built beside ours once did: its stale copy ran in place of the checkout."""
    theirs = {
        dist.name: str(file)
        for dist in metadata.distributions()
        for file in dist.files or ()
        if dist.name != "cyborg" and file.parts[0] == "cyborg"
    }
    assert theirs == {}
