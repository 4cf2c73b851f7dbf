# SPDX-License-Identifier: Apache-2.0
"""Check of the directory of the drivers' sockets: any user who can write to it can be a driver."""

import os
import stat
from pathlib import Path

from cyborg.core.errors import Misconfigured

MODES = (0o700, 0o750)
MAX_PATH = 107  # bytes of a unix socket's path: sun_path of unix(7) less its end
_MAX_SOCKET_NAME = 46  # a slash, a driver's name of 40 characters, and .sock


def owner_uid(folder: str) -> int:
    """Return the uid of the folder's owner; the owner and root may run drivers.

    Raise Misconfigured if any other user could enter or replace the folder.
    """
    if not os.path.isabs(folder) or os.path.normpath(folder) != folder:
        raise _misconfigured(folder, "an absolute path without . and ..")
    if len(os.fsencode(folder)) + _MAX_SOCKET_NAME > MAX_PATH:
        raise _misconfigured(
            folder, f"a path of at most {MAX_PATH - _MAX_SOCKET_NAME} bytes (limit of unix sockets)"
        )
    try:
        status = os.lstat(folder)
        if (real := os.path.realpath(folder, strict=True)) != folder:
            raise _misconfigured(folder, f"a path without symbolic links, such as {real}")
        if not stat.S_ISDIR(status.st_mode):
            raise _misconfigured(folder, "a directory")
        parents = [(parent, os.lstat(parent)) for parent in Path(folder).parents]
    except OSError as exc:
        raise _misconfigured(folder, f"an existing directory ({exc.strerror})") from exc
    if (mode := stat.S_IMODE(status.st_mode)) not in MODES:
        raise _misconfigured(folder, f"a directory of mode 0700 or 0750, not {mode:04o}")
    agent_uid = os.geteuid()
    if agent_uid not in (0, status.st_uid):
        raise _misconfigured(
            folder, f"a directory of the agent's user ({agent_uid}), not of {status.st_uid}"
        )
    for parent, parent_status in parents:
        writable = parent_status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if parent_status.st_uid not in (0, agent_uid, status.st_uid) or (
            writable and not parent_status.st_mode & stat.S_ISVTX
        ):
            raise _misconfigured(
                folder, f"a directory that other users cannot replace through {parent}"
            )
    return status.st_uid


def _misconfigured(folder: str, expected: str) -> Misconfigured:
    return Misconfigured(
        f"[agent] external_driver_dir: found {folder!r}; expected {expected}",
        option="agent.external_driver_dir",
    )
