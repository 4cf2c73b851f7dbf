# SPDX-License-Identifier: Apache-2.0
"""Memory of a worker of the API while it answers the largest lists, and the time of an answer.

``measure`` starts a process with the application, which no conductor serves and no socket, so that
its memory is that of the API alone.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import webob

from benchmarks import report
from cyborg.api.app import make_app
from cyborg.db.engine import Reader
from cyborg.tests.fixtures.machine.options import make_conf
from cyborg.threads.heap import exclude_startup_objects

PATHS = (
    *("accelerators", "accelerator_requests", "deployables", "devices", "attributes", "jobs"),
    *("hardware", "services", "services?kind=backend", "drivers", "drivers/gpu"),
    *("attachments", "device_contexts", "discoveries", "hosts", "outbox", "summary"),
    *("device_profiles/p-0/explanation", "device_profiles/p-0/capacity"),
)
TIMES = 3


def measure(url: str) -> list[report.Results]:
    """Return the peaks of the resident memory in MB (10^6 bytes), at the start and by path.

    The time of a path is that of its fastest answer, in milliseconds.
    """
    folders = os.pathsep.join(sys.path)
    answer = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", url],
        stdout=subprocess.PIPE,
        check=True,
        timeout=900,
        env={**os.environ, "PYTHONPATH": folders},
    )
    found: list[report.Results] = json.loads(answer.stdout)
    return found


def _requests(url: str) -> Iterator[report.Results]:
    conf = make_conf()
    conf.set_override("auth_strategy", "noauth")
    conf.set_override("connection", url, group="database")
    conductor: Any = None  # no list calls it
    app = make_app(conf, conductor, Reader(conf))
    exclude_startup_objects()  # as each daemon
    yield {"path": "none", "rss_mb": _reset_peak(), "body_mb": 0.0, "wall_ms": 0.0}
    for path in PATHS:
        walls = []
        for _ in range(TIMES):
            request = webob.Request.blank(f"/v2/{path}", base_url="http://127.0.0.1")
            request.remote_addr = "127.0.0.1"
            request.headers["OpenStack-API-Version"] = "accelerator latest"
            begin = time.perf_counter()
            response = request.get_response(app)
            walls.append((time.perf_counter() - begin) * 1000)
            if response.status_int != 200:
                raise RuntimeError(f"{path}: {response.status}: {response.text[:300]}")
            size = len(response.body) / 1e6
        shown = {"path": f"/v2/{path}", "body_mb": size, "wall_ms": min(walls)}
        yield {**shown, "rss_mb": _reset_peak()}


def _reset_peak() -> float:
    """Return the peak of the resident memory since the last call."""
    text = Path("/proc/self/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+)", text)
    if found is None:
        raise RuntimeError("/proc/self/status has no VmHWM")
    # Linux: 5 resets the peak to the present size.
    Path("/proc/self/clear_refs").write_text("5")
    return int(found[1]) * 1024 / 1e6


if __name__ == "__main__":
    json.dump(list(_requests(sys.argv[1])), sys.stdout)
