# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

PROGRAM = """
import gc
from cyborg.threads.heap import THRESHOLD, exclude_startup_objects
cycle = []
cycle.append(cycle)
del cycle
before = gc.get_freeze_count()
exclude_startup_objects()
assert gc.get_freeze_count() > before + 1000
assert gc.get_threshold()[0] == THRESHOLD
assert gc.collect() == 0
later = []
later.append(later)
del later
assert gc.collect() == 1
"""


def test_only_startup_objects_are_excluded() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
