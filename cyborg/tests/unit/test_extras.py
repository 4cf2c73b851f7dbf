# SPDX-License-Identifier: Apache-2.0
"""The extras of setup.cfg: each service installs what it imports, and the agent no server."""

import ast
import functools
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import cyborg
from cyborg.tests.fixtures.machine.tiers import sample

PACKAGE = Path(cyborg.__file__).parent
SERVER_LIBRARIES = {
    *("alembic", "openstack-placement", "oslo-db", "pecan", "psycopg2-binary", "pymysql"),
    *("sqlalchemy", "waitress", "wsme"),
}
SERVER_MODULES = ("alembic", "oslo_db", "pecan", "placement", "sqlalchemy", "wsme")
# The files that each extra runs; a folder stands for all its files. cyborg.conf is checked by
# starting the agent: it imports the libraries of its groups late. IMPORTED has more.
FILES = {
    "agent": (
        *("agent", "core", "drivers", "os_acc", "rpc", "cmd/agent.py", "testing/conformance"),
        *("clients/glance.py", "clients/service_client.py"),
    ),
    "api": ("api", "policies", "wsgi"),
    "client": ("cli", "osc", "cmd/client.py"),
    "conductor": (
        "clients/nova.py",
        "clients/placement.py",
        "clients/service_client.py",
        "conductor",
        "db",
        "cmd/conductor.py",
        "cmd/dbsync.py",
        "cmd/status.py",
    ),
    "limits": ("clients/limits.py",),
    "signatures": ("agent/images/signature.py",),
    "all": ("cmd/quickstart.py",),
    "standalone": ("standalone", "cmd/standalone.py"),
    "tempest": ("tempest_plugin",),
    "tracing": ("tracing/recorder.py",),
}
# Packages of which an extra runs what its files import, at once or through another module of it.
# The API runs no writer and no migration, so it needs no alembic.
IMPORTED = {"api": "cyborg.db"}
# Files in the folders of another extra.
SEPARATE = {PACKAGE / name for name in FILES["signatures"]}
BUILD_SERVICE = """
import sys
from oslo_config import cfg
import cyborg.cmd.agent as command
import cyborg.conf
import cyborg.drivers.fake, cyborg.drivers.generic

conf = cfg.ConfigOpts()
cyborg.conf.register(conf, cyborg.conf.AGENT_GROUPS)
conf([], project="cyborg", default_config_files=[], default_config_dirs=[])
transport = command.make_transport(conf)
command.AgentService(conf, command.make_conductor_client(transport, conf), transport)
print(*[name for name in {modules!r} if name in sys.modules])
"""


@functools.cache
def closure(extra: str) -> set[str]:
    """Return the names of the distributions that this environment has for an extra."""
    packages: set[str] = set()
    pending = [("cyborg", frozenset({"", extra}))]
    visited = set()
    while pending:
        name, extras = pending.pop()
        if (name, extras) in visited:
            continue
        visited.add((name, extras))
        packages.add(name)
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, requires):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": one}) for one in extras):
                wanted_extras = frozenset({"", *requirement.extras})
                pending.append((str(canonicalize_name(requirement.name)), wanted_extras))
    return packages


@functools.cache
def find_providers() -> Mapping[str, list[str]]:
    """Return the distributions that have each top-level package."""
    return metadata.packages_distributions()


def direct(extra: str) -> set[str]:
    """Return the distributions that an extra names itself or by another extra of this package."""
    names: set[str] = set()
    for requirement in map(Requirement, metadata.requires("cyborg") or []):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            if requirement.name == "cyborg":
                for other in requirement.extras:
                    names |= direct(other)
            else:
                names.add(str(canonicalize_name(requirement.name)))
    return names


