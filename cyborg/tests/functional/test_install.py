# SPDX-License-Identifier: Apache-2.0
"""The installed package is complete: no file of the source tree is read.

The committed tree is installed into a separate folder. The standalone service runs from there, in
another directory, with a hook that records every file that Python opens.
"""

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

import cyborg
from cyborg.api.console import site as files
from cyborg.tests.fixtures.machine import prerequisites
from cyborg.tests.fixtures.machine.processes import Daemon, wait_until

pytestmark = pytest.mark.matrix

SOURCE = Path(cyborg.__file__).resolve().parent.parent

HOOK = textwrap.dedent(
    """
    import os, sys

    def hear(event, args, log=os.environ["OPENED"], source=os.environ["SOURCE"]):
        if event != "open" or not isinstance(args[0], str) or busy:
            return
        path = os.path.abspath(args[0])
        if path.startswith(source + os.sep) and not path.startswith(sys.prefix + os.sep):
            busy.append(True)
            with open(log, "a") as file:
                file.write(path + "\\n")
            busy.clear()

    busy = []
    sys.addaudithook(hear)
    """
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the installed tree."""
    prerequisites.require("clone")
    prerequisites.require("pip")
    folder = tmp_path_factory.mktemp("install")
    pip = [*(prerequisites.pip_command() or ()), "--disable-pip-version-check", "-q"]
    for command in (
        ["git", "clone", "-q", str(SOURCE), "source"],
        # By path: the name on the public index belongs to another package.
        [*pip, "install", "--no-deps", "--no-build-isolation", "--target", "site", "./source"],
    ):
        process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert process.returncode == 0, f"{command}: {process.stdout}{process.stderr}"
    (folder / "site" / "sitecustomize.py").write_text(HOOK)
    return folder / "site"


@pytest.fixture
def service(site: Path, tmp_path: Path) -> Iterator[tuple[Daemon, Path]]:
    """Run the standalone service; yield it and the opened files of the source tree."""
    opened = tmp_path / "opened"
    env = {"PYTHONPATH": str(site), "OPENED": str(opened), "SOURCE": str(SOURCE)}
    command = [sys.executable, "-P", "-m", "cyborg.cmd.standalone", "--port", "0"]
    daemon = Daemon("standalone", [*command, "--state-dir", str(tmp_path / "s")], tmp_path, env)
    daemon.start()
    try:
        yield daemon, opened
    finally:
        daemon.stop()


def test_installed_tree_runs_the_service(service: tuple[Daemon, Path]) -> None:
    daemon, opened = service
    wait_until("the service is ready", lambda: "ready:" in daemon.tail() or not daemon.alive())
    line = next((x for x in daemon.tail().splitlines() if "API listens on" in x), "")
    url = line.rpartition(" ")[2]
    assert url.startswith("http"), daemon.tail()

    def devices() -> list[object]:
        entries: list[object] = requests.get(f"{url}/v2/devices", timeout=60).json()["devices"]
        return entries

    assert len(wait_until("the fake card is there", devices)) == 1
    assert daemon.stop() == 0
    assert (opened.read_text() if opened.exists() else "") == ""


def test_installed_tree_has_no_tests(site: Path) -> None:
    assert (site / "cyborg" / "testing" / "conformance" / "kit.py").exists()
    assert [str(path) for path in site.rglob("*") if "tests" in path.relative_to(site).parts] == []


def test_installed_tree_has_the_files_of_the_console(site: Path) -> None:
    folder = site / "cyborg" / "api" / "console" / "static"
    assert sorted(path.name for path in folder.iterdir()) == sorted(files.TYPES)


def test_installed_tree_has_types(site: Path) -> None:
    """Without this file, mypy treats every name of the package as Any in a vendor's driver."""
    assert (site / "cyborg" / "py.typed").exists()


def test_import_hook_reports_imported_files(site: Path, tmp_path: Path) -> None:
    """Without the hook the test above would always pass."""
    opened = tmp_path / "opened"
    env = {**os.environ, "PYTHONPATH": str(site), "OPENED": str(opened), "SOURCE": str(SOURCE)}
    code = f"open({str(SOURCE / 'setup.cfg')!r}).close(); import cyborg; print(cyborg.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert opened.read_text().splitlines() == [str(SOURCE / "setup.cfg")]
    assert Path(done.stdout.strip()).is_relative_to(site)
