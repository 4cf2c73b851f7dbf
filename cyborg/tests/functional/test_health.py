# SPDX-License-Identifier: Apache-2.0
"""A card becomes unhealthy in the whole service: cordoned, and uncordoned after recovery."""

from pathlib import Path

import pytest

from cyborg.tests.fixtures.machine.processes import run_script

# In a separate process, because a process can have only one embedded Placement.
SCRIPT = """
import json, pathlib, sys, time
import requests
from cyborg.tests.fixtures.machine.processes import wait_until
from cyborg.tests.fixtures.clouds.standalone import running

folder = pathlib.Path(sys.argv[1])
sick = folder / "sick"
quiet = 1.5

def ask(url):
    return requests.get(url, headers={"X-Auth-Token": "admin"}, timeout=60).json()

def reserved(stack):
    # By provider name.
    every = ask(f"{stack.placement_endpoint}/resource_providers")["resource_providers"]
    found = {}
    for provider in every:
        url = f"{stack.placement_endpoint}/resource_providers/{provider['uuid']}/inventories"
        for inventory in ask(url)["inventories"].values():
            found[provider["name"]] = (inventory["reserved"], inventory["total"])
    return found

def health(stack):
    return sorted(device["health"] for device in stack_devices(stack))

def stack_devices(stack):
    from cyborg.db.devices import read as devices
    with stack.reader.connect() as connection:
        return devices.find(connection)

told = {}
with running(
    folder, devices=2, handles=4,
    agent={"health_interval": 0.1, "health_recovery_time": quiet, "discovery_interval": 3600},
    fake={"sick": sick},
) as stack:
    told["before"] = reserved(stack)
    sick.write_text("0000:0c:00.0 smokes\\n")
    first = "compute-1_0000:0c:00.0"
    wait_until("it is closed", lambda: reserved(stack)[first] == (4, 4))
    told["sick"] = reserved(stack)
    told["health"] = health(stack)
    told["reason"] = [d["health_reason"] for d in stack_devices(stack) if d["health_reason"]]
    began = time.monotonic()  # before the recovery: a busy machine lengthens the time only
    sick.unlink()
    wait_until("it is open", lambda: reserved(stack)[first] == (0, 4))
    told["open_after"] = time.monotonic() - began
    told["well"] = health(stack)
print(json.dumps(told))
"""


@pytest.mark.matrix
def test_unhealthy_card_is_cordoned_until_recovery_window_ends(tmp_path: Path) -> None:
    results = run_script(SCRIPT, tmp_path)
    first, second = "compute-1_0000:0c:00.0", "compute-1_0000:0d:00.0"
    assert results["before"] == {first: [0, 4], second: [0, 4]}
    assert results["sick"] == {first: [4, 4], second: [0, 4]}
    assert results["health"] == ["ok", "unhealthy"]
    assert results["reason"] == ["smokes"]
    assert results["open_after"] >= 1.4, "not before it has been well for the quiet time"
    assert results["well"] == ["ok", "ok"]
