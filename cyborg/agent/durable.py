# SPDX-License-Identifier: Apache-2.0
"""Files that the agent's next life reads: whole whenever it ends, and out of the way if damaged."""

import os
from pathlib import Path

from oslo_log import log

LOG = log.getLogger(__name__)


def write(path: Path, body: bytes) -> None:
    """Replace a file: whenever this is cut off, there is the old one or the new one.

    Raises OSError.
    """
    folder, new = path.parent, path.with_name(f"{path.name}.new")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        left = memoryview(body)
        while left:
            left = left[os.write(file, left) :]
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(new, path)
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def put_aside(path: Path, bad: Exception, what: str, then: str) -> None:
    """Move a file that cannot be used out of the way; ``then`` says what follows from it."""
    aside = path.with_name(f"{path.name}.broken")
    LOG.warning(
        "%s %s cannot be used (%s: %s) and is moved to %s; %s",
        what,
        path,
        type(bad).__name__,
        bad,
        aside,
        then,
    )
    try:
        path.replace(aside)
    except OSError as worse:
        LOG.warning("It cannot be moved: %s", worse)
