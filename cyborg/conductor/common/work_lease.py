# SPDX-License-Identifier: Apache-2.0
"""Owners of leases: the column ``owner`` of jobs, audits, messages and providers.

An owner is ``<host>:<process id>:<random>:<number>``, so that a row names the process that works on
it. The random part differs for each process, since hosts reuse process ids.
"""

import itertools
import os
from uuid import uuid4

MAX_HOST = 200  # characters of a host; the column has 255


class _Process:
    """The identity of this process, and the number of its next lease owner."""

    def __init__(self) -> None:
        self.id = f"{os.getpid()}:{uuid4().hex[:12]}"
        self.numbers = itertools.count(1)


_process = _Process()


def process_owner(host: str) -> str:
    """Return the common prefix of all lease owners of this process."""
    return f"{host[:MAX_HOST]}:{_process.id}"


def new_owner(host: str) -> str:
    """Return a unique lease owner: no other call in any process returns the same. Thread-safe."""
    return f"{process_owner(host)}:{next(_process.numbers)}"


def _replace_after_fork() -> None:
    global _process  # noqa: PLW0603  a worker must not use the owners of its parent
    _process = _Process()


os.register_at_fork(after_in_child=_replace_after_fork)
