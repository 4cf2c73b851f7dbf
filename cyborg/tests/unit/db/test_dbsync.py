# SPDX-License-Identifier: Apache-2.0
"""The command, as an operator runs it."""

import subprocess
import sys
from pathlib import Path

import pytest

from cyborg.db import migrate

COMMAND = [sys.executable, "-c", "import sys; from cyborg.cmd.dbsync import main; sys.exit(main())"]


def _run(conf: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, "--config-file", str(conf), *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    path = tmp_path / "cyborg.conf"
    path.write_text(f"[database]\nconnection = sqlite:///{tmp_path}/cyborg.db\n")
    return path


def test_from_nothing_to_the_newest_schema(conf: Path) -> None:
    head = migrate.head()
    before = _run(conf, "version")
    assert (before.returncode, before.stdout) == (0, f"none (head is {head})\n")
    done = _run(conf, "upgrade")
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == f"The database is at {head}."
    after = _run(conf, "version")
    assert after.stdout == f"{head} (head)\n"


def test_a_configuration_directory_will_do(conf: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--config-dir", str(conf.parent), "stamp", "head"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "marked" in done.stdout


def test_two_at_once_do_the_work_once(database_url: str, tmp_path: Path) -> None:
    path = tmp_path / "cyborg.conf"
    path.write_text(f"[database]\nconnection = {database_url}\n")
    both = [
        subprocess.Popen(
            [*COMMAND, "--config-file", str(path), "upgrade"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    ends = [(*one.communicate(timeout=60), one.returncode) for one in both]
    assert [code for _, _, code in ends] == [0, 0], ends
    assert sum("Done:" in out for out, _, _ in ends) == 1, ends


@pytest.mark.parametrize(
    ("section", "words", "code", "said"),
    [
        ("", ["upgrade"], 1, "[database] connection is not set"),
        ("connection = nonsense\n", ["version"], 1, "[database] connection is not usable"),
        (
            "connection = mysql+pymysql://root@127.0.0.1:1/x\n",
            ["--wait", "0", "upgrade"],
            1,
            "the database does not answer",
        ),
        ("connection = sqlite:////nowhere/x.db\n", ["--wait", "0", "upgrade"], 1, "does not exist"),
        ("connection = sqlite:///{here}/x.db\n", ["upgrade", "nope"], 1, "'nope' is no revision"),
        ("connection = sqlite:///{here}/x.db\n", ["stamp", "nope"], 1, "'nope' is no revision"),
        ("", ["--wait", "soon", "upgrade"], 1, "--wait"),
        ("", [], 2, "usage"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(
    tmp_path: Path, section: str, words: list[str], code: int, said: str
) -> None:
    path = tmp_path / "cyborg.conf"
    path.write_text("[database]\n" + section.format(here=tmp_path))
    done = _run(path, *words)
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    if code == 1:
        assert len(done.stderr.splitlines()) == 1
