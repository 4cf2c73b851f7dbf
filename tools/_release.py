# SPDX-License-Identifier: Apache-2.0
"""Build the files of a release, and check the licences of what it installs, for tools/release.

usage: python _release.py build REPOSITORY FOLDER    build sdist and wheel of HEAD twice, compare
       python _release.py licences SBOM              print the licences of all components; exit with
                                                     1 if one is missing, or forbids this use
"""

import filecmp
import gzip
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Licences whose terms would apply to this project as a whole. A choice of licences is written with
# OR (SPDX), and the LGPL allows use as a library.
COPYLEFT = re.compile(r"(?<!L)GPL|Affero|GNU General Public", re.IGNORECASE)
# Distributions whose metadata have no licence, with the one that their files have.
UNDECLARED = {
    "libvirt-python": "LGPL-2.1-or-later",
    "protobuf": "BSD-3-Clause",
}


def build_twice(repository: Path, folder: Path) -> list[str]:
    """Build the last commit into a folder; return the names of files that a second build changes.

    The builds differ in the path, the umask and the time, which no file may contain.
    """
    with tempfile.TemporaryDirectory() as work:
        second = Path(work) / "the second"
        for umask, tree, out in ((0o022, Path(work) / "first", folder), (0o077, second, second)):
            os.umask(umask)
            subprocess.run(["git", "clone", "-q", repository, tree / "tree"], check=True)
            build(tree / "tree", out)
        comparison = filecmp.dircmp(folder, second, ignore=["tree"])
        _, changed, unreadable = filecmp.cmpfiles(folder, second, comparison.common, shallow=False)
        return [*changed, *unreadable, *comparison.left_only, *comparison.right_only]


def build(tree: Path, folder: Path) -> None:
    """Build the sdist and the wheel of a clone into a folder.

    Times are that of the commit, so that two builds have the same bytes. setuptools does this for a
    wheel only, see https://reproducible-builds.org/specs/source-date-epoch/.
    """
    shown = subprocess.run(
        ["git", "show", "--no-patch", "--format=%ct"], cwd=tree, stdout=subprocess.PIPE, check=True
    )
    epoch = int(shown.stdout)
    # Permissions are part of both files.
    os.umask(0o022)
    for path in tree.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree],
        env={**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"},
        stdout=sys.stderr,
        check=True,
    )
    (sdist,) = folder.glob("*.tar.gz")
    sdist.write_bytes(normalize(sdist.read_bytes(), epoch))


def normalize(sdist: bytes, epoch: int) -> bytes:
    """Return an sdist with sorted members, without owners, and with one time in Unix seconds."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(sdist)) as old,
        gzip.GzipFile(filename="", mode="wb", fileobj=packed, mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old, key=lambda member: member.name):
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.mtime = epoch
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    return packed.getvalue()


def read_licences(sbom: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the licences of each component of a CycloneDX document, sorted."""
    found = {}
    for component in sbom["components"]:
        names = {
            name
            for entry in component.get("licenses", [])
            for licence in [entry.get("license", {})]
            if (name := entry.get("expression") or licence.get("id") or licence.get("name"))
        }
        if not names and component["name"] in UNDECLARED:
            names = {UNDECLARED[component["name"]]}
        found[f"{component['name']} {component['version']}"] = sorted(names)
    return found


def forbids(names: Sequence[str]) -> bool:
    """Return whether no licence of these allows to distribute a work that imports the component."""
    return not any(" OR " in name or not COPYLEFT.search(name) for name in names)


def main(arguments: Sequence[str]) -> int:
    """Run one of the commands; return the exit status."""
    match arguments:
        case ["build", repository, folder]:
            changed = build_twice(Path(repository), Path(folder))
            for name in changed:
                print(f"{name}: two builds of one commit differ", file=sys.stderr)
            return int(bool(changed))
        case ["licences", path]:
            licences = read_licences(json.loads(Path(path).read_text()))
            wrong = [name for name, names in licences.items() if forbids(names)]
            for name, names in licences.items():
                print(f"{name:45} {'; '.join(names) or 'none'}")
            for name in wrong:
                print(f"{name}: no licence that a release allows", file=sys.stderr)
            return int(bool(wrong))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
