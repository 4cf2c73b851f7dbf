# SPDX-License-Identifier: Apache-2.0
"""Client of Nova: send external events for ARQs, and query servers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any
from urllib.parse import quote

from oslo_config import cfg

from cyborg.clients.service_client import ServiceClient, credentials_error, describe, load_adapter
from cyborg.core.attachments.server import PROFILE_KEY, Action, Event, Server
from cyborg.core.errors import Invalid, Misconfigured, NotFound, Unavailable, WrongState
from cyborg.core.hosts import Instance

# The first microversion with the event accelerator-request-bound.
MICROVERSION = "2.82"

BOUND = "accelerator-request-bound"
ACCEPTED = 200
NOT_FOUND = 404  # the instance does not exist
NO_HOST_YET = 422  # the instance has no host, which is normal during its build

# No repetition helps: Nova has the event, the instance is gone, or Nova reads the ARQs itself
# when the instance gets its host.
_FINAL_CODES = frozenset({ACCEPTED, NOT_FOUND, NO_HOST_YET})

_PATH = "/os-server-external-events"
_PAGE = 1000  # servers per response, the maximum of Nova by default
_PAGES = 20  # maximum number of pages of one list
# Statuses of servers whose ARQs Nova may be about to bind.
_BUILDING = ("BUILD", "REBUILD")
_OFFLOADED = "SHELVED_OFFLOADED"
# Statuses of the queries for these servers.
#
# REBUILD is a task. Nova does not select by tasks if one of the statuses has any task, so that
# REBUILD with the others would select the active servers too.
_BUILDING_QUERIES = (("REBUILD",), ("BUILD", _OFFLOADED))


class Nova(ServiceClient):
    """Client of Nova with the calls that a conductor needs."""

    SERVICE = "Nova"

    def send(self, events: Sequence[Mapping[str, Any]]) -> list[str | None]:
        """Send events; return, for each event, its error, or None if no retry is needed.

        Raise Invalid if Nova rejects the whole request as wrong, Unavailable if it fails or cannot
        be reached, TimedOut if it does not answer in time.
        """
        answer = self._call("POST", _PATH, json={"events": [dict(event) for event in events]})
        # 207 if Nova has rejected some of the events.
        if answer.status_code in (200, 207):
            return _event_errors(answer, events)
        # Nova answers 404 for the whole request if it knows none of the instances.
        if answer.status_code == NOT_FOUND and _says_no_instance(answer):
            return [None] * len(events)
        raise _refusal(answer, "events")

    def servers_on_host(self, host: str) -> frozenset[str]:
        """Return the uuids of the servers on a host, of all projects.

        ``host`` is Nova's name of the host. Requires permission to list all servers. Raise
        Unavailable, TimedOut, Invalid.
        """
        return self._list_servers(f"host={quote(host, safe='')}", f"on host {host}")

    def deleted_servers(self, since: datetime) -> frozenset[str]:
        """Return the uuids of the servers that were deleted after ``since``, of all projects.

        ``since`` is naive UTC. Requires permission to list all servers. Raise Unavailable,
        TimedOut, Invalid.
        """
        # "changes-since" and "deleted" of Nova's API reference, "List Servers".
        text = f"{since.isoformat(timespec='seconds')}Z"
        return self._list_servers(
            f"deleted=true&changes-since={quote(text, safe='')}", f"deleted since {text}"
        )

    def _list_servers(self, query: str, description: str) -> frozenset[str]:
        """Return the uuids of the servers that a query of all projects finds, page by page.

        Raise Unavailable if there are more than _PAGES pages; ``description`` is for this error.
        """
        listed: set[str] = set()
        base = f"/servers?all_tenants=1&{query}&limit={_PAGE}"
        path = base
        for _ in range(_PAGES):
            uuids = _server_uuids(self._read(path))
            new = set(uuids) - listed
            listed |= new
            # A short page is not the end: an operator may have lowered Nova's page limit.
            if not new:
                return frozenset(listed)
            path = f"{base}&marker={quote(uuids[-1], safe='')}"
        raise Unavailable(f"Nova lists more than {len(listed)} servers {description}, the maximum")

    def is_building(self, project: str) -> bool:
        """Return whether a server of a project is being built, unshelved or rebuilt.

        Requires permission to list all servers. Raise Unavailable, TimedOut, Invalid.
        """
        return any(self._is_building(project, statuses) for statuses in _BUILDING_QUERIES)

    def _is_building(self, project: str, statuses: Sequence[str]) -> bool:
        """Return whether a server with one of these statuses is being built, unshelved or rebuilt.

        True also if Nova lists more than one page of them: not all are read.
        """
        filters = "".join(f"&status={status}" for status in statuses)
        query = f"all_tenants=1&project_id={quote(project, safe='')}{filters}&limit={_PAGE}"
        body = self._read(f"/servers/detail?{query}")
        with _expecting("list of servers"):
            servers = [(row["status"], row["OS-EXT-STS:task_state"]) for row in body["servers"]]
        # With servers_links Nova has further pages, which may have such a server.
        # A server that is being unshelved has the status of a shelved one, and a task.
        return "servers_links" in body or any(
            status in _BUILDING or (status == _OFFLOADED and task is not None)
            for status, task in servers
        )

    def get_server(self, uuid: str) -> Instance | None:
        """Return a server, None if it does not exist. Raise Unavailable, TimedOut, Invalid."""
        body = self._read(f"/servers/{quote(uuid, safe='')}", allow_missing=True)
        return None if body is None else _instance(uuid, body)

    def get_attachable(self, uuid: str) -> Server | None:
        """Return a server with its flavor, None if it does not exist.

        Raise Unavailable, TimedOut, Invalid.
        """
        body = self._read(f"/servers/{quote(uuid, safe='')}", allow_missing=True)
        return None if body is None else _server(uuid, body)

    def list_actions(self, uuid: str) -> Sequence[Action]:
        """Return the actions of a server, the newest first; empty if the server does not exist.

        Raise Unavailable, TimedOut, Invalid.
        """
        path = f"/servers/{quote(uuid, safe='')}/os-instance-actions"
        body = self._read(path, allow_missing=True)
        return () if body is None else _actions(body)

    def list_events(self, uuid: str, request: str) -> Sequence[Event]:
        """Return the events of the action that a request caused; empty if Nova shows none.

        Raise Unavailable, TimedOut, Invalid.
        """
        path = f"/servers/{quote(uuid, safe='')}/os-instance-actions/{quote(request, safe='')}"
        body = self._read(path, allow_missing=True)
        return () if body is None else _events(body)

    def hard_reboot(self, uuid: str) -> None:
        """Request a hard reboot of a server.

        Raise NotFound, WrongState if Nova cannot reboot a server in this state, Invalid,
        Unavailable, TimedOut.
        """
        # Not a soft reboot: that starts the guest from its old definition, without the new device.
        answer = self._call(
            "POST", f"/servers/{quote(uuid, safe='')}/action", json={"reboot": {"type": "HARD"}}
        )
        if answer.status_code == NOT_FOUND and _says_no_instance(answer):
            raise NotFound(f"no server {uuid}", instance=uuid)
        if answer.status_code == 409:
            raise WrongState(
                f"Nova refused to reboot server {uuid}: {answer.text[:300]}", instance=uuid
            )
        if answer.status_code != 202:
            raise _refusal(answer, "server")

    def own_user(self) -> str | None:
        """Return the id of the user of these credentials, None without keystone.

        Raise Unavailable.
        """
        user = self._ask_keystone(self._adapter.get_user_id)
        return None if user is None else str(user)

    def lists_all_projects(self) -> bool:
        """Return whether these credentials can list the servers of every project.

        Without this permission Nova answers 404 for an existing server of another project. Raise
        Unavailable, TimedOut, Invalid.
        """
        answer = self._call("GET", "/servers?all_tenants=1&limit=1")
        if answer.status_code == 403:
            return False
        if answer.status_code != 200:
            raise _refusal(answer, "server")
        return True

    def _read(self, path: str, *, allow_missing: bool = False) -> Any:
        """Return the parsed body of the response to a GET.

        If ``allow_missing`` is True and there is no such server, return None.
        """
        answer = self._call("GET", path)
        if allow_missing and answer.status_code == NOT_FOUND and _says_no_instance(answer):
            return None
        if answer.status_code != 200:
            raise _refusal(answer, "server")
        try:
            return answer.json()
        except ValueError as exc:
            raise Unavailable(
                f"unexpected response from Nova: not JSON: {answer.text[:100]!r}"
            ) from exc

    def _call(self, verb: str, path: str, **options: Any) -> Any:
        answer = self._request(verb, path, microversion=MICROVERSION, **options)
        if answer.status_code == 401:
            raise credentials_error(
                "Nova", self._credentials, f"{verb} {path}: {answer.text[:300]}"
            )
        return answer


def make(conf: cfg.ConfigOpts) -> Nova:
    """Create the client from section [nova]. Raise Misconfigured if the section is unusable."""
    adapter = load_adapter(conf, "nova")
    if conf.nova.send_events and adapter.auth is None and not conf.nova.endpoint_override:
        raise Misconfigured(
            "[nova] auth_type is not set: expected the name of an auth plugin and its options, or "
            "send_events = false in an installation without Nova",
            option="nova.auth_type",
        )
    return Nova(adapter, conf.nova.request_timeout, describe(conf, "nova"))


@contextmanager
def _expecting(content: str) -> Iterator[None]:
    """Raise Unavailable if a response of Nova lacks what the block reads from it."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise Unavailable(f"unexpected response from Nova: no {content}: {exc}") from exc


