# SPDX-License-Identifier: Apache-2.0
"""Owners of leases."""

import os
import subprocess
import sys

import pytest

from cyborg.conductor.common.work_lease import new_owner, process_owner


def test_owner_names_host_and_process() -> None:
    assert process_owner("compute-1").startswith(f"compute-1:{os.getpid()}:")
    assert new_owner("compute-1").startswith(process_owner("compute-1") + ":")


def test_owners_differ() -> None:
    assert len({new_owner("h") for _ in range(100)}) == 100


def test_owner_fits_the_column() -> None:
    assert len(new_owner("h" * 255)) <= 255


FORK = """
import os
from cyborg.conductor.common.work_lease import process_owner
print(process_owner("h"), flush=True)
if os.fork() == 0:
    print(process_owner("h"), flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.slow
def test_forked_process_has_owners_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=60, check=True
    )
    parent, child = (line.split(":") for line in done.stdout.splitlines())
    assert parent[0] == child[0] == "h"
    assert parent[1] != child[1]
    assert parent[2] != child[2]
