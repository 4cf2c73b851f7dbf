# SPDX-License-Identifier: Apache-2.0
import threading
import time
from pathlib import Path

import requests

from cyborg.fixtures.stack import HOST, running


def test_in_process_it_leaves_no_thread_and_can_be_run_again(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    for _ in range(2):
        with running(tmp_path, devices=3, handles=2) as stack:
            answer = requests.get(f"{stack.endpoint}/v2/devices", timeout=10).json()
            assert {d["hostname"] for d in answer["devices"]} == {HOST}
            assert len(answer["devices"]) == 3
            token = {"X-Auth-Token": "admin"}
            shown = requests.get(
                f"{stack.placement_endpoint}/resource_providers", headers=token, timeout=10
            ).json()["resource_providers"]
            assert len(shown) == 4
            begin = time.monotonic()
        assert time.monotonic() - begin < 2
        left = [t for t in threading.enumerate() if t not in before]
        assert left == []
