# SPDX-License-Identifier: Apache-2.0
"""Check the rules that need only the files: sizes, licence lines, links, released migrations.

usage: python3 tools/_file_rules.py [--staged]

Print one line for each violation, with what to do, and exit with 1 if there is one. ``--staged``
checks the files of the next commit as git has them. Only the standard library is imported: the git
hook runs this before each commit.
"""

import hashlib
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
# Folders and files.
FOLDERS = (
    *(".ci", "console/build.mjs", "console/src", "cyborg", "debian/rules", "devstack", "setup.py"),
    *("doc/source/_ext", "doc/source/conf.py", "etc/containers/cloud", "tools"),
    "releasenotes/source/conf.py",
)
MAX_LINES = 500  # of a Python file, a script, or a source of the web console
MAX_MODULES = 20  # of a folder
MIGRATIONS = PurePosixPath("cyborg/db/migrations/versions")
# The migrations of releases, as sha256sum(1) prints them.
RELEASED = ROOT / "cyborg" / "db" / "migrations" / "released.txt"
LINK_MODE = "120000"  # of a symbolic link in git's index, see git-ls-files(1)
LICENCE = b"SPDX-License-Identifier: Apache-2.0"


def is_python(path: PurePosixPath) -> bool:
    """Return whether the path is that of a Python module."""
    return path.suffix == ".py"


def is_script(path: PurePosixPath) -> bool:
    """Return whether the path is that of a program or shell script without suffix, or of bash."""
    return path.suffix == ".sh" or (not path.suffix and path.parts[0] != "cyborg")


def is_console_source(path: PurePosixPath) -> bool:
    """Return whether the path is that of a source of the web console, or of its build."""
    return path.parts[0] == "console" and path.suffix in (".css", ".mjs", ".ts", ".tsx")


def check_text(path: PurePosixPath, text: bytes) -> list[str]:
    """Return the violations of one file."""
    violations = []
    # The last line may have no end.
    lines = text.count(b"\n") + (not text.endswith(b"\n") and text != b"")
    is_code = is_python(path) or is_script(path)
    if (is_code or is_console_source(path)) and lines > MAX_LINES:
        violations.append(
            f"{path}: {lines} lines, at most {MAX_LINES} are allowed:"
            " move one concept into a module of its own"
        )
    if is_code and LICENCE not in b"\n".join(text.split(b"\n")[:3]):
        violations.append(f"{path}: no licence line: add '# {LICENCE.decode()}' as its first line")
    return violations


def check_folders(paths: Iterable[PurePosixPath]) -> list[str]:
    """Return the folders with too many modules; a test folder may have any number of tests."""
    folders = Counter(
        path.parent
        for path in paths
        if is_python(path) and path.name != "__init__.py" and not path.name.startswith("test_")
    )
    return [
        f"{folder}: {number} modules, at most {MAX_MODULES} are allowed:"
        " divide the folder by capability"
        for folder, number in sorted(folders.items())
        if number > MAX_MODULES
    ]


def check_links(entries: Iterable[str]) -> list[str]:
    """Return the symbolic links among entries of ``git ls-files --stage``.

    A link of one machine, for example to its environment, replaces that path in every clone.
    """
    return [
        f"{path}: a symbolic link: run git rm --cached, and add the path to .gitignore"
        for facts, _, path in (entry.partition("\t") for entry in entries)
        if facts.startswith(LINK_MODE)
    ]


def check_migrations(
    files: Mapping[PurePosixPath, bytes], paths: Collection[PurePosixPath], released: str
) -> list[str]:
    """Return the released migrations that differ: databases of users have run them as they were.

    ``files`` are those to check, ``paths`` those that exist.
    """
    digests = {
        MIGRATIONS / name: digest
        for digest, _, name in (line.partition("  ") for line in released.splitlines())
    }
    return [
        f"{path}: a release has this migration: leave it as it is, and write a new revision"
        for path, digest in digests.items()
        if path not in paths
        or (path in files and hashlib.sha256(files[path]).hexdigest() != digest)
    ]


def read_tree() -> Mapping[PurePosixPath, bytes]:
    """Return the files of the work tree."""
    tops = [ROOT / name for name in FOLDERS]
    paths = [path for top in tops for path in (top, *top.rglob("*")) if path.is_file()]
    return {
        PurePosixPath(path.relative_to(ROOT).as_posix()): path.read_bytes()
        for path in sorted(paths)
        if "__pycache__" not in path.parts
    }


def read_staged() -> tuple[Mapping[PurePosixPath, bytes], list[PurePosixPath]]:
    """Return the changed files of the next commit, and the paths of all its files."""
    changed = _git("diff", "--cached", "--name-only", "--diff-filter=d", "-z", "--", *FOLDERS)
    files = {name: _git("show", f":{name}") for name in _names(changed)}
    every = _names(_git("ls-files", "-z", "--", *FOLDERS))
    return {PurePosixPath(name): text for name, text in files.items()}, [*map(PurePosixPath, every)]


def read_index() -> list[str]:
    """Return the entries of git's index.

    An unpacked archive has none, and git does not read that of a clone of another user.
    """
    if not shutil.which("git") or not (ROOT / ".git").exists():
        return []
    command = ["git", "ls-files", "--stage", "-z"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    return _names(done.stdout) if done.returncode == 0 else []


def _names(output: bytes) -> list[str]:
    return [name.decode(errors="surrogateescape") for name in output.split(b"\0") if name]


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout


def main(arguments: list[str]) -> int:
    """Print the violations; return the exit status."""
    if arguments == ["--staged"]:
        files, paths = read_staged()
    elif not arguments:
        files = read_tree()
        paths = list(files)
    else:
        sys.stderr.write(f"unexpected argument {arguments[0]}; the only option is --staged\n")
        return 2
    violations = [line for path, text in files.items() for line in check_text(path, text)]
    violations += check_folders(paths)
    if RELEASED.exists():
        violations += check_migrations(files, paths, RELEASED.read_text())
    violations += check_links(read_index())
    for line in violations:
        sys.stdout.write(f"{line}\n")
    return int(bool(violations))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
