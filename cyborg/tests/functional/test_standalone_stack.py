# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

import pytest

# In a separate process: a process can have only one embedded Placement, and the stack that other
# tests share may run in this one.
SCRIPT = """
import contextlib, json, pathlib, sys, threading
import requests
from cyborg.tests.fixtures.clouds.standalone import running
from cyborg.tests.fixtures.machine.processes import ends_within

def ask(url):
    return requests.get(url, headers={"X-Auth-Token": "admin"}, timeout=60).json()

told = []
for _ in range(2):
    with contextlib.ExitStack() as until_end:
        stack = until_end.enter_context(running(pathlib.Path(sys.argv[1]), devices=3, handles=2))
        devices = ask(f"{stack.endpoint}/v2/devices")["devices"]
        providers = ask(f"{stack.placement_endpoint}/resource_providers")["resource_providers"]
        with ends_within(2):
            until_end.close()
    told.append(
        {
            "devices": sorted(d["uuid"] for d in devices),
            "providers": len(providers),
            "threads": [t.name for t in threading.enumerate()],
        }
    )
print(json.dumps(told))
"""


@pytest.mark.matrix
def test_standalone_stack_leaves_no_thread_and_restarts(tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", SCRIPT, tmp_path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "ResourceWarning" not in process.stderr
    first, second = json.loads(process.stdout.splitlines()[-1])
    assert len(first["devices"]) == 3
    assert second["devices"] == first["devices"]
    for run in (first, second):
        assert run["providers"] == 4
        assert run["threads"] == ["MainThread"]
