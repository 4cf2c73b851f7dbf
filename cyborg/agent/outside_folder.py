# SPDX-License-Identifier: Apache-2.0
"""The folder of the drivers' sockets: who can write there can be a driver, so it is checked."""

import os
import stat
from pathlib import Path

from cyborg.core.errors import Misconfigured

MODES = (0o700, 0o750)
MAX_PATH = 107  # bytes of a unix socket's path: sun_path of unix(7) less its end
_LONGEST_NAME = 46  # a slash, a driver's name of 40 characters, and .sock


def owner(folder: str) -> int:
    """Return the uid of a folder's owner, who may be a driver as root may.

    Raises Misconfigured for a folder that anyone else could enter or put another in the place of.
    """
    if not os.path.isabs(folder) or os.path.normpath(folder) != folder:
        raise _wrong(folder, "an absolute path without . and ..")
    if len(os.fsencode(folder)) + _LONGEST_NAME > MAX_PATH:
        raise _wrong(
            folder, f"a path of at most {MAX_PATH - _LONGEST_NAME} bytes, for sockets' sake"
        )
    try:
        its = os.lstat(folder)
        if (real := os.path.realpath(folder, strict=True)) != folder:
            raise _wrong(folder, f"a path without symbolic links, such as {real}")
        if not stat.S_ISDIR(its.st_mode):
            raise _wrong(folder, "a directory")
        above = [(parent, os.lstat(parent)) for parent in Path(folder).parents]
    except OSError as bad:
        raise _wrong(folder, f"a directory that is there ({bad.strerror})") from bad
    if (mode := stat.S_IMODE(its.st_mode)) not in MODES:
        raise _wrong(folder, f"a directory of mode 0700 or 0750, not {mode:04o}")
    me = os.geteuid()
    if me not in (0, its.st_uid):
        raise _wrong(folder, f"a directory of the agent's user ({me}), not of {its.st_uid}")
    for parent, facts in above:
        others = facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if facts.st_uid not in (0, me, its.st_uid) or (others and not facts.st_mode & stat.S_ISVTX):
            raise _wrong(folder, f"a directory that others cannot replace: {parent} lets them")
    return its.st_uid


def _wrong(folder: str, expected: str) -> Misconfigured:
    return Misconfigured(
        f"[agent] socket_dir: found {folder!r}; expected {expected}", option="agent.socket_dir"
    )