@functools.cache
def imported_names(path: Path) -> frozenset[str]:
    """Return the modules that a file imports, and the names, which may be modules."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def imported(path: Path) -> set[str]:
    """Return the top-level packages of others that a file imports, late imports included."""
    names = {name.partition(".")[0] for name in imported_names(path)}
    return names - set(sys.stdlib_module_names) - {"cyborg"}


def find_imported(paths: Iterable[Path], package: str) -> set[Path]:
    """Return the files of a package that files import, at once or through another of them."""
    found: set[Path] = set()
    pending = list(paths)
    while pending:
        for name in imported_names(pending.pop()):
            if name == package or name.startswith(f"{package}."):
                path = PACKAGE.parent.joinpath(*name.split("."))
                candidates = {path.with_suffix(".py"), path / "__init__.py"}
                new = {one for one in candidates if one.is_file()} - found
                found |= new
                pending += new
    return found


def python(code: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )


@pytest.mark.slow
@pytest.mark.static
@pytest.mark.parametrize("extra", FILES)
def test_extra_has_what_its_files_import(extra: str) -> None:
    providers = find_providers()
    dependencies = direct(extra)
    missing = set()
    paths: set[Path] = set()
    for name in FILES[extra]:
        start = PACKAGE / name
        paths |= {*start.rglob("*.py")} - SEPARATE if start.is_dir() else {start}
    if extra in IMPORTED:
        paths |= find_imported(paths, IMPORTED[extra])
    for path in paths:
        for module in imported(path):
            candidates = {str(canonicalize_name(d)) for d in providers.get(module, [module])}
            if not candidates & dependencies:
                missing.add((str(path.relative_to(PACKAGE)), module))
    assert sorted(missing) == []


@pytest.mark.static
def test_imported_files_include_those_of_other_imports() -> None:
    """Without this the test above could pass because it finds nothing."""
    found = find_imported((PACKAGE / "api").rglob("*.py"), IMPORTED["api"])
    names = {str(path.relative_to(PACKAGE / "db")) for path in found}
    assert {"engine.py", "devices/read.py", "schema.py", "timeouts.py"} <= names
    assert names & {"migrate.py", "unit_of_work.py", "devices/write.py"} == set()


@pytest.mark.static
def test_agent_extra_has_no_server_library() -> None:
    assert closure("agent") & SERVER_LIBRARIES == set()
    assert closure("client") & (SERVER_LIBRARIES | {"oslo-messaging"}) == set()


@pytest.mark.slow
@pytest.mark.static
def test_closure_of_a_server_has_its_libraries() -> None:
    """Without this the test above could pass because it finds nothing."""
    assert {"sqlalchemy", "alembic", "oslo-db", "oslo-messaging"} <= closure("conductor")
    assert {"pecan", "wsme", "sqlalchemy", "keystonemiddleware"} <= closure("api")
    assert closure("all") >= SERVER_LIBRARIES | {"cliff", "pyudev", "rich"}


@pytest.mark.static
def test_base_requirements_have_no_service() -> None:
    base = {
        Requirement(line).name for line in metadata.requires("cyborg") or [] if "extra" not in line
    }
    assert base == {
        *("os-resource-classes", "os-traits", "oslo.config", "oslo.log", "pbr", "stevedore")
    }


@pytest.mark.slow
def test_agent_service_imports_no_server_module() -> None:
    done = python(BUILD_SERVICE.replace("{modules!r}", repr(SERVER_MODULES)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


SCRIPTS = {
    "cyborg": ("client", "cliff"),
    "cyborg-agent": ("agent", "oslo_messaging"),
    "cyborg-api": ("api", "gunicorn"),
    "cyborg-capture": ("agent", "pyudev"),
    "cyborg-conductor": ("conductor", "sqlalchemy"),
    "cyborg-dbsync": ("conductor", "alembic"),
    "cyborg-quickstart": ("all", "requests"),
    "cyborg-standalone": ("standalone", "waitress"),
    "cyborg-status": ("conductor", "oslo_upgradecheck"),
}


@pytest.mark.slow
@pytest.mark.parametrize("script", sample(SCRIPTS, "cyborg", "cyborg-agent"))
def test_script_without_library_names_its_extra(script: str, tmp_path: Path) -> None:
    extra, library = SCRIPTS[script]
    (entry,) = metadata.entry_points(group="console_scripts", name=script)
    arguments = {
        "cyborg-standalone": ["--state-dir", str(tmp_path / "s")],
        "cyborg-capture": ["--source", "x", "--watch", "1", str(tmp_path / "file")],
    }.get(script, [])
    done = python(
        f"import sys; sys.modules[{library!r}] = None; sys.argv = [{script!r}, *{arguments!r}]\n"
        f"from {entry.module} import {entry.attr} as main; sys.exit(main())"
    )
    assert done.returncode == 1
    line = rf"{script} needs pip install 'cyborg\[{extra}\]': .*\b{library}\b.*\n"
    assert re.fullmatch(line, done.stderr), done.stderr


@pytest.mark.static
def test_scripts_are_all_tested() -> None:
    entries = metadata.distribution("cyborg").entry_points.select(group="console_scripts")
    assert {entry.name for entry in entries} == set(SCRIPTS)


def test_script_with_defect_of_this_package_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = importlib.import_module("cyborg.cmd.scripts")
    monkeypatch.setitem(sys.modules, "cyborg.cmd.agent", None)
    with pytest.raises(ModuleNotFoundError):
        scripts.agent()
