# SPDX-License-Identifier: Apache-2.0
"""Atomic replacement of the agent's state files, and quarantine of damaged files."""

import os
from pathlib import Path

from cyborg.core.log import get_logger

LOG = get_logger(__name__)


def atomic_write(path: Path, body: bytes) -> None:
    """Replace a file atomically: after a crash it has the complete old or new content.

    Raise OSError.
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
    folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder_fd)
    finally:
        os.close(folder_fd)


def quarantine(path: Path, exc: Exception, description: str, consequence: str) -> None:
    """Rename a damaged file; log the reason and the consequence."""
    aside = path.with_name(f"{path.name}.broken")
    LOG.warning(
        "%s %s cannot be used (%s: %s) and is moved to %s; %s",
        description,
        path,
        type(exc).__name__,
        exc,
        aside,
        consequence,
    )
    try:
        path.replace(aside)
    except OSError as rename_error:
        error = str(rename_error)
    else:
        return
    LOG.warning("Cannot rename the damaged file %s, it stays until the next write: %s", path, error)
