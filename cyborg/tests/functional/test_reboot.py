# SPDX-License-Identifier: Apache-2.0
"""A reboot of a host in the whole service: what it loses is restored, or shown."""

import uuid
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborg.agent.service import AgentService
from cyborg.core import naming
from cyborg.standalone import stack as standalone_stack
from cyborg.standalone.stack import StandaloneStack
from cyborg.tests.fixtures.clouds import standalone
from cyborg.tests.fixtures.clouds.standalone import HOST, running
from cyborg.tests.fixtures.machine.processes import wait_until

BOUND, DIVIDED, PROGRAMMED = "0000:0c:00.0", "0000:0d:00.0", "0000:0e:00.0"
HEADERS = {"OpenStack-API-Version": "accelerator 2.5", "X-Service-Token": "any"}
IMAGE = str(uuid.uuid4())


class Env:
    """A host with three cards that can be booted again."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.boot_id = folder / "boot_id"
        agent = partial(AgentService, boot_id=self.boot_id)
        monkeypatch.setattr(standalone_stack, "AgentService", agent)
        self.stack: StandaloneStack

    def boot(self, **fake: object) -> Any:
        """Return a context in which the service runs after a boot of its host."""
        self.boot_id.write_text(f"{uuid.uuid4()}\n")
        divided = self.folder / "divided"
        divided.unlink(missing_ok=True)
        options = {"divided": divided, "program": "ok", "releasing": "ok", **fake}
        return running(self.folder, devices=3, handles=4, fake=options)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Return the body of a successful answer."""
        url = f"{self.stack.endpoint}/v2/{path}"
        answer = requests.request(method, url, headers=HEADERS, json=body, timeout=60)
        assert answer.ok, answer.text
        return answer.json() if answer.content else None

    def device(self, address: str) -> dict[str, Any]:
        (device,) = self.call("GET", f"devices?address={address}")["devices"]
        return dict(device)

    def image(self) -> str | None:
        provider = naming.provider_uuid(HOST, PROGRAMMED)
        found = self.call("GET", "deployables")["deployables"]
        (deployable,) = (row for row in found if row["rp_uuid"] == provider)
        return deployable["bitstream_id"]  # type: ignore[no-any-return]

    def deployable(self) -> str:
        provider = naming.provider_uuid(HOST, PROGRAMMED)
        found = self.call("GET", "deployables")["deployables"]
        return str(next(row["uuid"] for row in found if row["rp_uuid"] == provider))

    def bind(self) -> str:
        """Bind an ARQ to the first card and return its uuid."""
        profile = {"name": "reboot", "groups": [{"resources:FPGA": "1"}]}
        self.call("POST", "device_profiles", [profile])
        created = self.call("POST", "accelerator_requests", {"device_profile_name": "reboot"})
        arq = str(created["arqs"][0]["uuid"])
        values = {
            "hostname": HOST,
            "device_rp_uuid": naming.provider_uuid(HOST, BOUND),
            "instance_uuid": str(uuid.uuid4()),
        }
        patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]
        self.call("PATCH", "accelerator_requests", {arq: patch})
        wait_until("the ARQ is bound", lambda: self.arq_state(arq) == "Bound")
        return arq

    def arq_state(self, arq: str) -> str:
        return str(self.call("GET", f"accelerator_requests/{arq}")["state"])


@pytest.fixture
def env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Env:
    return Env(tmp_path, monkeypatch)


@pytest.mark.matrix
def test_reboot_restores_layouts_and_images_and_shows_what_fails(
    env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    with env.boot(prepare="ok") as env.stack:
        arq = env.bind()
        divided = env.device(DIVIDED)
        env.call("PUT", f"devices/{divided['uuid']}/layout", {"layout": "2"})
        wait_until("the layout is applied", lambda: env.device(DIVIDED)["layout"] == "2")
        value = [{"image_uuid": IMAGE}]
        program = [{"path": "/program", "op": "replace", "value": value}]
        env.call("PATCH", f"deployables/{env.deployable()}/program", program)
        wait_until("the image is loaded", lambda: env.image() == IMAGE)
    # The first card cannot be offered: its bound handle cannot be prepared again.
    monkeypatch.setattr(standalone, "_offered", lambda _: 3)
    with env.boot(prepare="fail") as env.stack:
        wait_until(
            "the failed restore is shown",
            lambda: env.device(BOUND)["state"] == "restore_failed",
        )
        device = env.device(BOUND)
        assert len(device["job_errors"]) == 1
        assert "configured to fail: prepare" in device["job_errors"][0]
        assert env.arq_state(arq) == "Bound"
        wait_until("the layout is applied again", lambda: env.device(DIVIDED)["layout"] == "2")
        assert env.device(DIVIDED)["desired_layout"] == "2"
        wait_until("the image is loaded again", lambda: env.image() == IMAGE)
        wait_until(
            "the neighbours are ready",
            lambda: [env.device(card)["state"] for card in (DIVIDED, PROGRAMMED)] == ["ready"] * 2,
        )
        env.call("DELETE", f"accelerator_requests/{arq}")
        wait_until("the card is ready again", lambda: env.device(BOUND)["state"] == "ready")
        assert env.device(BOUND)["job_errors"] == []
