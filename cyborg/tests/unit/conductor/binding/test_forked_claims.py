# SPDX-License-Identifier: Apache-2.0
"""Workers of a conductor are forks: they choose handles independently."""

import pytest

from cyborg.tests.fixtures.machine.processes import run_script

_ORDERS = """
import json, os
from cyborg.conductor.binding import claims

def shuffled_in_fork():
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        handles = list(range(100))
        claims._RANDOM.shuffle(handles)
        os.write(writer, json.dumps(handles).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    return json.loads(os.read(reader, 65536))

print(json.dumps([shuffled_in_fork() for _ in range(3)]))
"""


@pytest.mark.slow
def test_forked_workers_shuffle_handles_differently() -> None:
    orders = run_script(_ORDERS)
    assert all(sorted(order) == list(range(100)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
