# SPDX-License-Identifier: Apache-2.0
"""A double of NVIDIA Fabric Manager: a real ``libnvfm.so.1``, and ``fmpm`` on it.

The state of a Fabric Manager is a file, so that several processes see the same. Its lines are a key
and a value:

========================  =========================================================================
``table NAME``            the baseboard: h100, b200 or a100
``mode NUMBER``           ``FABRIC_MODE``: 1 for whole GPUs, 2 for virtual functions, 0 for neither
``phase NAME``            running; starting; waiting, for the list of active partitions; stopped
``now``, ``started``      the clock and the time of the last start, in seconds
``active ID [FUNCTION]``  an active partition, with its virtual functions
``cut ID``                a partition that was active and missing in that list
``refused ID OTHER``      an activation that was refused: the active OTHER has a GPU of it
``gpu MODULE BUS``        the bus of a GPU, such as ``0000:41``, on which its functions must be
``failed MODULE``         a failed GPU, whose partitions an A100 does not list
``layout 1``              the library knows only the first layout of the connection
``internal 1``            the address is that of the internal socket
``fail NAME CODE TIMES``  the function returns this code, so many times; 0: always
``hang NAME SECONDS``     the function sleeps before it does its work; fmConnect until its timeout
``crash NAME``            the function ends its process
========================  =========================================================================

It is not known from a card which code is returned while the list is awaited; see ``libnvfm.c``.
"""

import fcntl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

_FOLDER = Path(__file__).parent
_FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror")


@dataclass(frozen=True, slots=True)
class Programs:
    """The built library, and the program ``fmpm`` that uses it."""

    library: Path
    fmpm: Path


def build(folder: Path) -> Programs:
    """Build the doubles with ``cc`` and return their paths. Raise CalledProcessError."""
    programs, source = Programs(folder / "libnvfm.so.1", folder / "fmpm"), _FOLDER / "libnvfm.c"
    for command in (
        ["-shared", "-fPIC", "-o", programs.library, source],
        ["-o", programs.fmpm, source, _FOLDER / "fmpm.c"],
    ):
        subprocess.run(["cc", *_FLAGS, *map(str, command)], check=True)  # noqa: S603, S607
    return programs


class FabricManagerDouble:
    """The Fabric Manager of a host; ``path`` is its state, and the address of its unix socket."""

    def __init__(self, path: Path, table: str = "h100", mode: int = 1) -> None:
        """Start a Fabric Manager without active partitions, after a boot of the host."""
        self.path = path
        path.write_text(f"table {table}\nmode {mode}\nphase running\nnow 0\nstarted 0\n")

    @property
    def address(self) -> str:
        """Return the address for a client."""
        return str(self.path)

    @property
    def active(self) -> dict[int, tuple[str, ...]]:
        """Return the virtual functions of the active partitions by id."""
        texts = (value.split() for value in self.values("active"))
        return {int(text[0]): tuple(text[1:]) for text in texts}

    def values(self, key: str) -> list[str]:
        """Return the values of a key."""
        with self._opened() as file:
            lines = (line.rstrip("\n").partition(" ") for line in file)
            return [value for name, _, value in lines if name == key]

    def set(self, key: str, *values: object) -> None:
        """Replace the lines of a key by lines with these values; without values remove them."""
        with self._opened() as file:
            kept = [line for line in file if line.partition(" ")[0] != key]
            file.seek(0)
            file.truncate()
            file.writelines([*kept, *(f"{key} {value}\n" for value in values)])

    def stop(self) -> None:
        """Stop Fabric Manager; the servers keep their links."""
        self.set("phase", "stopped")

    def start(self, *, restart: bool = False) -> None:
        """Start Fabric Manager; without ``restart`` all partitions become inactive."""
        if not restart:
            self.set("active")
        self.set("started", *self.values("now"))
        self.set("phase", "waiting" if restart else "running")

    def advance(self, seconds: int) -> None:
        """Advance the clock."""
        self.set("now", int(self.values("now")[0]) + seconds)

    @contextmanager
    def _opened(self) -> Iterator[TextIO]:
        with self.path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file