def _event_errors(answer: Any, events: Sequence[Mapping[str, Any]]) -> list[str | None]:
    """Return, for each event, its error, or None if no retry is needed.

    Nova answers for each event, so one that is not in the response is sent again.
    """
    if answer.status_code == 200:
        return [None] * len(events)
    with _expecting("list of events (207)"):
        codes = {
            (item.get("name"), item.get("server_uuid"), item.get("tag")): int(item["code"])
            for item in answer.json()["events"]
        }
    keys = [(event.get("name"), event.get("server_uuid"), event.get("tag")) for event in events]
    return [
        None if code in _FINAL_CODES else f"Nova answered {code or 'nothing'} for this event"
        for code in map(codes.get, keys)
    ]


def _refusal(answer: Any, field: str) -> Exception:
    message = f"Nova answered {answer.status_code}: {answer.text[:300]}"
    # 403 is a policy that an operator corrects: the events must not be lost until then.
    if answer.status_code >= 500 or answer.status_code in (403, 408, 429):
        return Unavailable(message, status=answer.status_code)
    return Invalid(message, field=field, status=answer.status_code)


def _instance(uuid: str, body: Any) -> Instance:
    """Parse the body of a server. Nova shows the host of a server only to an administrator."""
    server = body.get("server") if isinstance(body, Mapping) else None
    if not isinstance(server, Mapping):
        raise Unavailable("unexpected response from Nova: no server")
    host_key = "OS-EXT-SRV-ATTR:host"
    return Instance(
        uuid=uuid,
        status=str(server.get("status", "UNKNOWN")),
        host=server.get(host_key) or None,
        node=server.get("OS-EXT-SRV-ATTR:hypervisor_hostname") or None,
        task=server.get("OS-EXT-STS:task_state") or None,
        host_visible=host_key in server,
    )


