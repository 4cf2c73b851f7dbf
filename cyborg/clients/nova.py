# SPDX-License-Identifier: Apache-2.0
"""Telling Nova of accelerator requests, by its external events, and asking after its servers."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from keystoneauth1 import adapter, loading
from keystoneauth1 import exceptions as ks
from oslo_config import cfg

from cyborg.core.audit_view import Instance
from cyborg.core.errors import Invalid, Misconfigured, TimedOut, Unavailable

MICROVERSION = "2.82"
"""The first that knows the event accelerator-request-bound."""

BOUND = "accelerator-request-bound"
GONE = 404
NO_HOST_YET = 422

_PATH = "/os-server-external-events"
_PAGE = 1000  # servers of one answer; what Nova allows by default
_PAGES = 20  # of one host


class Nova:
    """The calls of Nova's that a conductor makes."""

    def __init__(self, adapter: adapter.Adapter, timeout: float = 30.0) -> None:
        """Use a keystoneauth adapter; ``timeout`` is in seconds, for each request."""
        self._adapter = adapter
        self._timeout = timeout

    def send(self, events: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Post events and return Nova's status code for each, in their order.

        200: taken. 422: the instance has no host yet, which is normal while it is built. 404: no
        such instance. Raises Invalid when Nova took none and says it is our mistake, Unavailable
        when it failed or did not answer, TimedOut when it did not in time.
        """
        answer = self._request(_PATH, "POST", json={"events": [dict(event) for event in events]})
        if answer.status_code in (200, 207):
            return _codes(answer, events)
        if answer.status_code == GONE and _says_no_instance(answer):
            return (GONE,) * len(events)
        raise _refusal(answer, "events")

    def on_host(self, host: str) -> frozenset[str]:
        """Return the uuids of the servers that are on a host, in whatever project.

        The host is named as Nova names it. Needs the right to list all servers. Raises Unavailable,
        TimedOut, Invalid.
        """
        found: set[str] = set()
        base = f"/servers?all_tenants=1&host={quote(host, safe='')}&limit={_PAGE}"
        path = base
        for _ in range(_PAGES):
            rows = _rows(self._read(path))
            new = set(rows) - found
            found |= new
            # The end is an empty page: an operator may have lowered Nova's own limit.
            if not new:
                return frozenset(found)
            path = f"{base}&marker={quote(rows[-1], safe='')}"
        raise Unavailable(f"Nova lists more than {len(found)} servers on host {host}")

    def server(self, uuid: str) -> Instance | None:
        """Return a server, None when Nova has none. Raises Unavailable, TimedOut, Invalid."""
        body = self._read(f"/servers/{quote(uuid, safe='')}", gone=True)
        return None if body is None else _instance(uuid, body)

    def _read(self, path: str, *, gone: bool = False) -> Any:
        """Return the body of an answer; None for one that does not exist, if it may be ``gone``."""
        answer = self._request(path, "GET")
        if gone and answer.status_code == GONE and _says_no_instance(answer):
            return None
        if answer.status_code != 200:
            raise _refusal(answer, "server")
        try:
            return answer.json()
        except ValueError as bad:
            raise Unavailable(f"Nova answered what is no JSON: {answer.text[:100]!r}") from bad

    def _request(self, path: str, verb: str, **more: Any) -> Any:
        try:
            return self._adapter.request(
                path,
                verb,
                microversion=MICROVERSION,
                raise_exc=False,
                timeout=self._timeout,
                **more,
            )
        except ks.ConnectTimeout as bad:
            raise TimedOut(f"Nova did not answer in {self._timeout:g} s: {bad}") from bad
        except ks.ClientException as bad:
            raise Unavailable(f"Nova cannot be reached: {bad}") from bad


def make(conf: cfg.ConfigOpts) -> Nova:
    """Build the client from section [nova]. Raises Misconfigured when the section is unusable."""
    try:
        auth = loading.load_auth_from_conf_options(conf, "nova")
        session = loading.load_session_from_conf_options(conf, "nova", auth=auth)
        made = loading.load_adapter_from_conf_options(conf, "nova", session=session, auth=auth)
    except (ks.ClientException, cfg.Error, ValueError) as bad:
        raise Misconfigured(f"[nova]: {bad}", option="nova.auth_type") from bad
    if conf.nova.notify and auth is None and not conf.nova.endpoint_override:
        raise Misconfigured(
            "[nova] auth_type is not set: expected the name of an auth plugin and its options, or "
            "notify = false in an installation without Nova",
            option="nova.auth_type",
        )
    return Nova(made, conf.nova.request_timeout)


def _codes(answer: Any, events: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Read the code of each event; one that Nova leaves out has the code of the whole."""
    if answer.status_code == 200:
        return (200,) * len(events)
    try:
        found = {
            (item.get("name"), item.get("server_uuid"), item.get("tag")): int(item["code"])
            for item in answer.json()["events"]
        }
    except (ValueError, KeyError, TypeError, AttributeError) as bad:
        raise Unavailable(f"Nova answered 207 with what is no list of events: {bad}") from bad
    return tuple(
        found.get((event.get("name"), event.get("server_uuid"), event.get("tag")), 200)
        for event in events
    )


def _refusal(answer: Any, field: str) -> Exception:
    told = f"Nova answered {answer.status_code}: {answer.text[:300]}"
    if answer.status_code >= 500 or answer.status_code in (401, 403, 408, 429):
        return Unavailable(told, status=answer.status_code)
    return Invalid(told, field=field, status=answer.status_code)


def _instance(uuid: str, body: Any) -> Instance:
    """Read a server; who is no administrator for Nova is told no hosts."""
    if not isinstance(body, Mapping) or not isinstance(server := body.get("server"), Mapping):
        raise Unavailable("Nova answered what is no server")
    host = "OS-EXT-SRV-ATTR:host"
    return Instance(
        uuid=uuid,
        status=str(server.get("status", "UNKNOWN")),
        host=server.get(host) or None,
        node=server.get("OS-EXT-SRV-ATTR:hypervisor_hostname") or None,
        task=server.get("OS-EXT-STS:task_state") or None,
        told=host in server,
    )


def _rows(body: Any) -> list[str]:
    try:
        return [str(row["id"]) for row in body["servers"]]
    except (KeyError, TypeError) as bad:
        raise Unavailable(f"Nova answered what is no list of servers: {bad}") from bad


def _says_no_instance(answer: Any) -> bool:
    # A wrong endpoint is a 404 as well; only Nova's own words may drop an event.
    try:
        return "itemNotFound" in answer.json()
    except ValueError:
        return False
