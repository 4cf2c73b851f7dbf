# SPDX-License-Identifier: Apache-2.0
"""tools/card-check on the captures of the repository, and on this machine."""

import re
import subprocess
import sys
from pathlib import Path

from cyborg.drivers.replay.recorder import load_capture
from cyborg.testing import captures
from cyborg.tests.fixtures.clouds.web_servers import ROOT

SCRIPT = ROOT / "tools/_card_check.py"
LAST = re.compile(r"card-check: ([0-9]+) devices, ([0-9]+) offered, ([0-9]+) problems, [0-9]+ s")


def check_cards(*arguments: object) -> tuple[int, list[str], tuple[int, ...]]:
    """Return the exit status of the script, its lines, and the numbers of its last line."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", SCRIPT, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
        check=False,
    )
    lines = done.stdout.splitlines()
    match = LAST.fullmatch(lines[-1])
    assert match, done.stdout
    return done.returncode, lines, tuple(map(int, match.groups()))


def test_report_of_captures() -> None:
    paths = [captures.FOLDER / f"{name}.jsonl" for name in captures.capture_names()]
    code, lines, (found, offered, problems) = check_cards(*paths)
    assert (code, problems) == (0, 0)
    assert [line for line in lines if line.startswith("== ")][1:] == [
        title for path in paths for title in (f"== {path}", "== Functions that the host uses")
    ]
    assert found >= offered > 0
    assert "    offered: 1 x CUSTOM_NVME_SSD_1_92TB" in lines


def test_report_of_a_file_that_is_no_capture(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}\n")
    code, lines, (found, offered, problems) = check_cards(tmp_path / "file")
    assert (code, found, offered, problems) == (1, 0, 0, 1)
    assert any(line.startswith("PROBLEM Invalid: ") for line in lines)


def test_report_of_this_machine(tmp_path: Path) -> None:
    """Here the replay of the capture must agree; nobody knows which devices there are."""
    output = tmp_path / "capture.jsonl.gz"
    code, lines, (_, _, problems) = check_cards("--output", output)
    found = [line for line in lines if line.startswith("PROBLEM ")]
    # A container, or another user than root, may not read all processes.
    unreadable = "PROBLEM the processes of the host cannot be read: "
    assert [line for line in found if not line.startswith(unreadable)] == []
    assert (len(found), min(problems, 1)) == (problems, code)
    assert load_capture(output).scrubbed
