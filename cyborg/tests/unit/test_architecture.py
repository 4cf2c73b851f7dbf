# SPDX-License-Identifier: Apache-2.0
"""The rules of doc/source/contributor/architecture.rst: sizes, layers, licences, few mocks."""

import ast
import configparser
import fnmatch
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import cyborg
from cyborg.db import schema

ROOT = Path(cyborg.__file__).parents[1]
MOCKS_PER_TEST = 0.2
_MOCKS = {"Mock", "MagicMock", "AsyncMock", "patch", "mocker"}
_MOCK = re.compile(rf"\b(?:{'|'.join(sorted(_MOCKS))})\b")
_CHANGE = re.compile(
    r"\bsa\.(?:insert|update|delete)\(|\.(?:insert|update|delete)\(\)"
    r"|\bbulk\.(?:insert|insert_row|update|update_where|delete|delete_where|change_state)\("
)
# A path of any checkout: a folder, and a name in the root or a file of the package.
_NAMES = (
    rb"\.venv|\.ci|\.dev|\.quickstart|console|constraints\.txt|devstack|doc/source|pyproject\.toml"
    rb"|releasenotes|requirements\.txt|setup\.cfg|setup\.py|tools|cyborg/tests"
)
_CHECKOUT = re.compile(
    rb"(?<![\w/.$}~*)-])(?P<folder>(?:/[\w.-]+)+)"
    rb"/(?P<name>(?:%b)(?![\w.-])[\w./-]*|cyborg/[\w./-]+)" % _NAMES
)
PATHS_OF_EXAMPLES = {
    ("doc/source/contributor/testing.rst", "/home/user/cyborg/.venv"),
    ("etc/containers/Containerfile", "/source/constraints.txt"),
}
_TEST = re.compile(r"^[ \t]*def test_\w+\(", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.static
def test_file_rules_hold() -> None:
    """The script is also a step of tools/test, and the git hook runs it."""
    script = ROOT / "tools" / "_file_rules.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


# In the default tier, the linter "import contracts" of tools/test shows the same.
@pytest.mark.slow
@pytest.mark.matrix
def test_import_contracts() -> None:
    program = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run(
        [program, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.static
def test_packages_have_no_mutual_imports() -> None:
    """No two packages import each other, even if the layers would allow it."""
    pairs = set()
    for path in (ROOT / "cyborg").rglob("*.py"):
        parts = path.relative_to(ROOT / "cyborg").parts
        if len(parts) < 2 or parts[0] == "tests":
            continue
        for name in imported_modules(path):
            names = name.split(".")
            if names[0] == "cyborg" and len(names) > 1 and names[1] != parts[0]:
                pairs.add((parts[0], names[1]))
    assert [pair for pair in sorted(pairs) if pair[::-1] in pairs] == []


@pytest.mark.slow
@pytest.mark.static
def test_no_file_has_two_names_of_one_import() -> None:
    """With two aliases of a module, a reader takes its functions for those of two modules."""
    findings = []
    for path in sorted((ROOT / "cyborg").rglob("*.py")):
        relative = path.relative_to(ROOT / "cyborg")
        if relative.parts[0] != "tests":
            findings += [
                f"{relative}: {target} is {' and '.join(sorted(names))}"
                for target, names in import_names(path.read_text(encoding="utf-8")).items()
                if len(names) > 1
            ]
    assert findings == []


def test_two_names_of_one_import_are_found() -> None:
    text = "from a.b import c as d\ndef f():\n    import a.b.c as e, os\n    import os\n"
    assert import_names(text) == {"a.b.c": {"d", "e"}, "os": {"os"}}


def import_names(text: str) -> dict[str, set[str]]:
    """Return the names that a source gives to what it imports, late imports included."""
    names: dict[str, set[str]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            prefix = "." * node.level + (node.module or "")
            for alias in node.names:
                names.setdefault(f"{prefix}.{alias.name}", set()).add(alias.asname or alias.name)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                names.setdefault(alias.name, set()).add(alias.asname or alias.name)
    return names


def imported_modules(path: Path) -> list[str]:
    """Return the modules that a file imports, late imports included."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules.append(node.module)
            if node.module == "cyborg":
                modules += [f"cyborg.{alias.name}" for alias in node.names]
    return modules


@pytest.mark.static
def test_contract_names_every_writer() -> None:
    """The contracts ``one-writer`` list the modules of ``db`` that change rows."""
    contracts = configparser.ConfigParser()
    contracts.read(ROOT / ".importlinter")
    contract = "importlinter:contract:one-writer"
    listed = contracts[contract]["forbidden_modules"].split()
    assert contracts[f"{contract}-programs"]["forbidden_modules"].split() == listed
    folder = ROOT / "cyborg"
    unlisted = [
        name
        for path in sorted((folder / "db").rglob("*.py"))
        # The schema's migrations: only cyborg-dbsync and cyborg-standalone run them.
        if folder / "db" / "migrations" not in path.parents
        and _CHANGE.search(path.read_text(encoding="utf-8"))
        for name in [".".join(("cyborg", *path.relative_to(folder).with_suffix("").parts))]
        if not any(
            fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")
            for pattern in listed
        )
    ]
    # It locks and counts; the API uses its counts.
    assert unlisted == ["cyborg.db.binding.project_units"]


def folders_of(package: str) -> list[str]:
    """Return the packages of a package, except the tests."""
    found = (path.parent.name for path in (ROOT / package).glob("*/__init__.py"))
    return sorted(name for name in found if name != "tests")


@pytest.mark.static
def test_maps_have_each_folder() -> None:
    """The maps are the page of the architecture, CONTRIBUTING and CODEOWNERS."""
    page = (ROOT / "doc/source/contributor/architecture.rst").read_text(encoding="utf-8")
    layers = (ROOT / "CONTRIBUTING.rst").read_text(encoding="utf-8")
    owners = (ROOT / "CODEOWNERS").read_text(encoding="utf-8")
    folders = folders_of("cyborg")
    assert [name for name in folders if f"``cyborg/{name}``" not in page] == []
    assert [name for name in folders if not re.search(rf"^    .*\b{name}\b", layers, re.M)] == []
    assert [name for name in folders if f"\n/cyborg/{name}/ " not in owners] == []
    owned = re.findall(r"^/(\S+)", owners, re.MULTILINE)
    assert [name for name in owned if not (ROOT / name).exists()] == []
    for package in ("cyborg/conductor", "cyborg/agent"):
        names = folders_of(package)
        assert [name for name in names if f"``{package}/{name}``" not in page] == []


@pytest.mark.slow
@pytest.mark.static
def test_docs_have_the_writers_of_each_table() -> None:
    """The table below the invariant "One writer" names the modules that change rows."""
    page = (ROOT / "doc/source/contributor/architecture.rst").read_text(encoding="utf-8")
    rows = re.findall(r"^   \* - ``(\w+)``\n     - (.*(?:\n       .*)*)", page, re.MULTILINE)
    documented = {table: set(re.findall(r"``([\w/.]+)``", cell)) for table, cell in rows}
    found: dict[str, set[str]] = {}
    folder = ROOT / "cyborg" / "db"
    for path in sorted(folder.rglob("*.py")):
        if "migrations" not in path.parts and path != folder / "bulk.py":
            for table in changed_tables(path.read_text(encoding="utf-8")):
                found.setdefault(table, set()).add(str(path.relative_to(folder)))
    assert documented == found
    assert set(found) == set(schema.metadata.tables)


def changed_tables(text: str) -> set[str]:
    """Return the tables whose rows a module changes, by the first table that each call names."""
    nodes = list(ast.walk(ast.parse(text)))
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "cyborg.db.schema":
            names |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            targets = ast.unparse(node.targets[0]).strip("()").split(", ")
            values = ast.unparse(node.value).strip("()").split(", ")
            for name, value in zip(targets, values, strict=False):
                base = value.removeprefix("schema.").partition(".")[0]
                if base in names or value.startswith("schema."):
                    names[name] = names.get(base, base)
    tables = set()
    for node in nodes:
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and (_CHANGE.fullmatch(f"{called}(") or called == "OldRows"):
            # The first argument, or the one after the transaction: a table or one of its columns.
            argument = ast.unparse(node.args[1 if called.startswith("bulk.") else 0])
            name = argument.removeprefix("schema.").partition(".")[0]
            # ``OldRows`` deletes from the table that it has got.
            if name != "self":
                tables.add(schema.__dict__[names.get(name, name)].name)
    return tables


@pytest.mark.slow
@pytest.mark.static
def test_mocks_are_rare() -> None:
    tests = mocks = 0
    for path in (ROOT / "cyborg" / "tests").rglob("test_*.py"):
        if path == Path(__file__):
            continue
        source = path.read_text(encoding="utf-8")
        tests += len(_TEST.findall(source))
        # Few files have such a word at all; only they are parsed.
        nodes = ast.walk(ast.parse(source)) if _MOCK.search(source) else ()
        for node in nodes:
            if isinstance(node, ast.Name | ast.Attribute):
                mocks += (node.id if isinstance(node, ast.Name) else node.attr) in _MOCKS
    assert tests > 1000
    assert mocks <= tests * MOCKS_PER_TEST


@pytest.mark.slow
@pytest.mark.static
def test_files_do_not_contain_path_of_a_checkout() -> None:
    """The project works in any directory: no absolute path leads to a file of this tree.

    The path of this checkout is not compared: it may be one that a page names, such as /build.
    """
    folders = ("cyborg", "devstack", "doc/source", "etc", "releasenotes", "tools", ".ci")
    files = [path for name in folders for path in (ROOT / name).rglob("*")] + [*ROOT.glob("*.*")]
    files = [path for path in files if path.is_file() and path.suffix != ".pyc"]
    found = {
        (str(path.relative_to(ROOT)), absolute)
        for path in files
        if path != Path(__file__)
        for absolute in paths_of_checkouts(path.read_bytes())
    }
    assert found - PATHS_OF_EXAMPLES == set()


def test_paths_of_checkouts_are_found_anywhere() -> None:
    text = b'"/src/tools/test" ../tools/test /a/.venv/bin $ROOT/tools/x /etc/cyborg/cyborg.conf'
    assert paths_of_checkouts(text) == ["/src/tools/test", "/a/.venv/bin"]
    text = b"at /b/cyborg/cyborg/__init__.py, /usr/lib/dist-packages/cyborg/__init__.py"
    assert paths_of_checkouts(text) == ["/b/cyborg/cyborg/__init__.py"]


def paths_of_checkouts(text: bytes) -> list[str]:
    """Return the absolute paths in a text that end in a file of this tree or its environment."""
    paths = []
    for match in _CHECKOUT.finditer(text):
        absolute, name = match[0].decode(), match["name"].decode()
        is_installed = match["folder"].endswith(b"-packages")
        if not is_installed and (not name.startswith("cyborg/") or (ROOT / name).is_file()):
            paths.append(absolute)
    return paths


@pytest.mark.static
def test_other_distributions_have_no_cyborg_modules() -> None:
    """A stale copy of the package in another distribution once ran instead of the checkout."""
    foreign = {
        dist.name: found[0]
        for dist in metadata.distributions()
        if dist.name != "cyborg" and (found := own_lines(dist))
    }
    assert foreign == {}


def own_lines(dist: metadata.Distribution) -> list[str]:
    """Return the lines of a distribution's list of files that name a file of this package.

    ``dist.files`` has them too, but parses 50000 lines, which takes 10 s.
    """
    lists = ("RECORD", "installed-files.txt", "SOURCES.txt")
    text = next(filter(None, map(dist.read_text, lists)), "")
    return re.findall(r'^"?cyborg/.*$', text, re.MULTILINE)
