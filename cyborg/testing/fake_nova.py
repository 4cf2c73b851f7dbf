# SPDX-License-Identifier: Apache-2.0
"""Test double of Nova over HTTP; it records external events and shows servers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

from keystoneauth1 import adapter, noauth, session

from cyborg.testing.http_double import DoubleHandler, serve

# Id of the user of the service's requests.
OWN_USER = "cyborg"

# Project of a user who is no administrator.
OWN_PROJECT = "own"


class _UserAuth(noauth.NoAuth):
    def get_user_id(self, session: session.Session, **kwargs: Any) -> str:
        return OWN_USER


class FakeNova:
    """Double of Nova whose responses the test configures.

    The requests are those of the user OWN_USER.
    """

    def __init__(self) -> None:
        # The HTTP status of each response. With None, the connection is closed without a response,
        # as when Nova is killed.
        self.status: int | None = 200
        self.body: Any = None  # of each response, None for the ordinary one
        # The code of an event in the response by its tag, 200 by default.
        self.codes: dict[str, int] = {}
        # A request with events of one of these servers fails with 400.
        self.refused_servers: set[str] = set()
        # Responses wait for it.
        self.hang: threading.Event | None = None
        self.calls: list[dict[str, Any]] = []  # the received requests with events
        self.url = ""
        self.servers: dict[str, dict[str, Any]] = {}  # by uuid
        self.page_size = 1000  # the maximum length of a list
        # If False, the user sees only the servers of OWN_PROJECT.
        self.is_admin = True
        self.requested_paths: list[str] = []  # of all GET requests
        # Numbers, from 0 on, of GET requests that get no response.
        self.lost_requests: set[int] = set()
        # The actions of each server, the newest first, as Nova lists them.
        self.actions: dict[str, list[dict[str, Any]]] = {}
        # The servers of all requests for a reboot, with its type. A reboot ends at once, with
        # ``task`` as the task state of the server and ``result`` as the result of its event.
        self.reboots: list[tuple[str, str]] = []
        self.reboot_status = 202
        self.task: str | None = None
        self.result: str | None = "Success"
        # Servers that were deleted lately: the list with ``changes-since`` has them.
        self.deleted: set[str] = set()

    def add_server(
        self, uuid: str, host: str | None, status: str = "ACTIVE", **fields: Any
    ) -> None:
        """Add a server on a host, or without a host; ``fields`` replace or add fields of it."""
        self.actions[uuid] = []
        self.add_action(uuid, "create")
        self.servers[uuid] = {
            "id": uuid,
            "status": status,
            "OS-EXT-SRV-ATTR:host": host,
            "OS-EXT-SRV-ATTR:hypervisor_hostname": host,
            "OS-EXT-STS:task_state": None,
            **fields,
        }

    def add_action(
        self, uuid: str, name: str, user: str = "user-1", result: str | None = "Success"
    ) -> None:
        """Record an action of a server, as Nova does before it acts, and its result."""
        # A number of its own for each action: Cyborg finds an action by its request id.
        number = sum(map(len, self.actions.values())) + 1
        action = {
            "action": name,
            "request_id": f"req-{number}",
            "user_id": user,
            "result": result,
        }
        self.actions[uuid].insert(0, action)

    def act(self, path: str, body: Any) -> tuple[int | None, Any]:
        """Return the status and body of the response to a request for a reboot."""
        uuid = path.split("/")[-2]
        if self.status != 200:
            return self.status, self.body
        if uuid not in self.servers:
            return 404, {"itemNotFound": {"code": 404, "message": "no such instance"}}
        if self.reboot_status != 202:
            return self.reboot_status, {"conflictingRequest": {"message": "not now"}}
        self.reboots.append((uuid, body["reboot"]["type"]))
        self.add_action(uuid, "reboot", user=OWN_USER, result=self.result)
        self.servers[uuid]["OS-EXT-STS:task_state"] = self.task
        return 202, b""

    def show(self, path: str) -> tuple[int | None, Any]:
        """Return the status and body of the response to a GET request."""
        self.requested_paths.append(path)
        if len(self.requested_paths) - 1 in self.lost_requests:
            return None, None
        if self.status != 200 or self.body is not None:
            return self.status, self.body
        url = urlsplit(path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        *_, collection, last = url.path.split("/")
        # servers/UUID/os-instance-actions/REQUEST: one action.
        if collection == "os-instance-actions":
            return self._show_action(url.path.split("/")[-3], last)
        # servers, or servers/detail: a list.
        if last in ("servers", "detail"):
            if "all_tenants" in query and not self.is_admin:
                return 403, {"forbidden": {"code": 403, "message": "not allowed"}}
            uuids = self._list(query, parse_qs(url.query).get("status", []))
            if last == "detail":
                more = {"servers_links": [{"rel": "next"}]} if len(uuids) == self.page_size else {}
                return 200, {"servers": [self.servers[uuid] for uuid in uuids], **more}
            return 200, {"servers": [{"id": uuid, "name": "s"} for uuid in uuids]}
        # servers/UUID/os-instance-actions: all actions of a server.
        if last == "os-instance-actions" and self.is_admin and collection in self.servers:
            return 200, {"instanceActions": self.actions[collection]}
        if collection == "servers" and last in self.servers and self._can_see(last):
            return 200, {"server": self.servers[last]}
        return 404, {"itemNotFound": {"code": 404, "message": "no such instance"}}

    def _show_action(self, uuid: str, request: str) -> tuple[int, Any]:
        """Return the status and body of the response to a request for one action of a server."""
        for number, action in enumerate(self.actions.get(uuid, [])):
            if action["request_id"] == request and self.is_admin and uuid in self.servers:
                # While the server has a task, its newest action has not ended.
                busy = number == 0 and self.servers[uuid]["OS-EXT-STS:task_state"] is not None
                event = {
                    "event": f"compute_{action['action']}_instance",
                    "finish_time": None if busy else "2026-03-01T12:00:00.000000",
                    "result": None if busy else action["result"],
                }
                # Without a result nova-compute has not begun the action.
                events = [] if action["result"] is None else [event]
                return 200, {"instanceAction": {**action, "events": events}}
        return 404, {"itemNotFound": {"code": 404, "message": "no such action"}}

    def _can_see(self, uuid: str) -> bool:
        return self.is_admin or self.servers[uuid].get("tenant_id") == OWN_PROJECT

    def _list(self, query: dict[str, str], statuses: list[str]) -> list[str]:
        """Return a page of the uuids of the servers that a query selects; no status selects all."""
        assert query.get("all_tenants", "1") == "1"
        if query.get("deleted") == "true":
            assert query["changes-since"].endswith("Z")
            # One page only: the page after a marker is empty.
            return sorted(self.deleted)[: self.page_size if "marker" not in query else 0]
        host, project = query.get("host"), query.get("project_id")
        if "REBUILD" in statuses and len(statuses) > 1:
            # For Nova it is ACTIVE with a task, and several statuses do not select by tasks.
            statuses = [*statuses, "ACTIVE"]
        uuids = [
            uuid
            for uuid, server in self.servers.items()
            if self._can_see(uuid)
            and host in (None, server["OS-EXT-SRV-ATTR:host"])
            and project in (None, server.get("tenant_id"))
            and server["status"] in (statuses or [server["status"]])
        ]
        begin = sorted(uuids).index(query["marker"]) + 1 if "marker" in query else 0
        return sorted(uuids)[begin : begin + self.page_size]

    @property
    def tags(self) -> list[str]:
        """Return the tags of all received events in order."""
        return [event["tag"] for call in self.calls for event in call["events"]]

    def answer(self, path: str, headers: dict[str, str], body: Any) -> tuple[int | None, Any]:
        """Record a POST request with events; return the status and body of the response."""
        self.calls.append({"path": path, "headers": headers, "events": body["events"]})
        if self.hang is not None:
            self.hang.wait(10)
        if {event["server_uuid"] for event in body["events"]} & self.refused_servers:
            return 400, {"badRequest": {"code": 400, "message": "malformed"}}
        if self.status != 200 or self.body is not None:
            return self.status, self.body
        items = [event | {"code": self.codes.get(event["tag"], 200)} for event in body["events"]]
        return (207 if any(item["code"] != 200 for item in items) else 200), {"events": items}

    def adapter(self) -> adapter.Adapter:
        """Return a keystoneauth adapter for this double."""
        return adapter.Adapter(
            session.Session(auth=_UserAuth()),
            service_type="compute",
            endpoint_override=self.url,
        )


@contextmanager
def serve_nova(nova: FakeNova) -> Iterator[FakeNova]:
    """Serve the double on a free loopback port until the end of the block."""

    class Handler(DoubleHandler):
        def do_POST(self) -> None:
            body = self.read_json()
            if self.path.endswith("/action"):
                self._send(*nova.act(self.path, body))
            else:
                self._send(*nova.answer(self.path, dict(self.headers), body))

        def do_GET(self) -> None:
            self._send(*nova.show(self.path))

        def _send(self, status: int | None, answer: Any) -> None:
            if status is not None:
                # The client closed the connection, as in tests of timeouts.
                with suppress(BrokenPipeError):
                    self.respond(status, answer)

    with serve(Handler) as url:
        nova.url = f"{url}/v2.1"
        try:
            yield nova
        finally:
            # Otherwise a thread would wait for its timeout after the test.
            if nova.hang is not None:
                nova.hang.set()
