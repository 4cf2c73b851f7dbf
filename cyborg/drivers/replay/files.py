# SPDX-License-Identifier: Apache-2.0
"""Capture files, plain or compressed by gzip, and their unpacking into a folder."""

import contextlib
import gzip
import io
import os
import zlib
from pathlib import Path

from cyborg.core.capture import model
from cyborg.core.capture.model import Capture
from cyborg.core.errors import Invalid

_GZIP = b"\x1f\x8b"
SUFFIX = ".gz"
"""Files with this suffix are written with compression."""


def load_capture(path: Path) -> Capture:
    """Return the capture in a file. Raise Invalid with the reason, or OSError."""
    with path.open("rb") as file:
        data = file.read(model.MAX_TEXT + 1)
    if data.startswith(_GZIP):
        try:
            with gzip.open(io.BytesIO(data)) as stream:
                data = stream.read(model.MAX_TEXT + 1)
        except (OSError, EOFError, zlib.error) as exc:
            raise Invalid(f"{path}: {exc}", field="capture") from exc
    try:
        return model.parse(data.decode())
    except UnicodeDecodeError as exc:
        raise Invalid(f"{path}: it is no text in UTF-8", field="capture") from exc
    except Invalid as exc:
        raise Invalid(f"{path}: {exc.message}", field="capture") from exc


def save_capture(capture: Capture, path: Path) -> int:
    """Write a capture to a new file that only its owner can read; return its size in bytes.

    Raise Invalid if it is too large, and OSError, also if the file exists.
    """
    data = "".join(model.dump(capture)).encode()
    if len(data) > model.MAX_TEXT:
        raise Invalid(
            f"the capture has {len(data)} bytes, expected up to {model.MAX_TEXT}", field="capture"
        )
    if path.name.endswith(SUFFIX):
        data = gzip.compress(data, mtime=0)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
    return len(data)


def unpack(capture: Capture, root: Path) -> None:
    """Write the tree of a capture below a folder; links that exist stay. Raise OSError.

    A file whose content is unknown becomes an empty folder: its name exists, and reading it fails,
    so that no wrong content is read. Links are created last, so that nothing is written through a
    link.
    """
    for path, folder in capture.folders.items():
        here = root / path
        here.mkdir(parents=True, exist_ok=True)
        for name, content in folder.files.items():
            if content is None:
                (here / name).mkdir(exist_ok=True)
            else:
                (here / name).write_bytes(content)
    for path, folder in capture.folders.items():
        for name, target in folder.links.items():
            with contextlib.suppress(FileExistsError):
                (root / path / name).symlink_to(target)
    for top in ("sys/bus/pci/devices", "proc"):
        (root / top).mkdir(parents=True, exist_ok=True)
