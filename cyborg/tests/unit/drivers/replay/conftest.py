# SPDX-License-Identifier: Apache-2.0
"""Where replayed hosts are unpacked."""

import os
import tempfile
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture(autouse=True)
def unpack_into_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Unpack replayed hosts into memory where possible.

    A host has some hundred folders and files. On a disk, creating and removing them takes most of
    the time of these tests.
    """
    tmp_path_factory.getbasetemp()  # where it is without this fixture
    if os.access(MEMORY, os.W_OK | os.X_OK):
        monkeypatch.setattr(tempfile, "tempdir", str(MEMORY))