def _server(uuid: str, body: Any) -> Server:
    """Parse the body of a server, with its project and the device profile of its flavor."""
    instance = _instance(uuid, body)
    server = body["server"]
    flavor = server.get("flavor")
    specs = flavor.get("extra_specs") if isinstance(flavor, Mapping) else None
    profile = specs.get(PROFILE_KEY) if isinstance(specs, Mapping) else None
    return Server(
        uuid=uuid,
        status=instance.status,
        project=str(server.get("tenant_id") or ""),
        host=instance.host,
        node=instance.node,
        task=instance.task,
        locked=bool(server.get("locked")),
        profile=None if profile is None else str(profile),
        host_visible=instance.host_visible,
    )


def _actions(body: Any) -> Sequence[Action]:
    with _expecting("list of actions"):
        return tuple(
            Action(
                name=str(item["action"]),
                request=str(item["request_id"]),
                user=None if item.get("user_id") is None else str(item["user_id"]),
            )
            for item in body["instanceActions"]
        )


def _events(body: Any) -> Sequence[Event]:
    with _expecting("action"):
        return tuple(
            Event(str(item["event"]), item.get("finish_time") is not None, item.get("result"))
            # Nova leaves the key out if its policy hides the events from this service.
            for item in body["instanceAction"].get("events") or ()
        )


def _server_uuids(body: Any) -> list[str]:
    with _expecting("list of servers"):
        return [str(row["id"]) for row in body["servers"]]


def _says_no_instance(answer: Any) -> bool:
    # A wrong endpoint also gives 404; only Nova's own error may discard an event.
    try:
        return "itemNotFound" in answer.json()
    except ValueError:
        return False
