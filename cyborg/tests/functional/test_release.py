# SPDX-License-Identifier: Apache-2.0
"""The files of a release: two builds of a commit are equal, and each licence is known."""

import json
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cyborg.tests.fixtures.machine.prerequisites import ROOT

TOOL = ROOT / "tools" / "_release.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command of the tool."""
    return subprocess.run(
        [sys.executable, TOOL, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.long
@pytest.mark.requires("clone")
def test_two_builds_of_a_commit_are_equal(tmp_path: Path) -> None:
    done = run("build", ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    (sdist,), (wheel,) = tmp_path.glob("*.tar.gz"), tmp_path.glob("*.whl")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert len({member.mtime for member in members}) == 1
    names = {Path(member.name).relative_to(sdist.name[: -len(".tar.gz")]) for member in members}
    assert {Path("setup.cfg"), Path("cyborg/cmd/quickstart.py")} <= names
    with zipfile.ZipFile(wheel) as packed:
        entries = packed.read(
            next(name for name in packed.namelist() if name.endswith("entry_points.txt"))
        )
    assert b"cyborg-quickstart = " in entries


def component(name: str, *licences: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "version": "1", "licenses": list(licences)}


def test_licences_of_a_release_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "sbom.json"
    components = [
        component("kept", {"license": {"id": "Apache-2.0"}}),
        component("choice", {"expression": "GPL-2.0-or-later OR Apache-2.0"}),
        component("library", {"license": {"id": "LGPL-2.1-or-later"}}),
        component("protobuf"),
    ]
    path.write_text(json.dumps({"components": components}))
    done = run("licences", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(maxsplit=2) for line in done.stdout.splitlines()] == [
        ["kept", "1", "Apache-2.0"],
        ["choice", "1", "GPL-2.0-or-later OR Apache-2.0"],
        ["library", "1", "LGPL-2.1-or-later"],
        ["protobuf", "1", "BSD-3-Clause"],
    ]


@pytest.mark.parametrize(
    "licences",
    [
        (),
        ({"license": {"text": {"content": "All rights reserved."}}},),
        ({"license": {"id": "GPL-2.0-only"}},),
        ({"license": {"id": "AGPL-3.0"}},),
        ({"license": {"name": "GPLv3"}},),
    ],
)
def test_missing_or_strong_licence_is_refused(
    tmp_path: Path, licences: tuple[dict[str, Any], ...]
) -> None:
    path = tmp_path / "sbom.json"
    path.write_text(json.dumps({"components": [component("wrong", *licences)]}))
    done = run("licences", path)
    assert (done.returncode, done.stderr) == (1, "wrong 1: no licence that a release allows\n")
