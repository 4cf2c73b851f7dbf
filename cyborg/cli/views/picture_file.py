# SPDX-License-Identifier: Apache-2.0
"""Files that are complete or unchanged."""

import contextlib
import os
from pathlib import Path
from uuid import uuid4

from cyborg.cli.common.errors import CommandError


def write_picture(path: Path, content: bytes) -> None:
    """Replace a regular file, or create it, in one step. Raise CommandError.

    Anything else of that name, such as a folder or a device, stays as it is.
    """
    if path.exists() and not path.is_file():
        raise CommandError(f"{path} is not a regular file: choose another name")
    # A symbolic link stays a link to the new content.
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name[:200]}.{uuid4().hex}")
    try:
        # With the permissions of a new file of this user, which those of tempfile are not.
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as exc:
        raise CommandError(f"cannot write {path}: {exc.strerror or exc}") from exc
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
