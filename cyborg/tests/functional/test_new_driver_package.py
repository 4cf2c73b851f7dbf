# SPDX-License-Identifier: Apache-2.0
"""A driver package installed while the agent runs can be enabled over the API at once."""

import sys
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborg.tests.fixtures.clouds.standalone import running
from cyborg.tests.fixtures.machine.processes import wait_until

MODULE = """
from cyborg.core.drivers.registry import Support
from cyborg.drivers.fake import FakeDriver

class Fresh(FakeDriver):
    name = "fresh"
    SUPPORT_LEVEL = Support.SUPPORTED
"""


def test_new_driver_package_is_installed_without_a_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))
    with running(tmp_path) as stack:
        headers = {"OpenStack-API-Version": "accelerator latest"}
        url = f"{stack.endpoint}/v2/drivers"
        body: dict[str, Any] = {"driver": "fresh", "config": {"address": "0001:00:00.0"}}
        answer = requests.post(url, json=body, headers=headers, timeout=60)
        assert answer.status_code == 404
        (site / "cyborg_test_fresh.py").write_text(MODULE)
        package = site / "fresh-1.0.dist-info"
        package.mkdir()
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: fresh\nVersion: 1.0\n")
        points = "[cyborg.accelerator.driver]\nfresh = cyborg_test_fresh:Fresh\n"
        (package / "entry_points.txt").write_text(points)
        answer = requests.post(url, json=body, headers=headers, timeout=60)
        assert answer.status_code == 202, answer.text
        job = f"{stack.endpoint}/v2/jobs/{answer.json()['uuid']}"

        def is_ready() -> bool:
            state = requests.get(job, headers=headers, timeout=60).json()["state"]
            assert state != "failed"
            return bool(state == "done")

        wait_until("the job is done", is_ready)
    sys.modules.pop("cyborg_test_fresh", None)
