# SPDX-License-Identifier: Apache-2.0
"""The functions of a backend, from the driver's capability tree to service-list."""

from pathlib import Path

import pytest

from cyborg.tests.fixtures.hosts import external_drivers
from cyborg.tests.fixtures.machine.processes import run_script

# In a separate process, because a process can have only one embedded Placement.
SCRIPT = """
import contextlib, io, json, pathlib, sys, uuid
import requests
from cyborg.cli import app
from cyborg.tests.fixtures.machine.processes import Daemon, wait_until
from cyborg.tests.fixtures.clouds.standalone import running

folder, place, program = map(pathlib.Path, sys.argv[1:])
told = {}

def ask(method, path, **more):
    its = {"X-Auth-Token": "admin", "OpenStack-API-Version": "accelerator latest"}
    answer = requests.request(method, f"{stack.endpoint}/v2{path}", headers=its, timeout=60, **more)
    assert answer.ok, answer.text
    return answer.json() if answer.content else None

def offered(query="kind=backend"):
    rows = ask("GET", f"/services?{query}")["services"]
    return {
        b["name"]: {f["function"]: [f["total"], f["used"], f["free"]] for f in b["functions"]}
        for row in rows for b in row["backends"]
    }

def cyborg(*words):
    way = ["--os-auth-type", "none", "--os-endpoint", stack.endpoint]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert app.main([*way, *words]) == 0
    return out.getvalue()

def bound(provider):
    groups = [{"resources:CUSTOM_CRYPTO": "1", "trait:CUSTOM_CRYPTO_IPSEC_AES": "required"}]
    ask("POST", "/device_profiles", json=[{"name": "crypto", "groups": groups}])
    (arq,) = ask("POST", "/accelerator_requests", json={"device_profile_name": "crypto"})["arqs"]
    wishes = {"hostname": "compute-1", "device_rp_uuid": provider,
              "instance_uuid": str(uuid.uuid4())}
    patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in wishes.items()]
    ask("PATCH", "/accelerator_requests", json={arq["uuid"]: patch})
    one = f"/accelerator_requests/{arq['uuid']}"
    wait_until("it is bound", lambda: ask("GET", one)["state"] == "Bound")
    return arq["uuid"]

driver = Daemon("driver", [program, place, "crypto"], folder, {})
driver.start()
agent = {"external_driver_dir": place, "external_drivers": "crypto"}
with running(folder, devices=2, handles=4, agent=agent) as stack:
    try:
        wait_until("the card is there", lambda: offered().get("crypto"))
        told["idle"] = offered()
        told["daemons"] = offered("")
        told["none"] = offered("kind=daemon")
        card = ask("GET", "/accelerators?driver=crypto")["accelerators"][0]
        device = f"/devices/{card['device_uuid']}"
        arq = bound(card["rp_uuid"])
        told["bound"] = offered("kind=backend&function=crypto.ipsec")
        ask("POST", f"{device}/disable")
        told["closed"] = offered("function=crypto.ipsec.aes")
        told["table"] = cyborg("service-list", "--kind", "backend", "--function", "crypto.ipsec")
        rows = cyborg("service-list", "--function", "crypto.ipsec.aes.3des", "--long", "-f", "json")
        told["json"] = json.loads(rows)
        ask("POST", f"{device}/enable")
        ask("DELETE", f"/accelerator_requests?arqs={arq}")
        wait_until("it is clean", lambda: offered()["crypto"]["crypto"][1] == 0)
        told["clean"] = offered()
    finally:
        driver.stop()
print(json.dumps(told))
"""
LEAF = "crypto.ipsec.aes.3des"


@pytest.mark.matrix
@pytest.mark.requires("compiler")
def test_driver_services_reach_the_hardware_table(tmp_path: Path) -> None:
    program = external_drivers.build_c_driver(tmp_path)
    with external_drivers.socket_folder() as place:
        results = run_script(SCRIPT, tmp_path, place, program)
    crypto = {
        "crypto": [4, 0, 4],
        "crypto.ipsec": [4, 0, 4],
        "crypto.ipsec.aes": [1, 0, 1],
        LEAF: [1, 0, 1],
    }
    idle = {"crypto": crypto, "fake": {"fpga": [8, 0, 8]}}
    assert results["idle"] == results["daemons"] == results["clean"] == idle
    assert results["none"] == {}
    assert results["bound"] == {
        "crypto": {"crypto.ipsec": [4, 1, 3], "crypto.ipsec.aes": [1, 1, 0], LEAF: [1, 1, 0]}
    }
    assert results["closed"] == {"crypto": {"crypto.ipsec.aes": [1, 1, 0], LEAF: [1, 1, 0]}}
    assert "crypto.ipsec 1/4" in results["table"]
    assert "fpga" not in results["table"]
    (row,) = results["json"]
    assert (row["Service"], row["Kind"]) == ("cyborg-agent", "daemon")
    (backend,) = row["Backends"]
    assert backend["functions"] == [{"function": LEAF, "total": 1, "used": 1, "free": 0}]
