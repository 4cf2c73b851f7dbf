# SPDX-License-Identifier: Apache-2.0
"""What is installed is enough: nothing is read from the source tree.

The committed tree is installed into a folder of its own, and the stand-alone service runs from
there, in another directory, under a hook that writes down every file that Python opens.
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
from cyborg.fixtures.processes import Daemon, until

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
    """The installed tree."""
    if not (SOURCE / ".git").exists():
        pytest.skip("what is installed is what git tracks, and this is no git clone")
    folder = tmp_path_factory.mktemp("install")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    for command in (
        ["git", "clone", "-q", str(SOURCE), "source"],
        # By path: the name alone is somebody else's on the public index.
        [*pip, "install", "--no-deps", "--no-build-isolation", "--target", "site", "./source"],
    ):
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    (folder / "site" / "sitecustomize.py").write_text(HOOK)
    return folder / "site"


@pytest.fixture
def service(site: Path, tmp_path: Path) -> Iterator[tuple[Daemon, Path]]:
    """The stand-alone service, and the list of the files of the source tree that it opened."""
    opened = tmp_path / "opened"
    env = {"PYTHONPATH": str(site), "OPENED": str(opened), "SOURCE": str(SOURCE)}
    command = [sys.executable, "-P", "-m", "cyborg.cmd.standalone", "--port", "0"]
    daemon = Daemon("standalone", [*command, "--state-dir", str(tmp_path / "s")], tmp_path, env)
    daemon.start()
    try:
        yield daemon, opened
    finally:
        daemon.stop()


def test_the_installed_service_works(service: tuple[Daemon, Path]) -> None:
    daemon, opened = service
    until("the service is ready", lambda: "ready:" in daemon.tail() or not daemon.alive())
    line = next((x for x in daemon.tail().splitlines() if "API listens on" in x), "")
    url = line.rpartition(" ")[2]
    assert url.startswith("http"), daemon.tail()

    def devices() -> list[object]:
        found: list[object] = requests.get(f"{url}/v2/devices", timeout=10).json()["devices"]
        return found

    assert len(until("the fake card is there", devices)) == 1
    assert daemon.stop() == 0
    assert (opened.read_text() if opened.exists() else "") == ""


def test_the_hook_sees_what_it_should(site: Path, tmp_path: Path) -> None:
    """Without this the test above could pass by not looking."""
    opened = tmp_path / "opened"
    env = {**os.environ, "PYTHONPATH": str(site), "OPENED": str(opened), "SOURCE": str(SOURCE)}
    code = f"open({str(SOURCE / 'setup.cfg')!r}).close(); import cyborg; print(cyborg.__file__)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert opened.read_text().splitlines() == [str(SOURCE / "setup.cfg")]
    assert Path(done.stdout.strip()).is_relative_to(site)
