# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys
from importlib import metadata

import pytest


def run(program: str) -> str:
    """Run a program in a new process; return its output."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    ).stdout


@pytest.mark.slow
def test_daemon_does_not_import_eventlet() -> None:
    # Of the API, test_process.py shows it.
    daemons = "import cyborg.cmd.agent, cyborg.cmd.conductor, sys"
    assert metadata.version("eventlet"), "required by oslo.service"
    assert run(f"{daemons}; print(sys.modules['eventlet'])") == "None\n"


@pytest.mark.slow
def test_imported_eventlet_is_kept() -> None:
    assert run("import eventlet, sys, cyborg.rpc; print(sys.modules['eventlet'] is eventlet)") == (
        "True\n"
    )
