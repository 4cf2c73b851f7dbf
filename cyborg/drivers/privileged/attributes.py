# SPDX-License-Identifier: Apache-2.0
"""Writes of sysfs attributes, for the privileged functions.

The caller must have validated the path. sysfs expects the whole value in the first write
(``Documentation/filesystems/sysfs.rst`` of Linux).
"""

import os
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Write an attribute with one system call; do not create a file. Raise OSError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
