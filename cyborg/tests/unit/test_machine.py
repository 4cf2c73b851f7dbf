# SPDX-License-Identifier: Apache-2.0
"""What ``tools/_machine.py`` finds out about a machine for ``tools/test``."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import cyborg

SCRIPT = Path(cyborg.__file__).parents[1] / "tools" / "_machine.py"
MACHINE = runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {}, 8000),
        # Version 2: the limit of a level above counts too.
        ("0::/a/b\n", {"a/memory.max": "1024", "a/b/memory.max": "max"}, 1024),
        # Version 1, beside other controllers and an empty hierarchy of version 2.
        (
            "9:cpu:/a\n4:memory:/a\n0::/\n",
            {"memory/a/memory.limit_in_bytes": "2048", "cpu/a/memory.limit_in_bytes": "1"},
            2048,
        ),
        # A container that sees its own group as the top, with the path of the machine.
        ("4:memory:/docker/1\n", {"memory/memory.limit_in_bytes": "512"}, 512),
        ("4:memory:/a\n", {"memory/a/memory.limit_in_bytes": str(sys.maxsize >> 20)}, 8000),
    ],
)
def test_available_memory_is_the_smallest_limit(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int
) -> None:
    for name, text in {
        "proc/meminfo": f"MemTotal: 9000000 kB\nMemAvailable: {8000 << 10} kB\n",
        "proc/self/cgroup": groups,
        **{
            f"sys/fs/cgroup/{path}": f"{int(size) << 20 if size != 'max' else size}\n"
            for path, size in limits.items()
        },
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert MACHINE["available_memory"](tmp_path) == expected


def test_available_memory_of_an_unknown_kernel_has_no_limit(tmp_path: Path) -> None:
    assert MACHINE["available_memory"](tmp_path) == sys.maxsize >> 20


@pytest.mark.parametrize(
    ("tier", "available", "expected"),
    [("all", 8000, 4), ("fast", 8000, 2), ("all", 2200, 3), ("fast", 100, 1)],
)
def test_count_workers_is_limited_by_cores_and_memory(
    tier: str, available: int, expected: int
) -> None:
    assert MACHINE["count_workers"](tier, 700, 2, available) == expected


def test_workers_leave_memory_to_the_temporary_files(capsys: pytest.CaptureFixture[str]) -> None:
    for words, expected in (
        (["fast", "1", "0"], len(os.sched_getaffinity(0))),
        (["all", "1", "9999999"], 1),
    ):
        assert MACHINE["main"](["workers", *words]) == 0
        assert capsys.readouterr().out == f"{expected}\n"


@pytest.mark.slow
def test_room_needs_the_size_the_memory_and_programs_that_run(tmp_path: Path) -> None:
    has_room = MACHINE["has_room"]
    assert has_room(tmp_path, 0, 0)
    assert not has_room(tmp_path, 1 << 20, sys.maxsize)
    assert not has_room(tmp_path, 1, 2047)
    assert not has_room(tmp_path / "absent", 0, 0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_processes_are_those_of_the_run_without_the_parents() -> None:
    run = "run of test_machine"
    words = ["-c", "import sys; print('started', flush=True); sys.stdin.read()"]
    environment = {"CYBORG_TEST_RUN": run}
    with subprocess.Popen(
        [sys.executable, *words],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        found = subprocess.run(
            [sys.executable, SCRIPT, "processes", run],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        process.communicate()
    (line,) = found.stdout.splitlines()
    assert line.startswith(f"{process.pid} {sys.executable} -c import sys; ")


@pytest.mark.slow
def test_processes_are_listed_below_a_parent_whose_name_is_no_text() -> None:
    # As a name of which the kernel keeps the first bytes.
    script = r"""printf '\303' >/proc/$$/comm; "$0" "$1" processes none; exit $?"""
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, SCRIPT], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
