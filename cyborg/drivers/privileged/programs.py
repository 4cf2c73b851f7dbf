# SPDX-License-Identifier: Apache-2.0
"""Programs of vendors that privileged functions run, with a timeout and without a shell."""

import os
import re
import signal
import stat
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from cyborg.core.errors import DriverFailed

MAX_OUTPUT = 300  # characters of a program's error in a message
_KILL_TIMEOUT = 10.0  # seconds until a killed process has ended; none in the kernel does
_PATH = re.compile(r"(/[^/\x00-\x1f\x7f]+)+")


def is_path_of(path: object, name: str) -> bool:
    """Return whether a value is the absolute path of a program with a name."""
    return (
        isinstance(path, str)
        and _PATH.fullmatch(path) is not None
        and os.path.basename(path) == name
    )


def resolve(path: str, name: str) -> Path:
    """Return the path of a program without links.

    Raise DriverFailed if the program has another name, or others than root can change it.
    """
    program = Path(os.path.realpath(path))
    if program.name != name:
        raise DriverFailed(f"{path} cannot be run: it is a link to {program}, expected {name}")
    for part in (program, *program.parents):
        try:
            status = part.stat()
        except OSError as exc:
            raise DriverFailed(f"{path} cannot be run: {part}: {exc.strerror}") from exc
        # In a sticky directory, such as /tmp, others cannot replace what is of root.
        sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
        if status.st_uid != 0 or (status.st_mode & 0o022 and not sticky):
            raise DriverFailed(f"{path} cannot be run: others than root can change {part}")
    return program


def run(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> None:
    """Run a program, and wait for its end.

    ``environment`` has all variables except ``LANG``. Raise DriverFailed if the program cannot be
    started or fails, with the end of its output. Kill it, with all processes that it started, and
    raise DriverFailed if it does not end within ``timeout`` seconds.
    """
    name = os.path.basename(command[0])
    try:
        # A session of its own: some tools are scripts that start another process.
        process = subprocess.Popen(  # noqa: S603  (a fixed program, parsed arguments)
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"LANG": "C.UTF-8", **environment},
            cwd="/",
            start_new_session=True,
        )
    except OSError as exc:
        raise DriverFailed(f"{name} cannot be started: {exc.strerror}") from exc
    output = _wait(process, name, timeout).decode(errors="replace").strip()
    if process.returncode != 0:
        raise DriverFailed(f"{name} failed with {process.returncode}: {output[-MAX_OUTPUT:]}")


def _wait(process: "subprocess.Popen[bytes]", name: str, timeout: float) -> bytes:
    """Return the output of a process.

    At the timeout kill the process group and raise DriverFailed.
    """
    try:
        output, _ = process.communicate(timeout=timeout)
        return output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    killed = f"{name} did not end within {timeout:g} s"
    try:
        process.communicate(timeout=_KILL_TIMEOUT)  # returns when all processes have ended
    except subprocess.TimeoutExpired:
        raise DriverFailed(f"{killed} and cannot be killed: restart the host") from None
    raise DriverFailed(f"{killed} and was killed")
