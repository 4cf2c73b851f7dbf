# SPDX-License-Identifier: Apache-2.0
"""Boot and delete servers over HTTP like Nova, with concurrent clients."""

import collections
import contextlib
import http.client
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import sqlalchemy as sa

from benchmarks.installations import HOST, PROJECT, Installation
from benchmarks.processes import run_threads
from cyborg.db import schema
from cyborg.tests.fixtures.databases.rows import GROUPS
from cyborg.tests.fixtures.machine.processes import wait_until

PROFILE = "bench-fpga"
PATH = "/v2/accelerator_requests"


class Client:
    """REST client with one persistent connection."""

    def __init__(self, endpoint: str, headers: Mapping[str, str]) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(endpoint).netloc, timeout=60)
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        self._headers |= headers

    def request(self, status: int, method: str, path: str, body: Any = None) -> Any:
        """Send a request and return the body. Raise RuntimeError for another status."""
        text = None if body is None else json.dumps(body)
        self._connection.request(method, path, text, self._headers)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != status:
            raise RuntimeError(f"{method} {path}: {answer.status} {content.decode()[:500]}")
        return json.loads(content) if content else None

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


@dataclass
class Limit:
    """End of a run: after a total number of cycles, or else after a number of seconds."""

    cycles: int | None
    seconds: float


def make_profile(env: Installation) -> None:
    """Create the device profile of all ARQs."""
    with contextlib.closing(Client(env.endpoint, env.admin)) as client:
        body = [{"name": PROFILE, "groups": [dict(group) for group in GROUPS]}]
        client.request(201, "POST", "/v2/device_profiles", body)


def boot_and_delete(client: Client, provider: str) -> None:
    """Boot one server with one accelerator and delete it."""
    instance = str(uuid4())
    (arq,) = client.request(201, "POST", PATH, {"device_profile_name": PROFILE})["arqs"]
    values = {"hostname": HOST, "device_rp_uuid": provider, "instance_uuid": instance}
    if PROJECT not in (arq["project_id"], None):
        raise RuntimeError(f"the ARQ is of project {arq['project_id']}")
    patch = [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]
    client.request(202, "PATCH", PATH, {arq["uuid"]: patch})
    # Nova asks whether all are resolved, and for the whole list.
    for query in (f"instance={instance}&bind_state=resolved", f"instance={instance}"):
        (bound,) = client.request(200, "GET", f"{PATH}?{query}")["arqs"]
        if (bound["state"], bound["attach_handle_type"]) != ("Bound", "TEST_PCI"):
            raise RuntimeError(f"not bound: {bound}")
    client.request(204, "DELETE", f"{PATH}?instance={instance}")


def drive(env: Installation, concurrency: int, limit: Limit) -> tuple[list[float], float]:
    """Run cycles with concurrent clients; return the seconds of each cycle and in total."""
    took: list[float] = []
    failed = threading.Event()
    remaining = collections.deque(range(limit.cycles)) if limit.cycles else None
    begin = time.perf_counter()

    def has_next() -> bool:
        if remaining is None:
            return time.perf_counter() - begin <= limit.seconds
        with contextlib.suppress(IndexError):
            remaining.pop()
            return True
        return False

    def work(number: int) -> None:
        with contextlib.closing(Client(env.endpoint, env.headers)) as client:
            provider = env.providers[number % len(env.providers)]
            try:
                while not failed.is_set() and has_next():
                    start = time.perf_counter()
                    boot_and_delete(client, provider)
                    took.append(time.perf_counter() - start)
            except BaseException:
                failed.set()
                raise

    run_threads(concurrency, work)
    return took, time.perf_counter() - begin


def wait_for_outbox(env: Installation) -> None:
    """Wait until all events are delivered to Nova."""
    query = sa.select(sa.func.count()).select_from(schema.outbox)

    def is_empty() -> bool:
        with env.engine.connect() as connection:
            return connection.execute(query).scalar_one() == 0

    wait_until("all events are delivered to Nova", is_empty)
