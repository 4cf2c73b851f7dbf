# SPDX-License-Identifier: Apache-2.0
"""The driver in C beside the whole service: hello, Placement, bound, released, killed."""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cyborg.agent.outside import Outside, OutsideDriver
from cyborg.agent.outside_folder import owner
from cyborg.fixtures import outside

NOBODY = 65534

# In a process of its own, for that has one embedded Placement at a time.
SCRIPT = """
import json, pathlib, sys, uuid
import requests
from cyborg.fixtures.outside import ADDRESS
from cyborg.fixtures.processes import Daemon, until
from cyborg.fixtures.stack import running

folder, place, program = map(pathlib.Path, sys.argv[1:])
agent = {"socket_dir": place, "socket_drivers": "crypto", "health_interval": 0.2}
told = {}

def ask(method, path, **more):
    its = {"X-Auth-Token": "admin", "OpenStack-API-Version": "accelerator latest"}
    return requests.request(method, f"{stack.endpoint}/v2{path}", headers=its, timeout=10, **more)

def daemon(name):
    driver = Daemon(name, [program, place, "crypto"], folder, {})
    driver.start()
    return driver

def crypto():
    found = stack.placement.get("/resource_providers?resources=CUSTOM_CRYPTO:1").json()
    return found.get("resource_providers")  # none while Placement does not know the class

def backend():
    from cyborg.db.read import services
    with stack.reader.connect() as connection:
        for row in services.find(connection):
            for one in row["backends"]:
                if one["name"] == "crypto":
                    return one["status"], one["error"]

driver = daemon("before")  # says hello in vain until the agent is there
with running(folder, agent=agent) as stack:
    try:
        (provider,) = until("the card is in Placement", crypto)
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
        until("it is bound", lambda: ask("GET", one).json()["state"] == "Bound")
        told["bound"] = ask("GET", one).json()["attach_handle_info"]
        until("the driver prepared it", lambda: "prepared" in driver.tail())
        assert ask("DELETE", f"/accelerator_requests?arqs={arq['uuid']}").status_code == 204
        until("the driver released it", lambda: "released" in driver.tail())
        told["work"] = [line for line in driver.tail().splitlines() if "ed " in line]

        driver.kill()
        told["dead"] = until("its death shows", lambda: backend()[0] == "ERROR" and backend())
        told["kept"] = [d["health"] for d in ask("GET", "/devices?type=CRYPTO").json()["devices"]]
        told["others"] = len(ask("GET", "/devices?type=FPGA").json()["devices"])
        driver = daemon("after")
        until("it is back", lambda: backend()[0] == "READY")
        told["back"] = len(crypto())
    finally:
        told["exit"] = driver.stop()
told["left"] = sorted(path.name for path in place.iterdir())
print(json.dumps(told))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is here")
def test_the_driver_in_c(tmp_path: Path) -> None:
    program = outside.build(tmp_path)
    with outside.folder() as place:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, tmp_path, place, program],
            capture_output=True,
            text=True,
            check=False,
            timeout=200,
        )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["provider"] == "compute-1_0000:5a:00.0"
    assert set(told["traits"]) >= {"CUSTOM_CRYPTO_IPSEC_AES", "OWNER_CYBORG"}
    assert told["total"]["CUSTOM_CRYPTO"]["total"] == 4
    assert told["bound"]["bus"] == "5a"
    prepared, released = told["work"]
    assert prepared.removeprefix("prepared ") == released.removeprefix("released ")
    status, error = told["dead"]
    assert status == "ERROR"
    assert "the driver cannot be asked" in error
    assert told["kept"] == ["ok"], "its devices stay as they were seen last"
    assert told["others"] == 1
    assert (told["back"], told["exit"]) == (1, 0)
    assert told["left"] == [], "neither leaves a socket"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is here")
def test_a_driver_of_another_user() -> None:
    """The folder's owner is heard and called by an agent that is root."""
    with outside.folder() as place:
        program = outside.build(place)
        os.chown(place, NOBODY, NOBODY)
        driver = OutsideDriver("crypto", str(place), NOBODY, 20, 20)
        ours = Outside(str(place), {"crypto": driver}, owner(str(place)), 60)
        heard = threading.Event()
        ours.start(lambda _: heard.set())
        with subprocess.Popen([program, place, "crypto"], user=NOBODY, group=NOBODY) as process:
            try:
                assert heard.wait(20)
                (card,) = driver.discover()
            finally:
                process.terminate()
                ours.stop()
        assert (process.returncode, card.address) == (0, outside.ADDRESS)


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler is here")
def test_the_driver_in_c_says_how_it_is_used(tmp_path: Path) -> None:
    done = subprocess.run(
        [outside.build(tmp_path)], capture_output=True, text=True, check=False, timeout=20
    )
    assert (done.returncode, done.stderr) == (2, "usage: driver FOLDER NAME\n")
