# SPDX-License-Identifier: Apache-2.0
"""The external driver in C with the whole service: hello, publish, bind, release, kill."""

import os
import subprocess
import threading
from pathlib import Path

import pytest

from cyborg.agent.external.driver import ExternalDriver, ExternalDriverHost
from cyborg.agent.external.server import owner_uid
from cyborg.tests.fixtures.hosts import external_drivers
from cyborg.tests.fixtures.machine.processes import run_script

NOBODY = 65534

# In a separate process, because a process can have only one embedded Placement.
SCRIPT = """
import json, pathlib, sys, uuid
import requests
from cyborg.tests.fixtures.hosts.external_drivers import ADDRESS
from cyborg.tests.fixtures.machine.processes import Daemon, wait_until
from cyborg.tests.fixtures.clouds.standalone import running

folder, place, program = map(pathlib.Path, sys.argv[1:])
agent = {"external_driver_dir": place, "external_drivers": "crypto", "health_interval": 0.2}
told = {}

def ask(method, path, **more):
    its = {"X-Auth-Token": "admin", "OpenStack-API-Version": "accelerator latest"}
    return requests.request(method, f"{stack.endpoint}/v2{path}", headers=its, timeout=60, **more)

def daemon(name):
    driver = Daemon(name, [program, place, "crypto"], folder, {})
    driver.start()
    return driver

def crypto():
    found = stack.placement.get("/resource_providers?resources=CUSTOM_CRYPTO:1").json()
    return found.get("resource_providers")  # none while Placement does not have the class

def backend():
    from cyborg.db.services import read as services
    with stack.reader.connect() as connection:
        for row in services.find(connection):
            for one in row["backends"]:
                if one["name"] == "crypto":
                    return one["status"], one["error"]

driver = daemon("before")  # its hello fails until the agent runs
with running(folder, agent=agent) as stack:
    try:
        (provider,) = wait_until("the card is in Placement", crypto)
        told["provider"] = provider["name"]
        url = f"/resource_providers/{provider['uuid']}"
        told["traits"] = stack.placement.get(f"{url}/traits").json()["traits"]
        told["total"] = stack.placement.get(f"{url}/inventories").json()["inventories"]
        groups = [{"resources:CUSTOM_CRYPTO": "1", "trait:CUSTOM_CRYPTO_IPSEC_AES": "required"}]
        made = ask("POST", "/device_profiles", json=[{"name": "crypto", "groups": groups}])
        assert made.status_code == 201, made.text
        wish = {"device_profile_name": "crypto"}
        (arq,) = ask("POST", "/accelerator_requests", json=wish).json()["arqs"]
        one = f"/accelerator_requests/{arq['uuid']}"
        wishes = {"hostname": "compute-1", "device_rp_uuid": provider["uuid"],
                  "instance_uuid": str(uuid.uuid4())}
        patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in wishes.items()]
        bound = ask("PATCH", "/accelerator_requests", json={arq["uuid"]: patch})
        assert bound.status_code == 202, bound.text
        wait_until("it is bound", lambda: ask("GET", one).json()["state"] == "Bound")
        told["bound"] = ask("GET", one).json()["attach_handle_info"]
        wait_until("the driver prepared it", lambda: "prepared" in driver.tail())
        assert ask("DELETE", f"/accelerator_requests?arqs={arq['uuid']}").status_code == 204
        wait_until("the driver released it", lambda: "released" in driver.tail())
        told["work"] = [line for line in driver.tail().splitlines() if "ed " in line]

        driver.kill()
        told["dead"] = wait_until("its death shows", lambda: backend()[0] == "ERROR" and backend())
        told["kept"] = [d["health"] for d in ask("GET", "/devices?type=CRYPTO").json()["devices"]]
        told["others"] = len(ask("GET", "/devices?type=FPGA").json()["devices"])
        driver = daemon("after")
        wait_until("it is back", lambda: backend()[0] == "READY")
        told["back"] = len(crypto())
    finally:
        told["exit"] = driver.stop()
told["left"] = sorted(path.name for path in place.iterdir())
print(json.dumps(told))
"""


@pytest.mark.requires("compiler")
def test_c_driver_works_with_the_whole_service(tmp_path: Path) -> None:
    program = external_drivers.build_c_driver(tmp_path)
    with external_drivers.socket_folder() as place:
        results = run_script(SCRIPT, tmp_path, place, program)
    assert results["provider"] == "compute-1_0000:5a:00.0"
    assert set(results["traits"]) >= {"CUSTOM_CRYPTO_IPSEC_AES", "OWNER_CYBORG"}
    assert results["total"]["CUSTOM_CRYPTO"]["total"] == 4
    assert results["bound"]["bus"] == "5a"
    prepared, released = results["work"]
    assert prepared.removeprefix("prepared ") == released.removeprefix("released ")
    status, error = results["dead"]
    assert status == "ERROR"
    assert "cannot call" in error
    assert results["kept"] == ["ok"], "its devices stay as they were seen last"
    assert results["others"] == 1
    assert (results["back"], results["exit"]) == (1, 0)
    assert results["left"] == [], "neither leaves a socket"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.requires("compiler")
def test_c_driver_of_another_user_is_accepted_by_root_agent() -> None:
    """An agent that runs as root accepts and calls a driver of the folder's owner."""
    with external_drivers.socket_folder() as place:
        program = external_drivers.build_c_driver(place)
        os.chown(place, NOBODY, NOBODY)
        driver = ExternalDriver("crypto", str(place), NOBODY, 20, 20)
        host = ExternalDriverHost(str(place), {"crypto": driver}, owner_uid(str(place)), 60)
        notified = threading.Event()
        host.start(lambda _: notified.set())
        with subprocess.Popen([program, place, "crypto"], user=NOBODY, group=NOBODY) as process:
            try:
                assert notified.wait(120)
                (card,) = driver.discover()
                # Root may lack the capability to change owners.
                assert (place / "agent.sock").stat().st_uid == 0
            finally:
                process.terminate()
                host.stop()
        assert (process.returncode, card.address) == (0, external_drivers.ADDRESS)


@pytest.mark.requires("compiler")
def test_c_driver_without_arguments_prints_usage(tmp_path: Path) -> None:
    process = subprocess.run(
        [external_drivers.build_c_driver(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (process.returncode, process.stderr) == (2, "usage: driver FOLDER NAME\n")
